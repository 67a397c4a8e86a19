"""The classes of the engine, and the values that they take."""
