"""The control protocol: typed messages, authentication, channels between engines."""
