"""Access to the memory of other processes: a folder for each transport, and shared code.

This room must not import control messages, link states or caches. Transports know only addresses.
"""
