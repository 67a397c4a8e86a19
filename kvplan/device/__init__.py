"""Accelerators of this process: which there is, what it offers an engine, and memory on it."""
