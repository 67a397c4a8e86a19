"""Access to the memory of other processes: a folder per transport, and what transports share.

No control message, link state or cache may enter: a transport knows addresses only.
"""
