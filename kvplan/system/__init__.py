"""What every room needs of its process and machine: loggers, threads, limits, measured values.

Nothing here knows caches, plans or peers.
"""
