"""Messages between engines: typed, authenticated, on one event loop in a thread of its own.

No plan, no memory and no transport may enter: what transports say of themselves is carried unread.
"""
