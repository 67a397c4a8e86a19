"""A flood of connections from a peer."""

import contextlib
import select
import socket
import struct
import time
from collections import deque
from typing import Any

from tests.support.peer import Peer

HELD = 256
AT_ONCE = 50
TESTS = 0
"""The connection to them; see tests/support/peer.py."""


class Flood(Peer):
    """A process that begins at once. `flood` describes the arguments."""

    module = "tests.control.flood"

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.run("pass")
        self.send("result = flood(*arguments)", arguments=arguments)

    def end(self) -> None:
        self.send("pass")
        self.answer()


def names() -> dict[str, Any]:
    return {"flood": flood}


def flood(address: tuple[str, int], source: str, rate: float, opening: bytes) -> None:
    """Send `opening` on each connection, and hold the last HELD, until the test sends more."""
    held: deque[socket.socket] = deque()
    count, begun = 0, time.monotonic()
    reset = struct.pack("2i", 1, 0)  # a reset frees the port at once
    while True:
        # Catch up after a delay.
        wait_s = begun + count / rate - time.monotonic()
        if select.select([TESTS], [], [], max(0.0, wait_s))[0]:
            break
        for _ in range(AT_ONCE):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            connection.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
            connection.bind((source, 0))
            connection.setblocking(False)
            connection.connect_ex(address)
            with contextlib.suppress(OSError):
                connection.send(opening)
            held.append(connection)
            count += 1
        while len(held) > HELD:
            held.popleft().close()
