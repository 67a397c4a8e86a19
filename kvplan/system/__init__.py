"""Services of the process and machine for every room: loggers, threads, limits, users, files.

This room does not know caches, plans or peers.
"""
