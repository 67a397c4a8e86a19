"""Accelerators of this process, and their memory.

This room must not import `transport`, which handles the memory of other processes.
"""
