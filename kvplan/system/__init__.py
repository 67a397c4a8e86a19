"""Services of the process and machine for every room: loggers, threads, limits, users, files.

Nothing here knows caches, plans or peers.
"""
