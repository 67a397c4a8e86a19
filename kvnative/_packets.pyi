import socket
from collections import deque
from typing import Any, Final

__all__ = ["LARGEST", "take_packets"]

LARGEST: Final[int]

def take_packets(
    packets: socket.socket,
    most: int,
    sender: object,
    queue: deque[Any],
    unread: deque[None],
    eventfd: int,
) -> bool: ...
