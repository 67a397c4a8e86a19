"""Access to the memory of other processes: a folder per transport, and what transports share.

This room must not import control messages, link states or caches. Transports know only addresses.
"""
