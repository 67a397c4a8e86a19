"""What every room needs of its process and machine: loggers, threads, limits, users, files.

Nothing here knows caches, plans or peers.
"""
