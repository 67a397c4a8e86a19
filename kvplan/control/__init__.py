"""Authenticated, typed messages between engines, on one event loop in its own thread.

This room must not import plans, memory or transports. It carries the metadata of transports unread.
"""
