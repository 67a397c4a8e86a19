"""Accelerators of this process: how to find them, and memory on them.

The memory of other processes may not enter: that is `transport`.
"""
