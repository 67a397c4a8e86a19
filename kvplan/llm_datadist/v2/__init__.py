"""The engine's classes, and the values that they take."""
