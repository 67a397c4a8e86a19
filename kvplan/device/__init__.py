"""Accelerators of this process: how to find them, and memory on them.

This room must not import `transport`, which has the memory of other processes.
"""
