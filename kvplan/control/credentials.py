"""Who is at the other end of a Unix socket, as the kernel says."""

from __future__ import annotations

import socket
import struct
from typing import Final, NamedTuple

_UCRED: Final = struct.Struct("3i")  # pid, uid, gid


class Credentials(NamedTuple):
    """Of the process that connected, or that listened: as they were then."""

    pid: int
    uid: int


def peer_credentials(connection: socket.socket) -> Credentials:
    """Ask the kernel."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(found)
    return Credentials(pid, uid)
