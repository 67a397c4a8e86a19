"""What the modules of the package share: the log, and checks of arguments."""
