"""The network interfaces of this host, or of the network namespace that this process is in."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path
from typing import Final

_GET_FLAGS: Final = 0x8913  # SIOCGIFFLAGS
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR
_LOOPBACK = 0x8
_IN_USE = 0x1 | 0x40  # up and running
_REQUEST: Final = struct.Struct("16sH22x")  # struct ifreq, with its flags
_INET6_TABLE: Final = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE: Final = "00"


def usable_interfaces() -> list[str]:
    """Those that are up and have an address; the loopback only where there is no other."""
    with_inet6 = _with_inet6()
    usable, loopbacks = [], []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            flags = _flags(asking, name)
            if flags & _LOOPBACK:
                loopbacks.append(name)
            elif flags & _IN_USE == _IN_USE and (name in with_inet6 or _has_inet(asking, name)):
                usable.append(name)
    return usable or loopbacks


def _flags(asking: socket.socket, name: str) -> int:
    try:
        answer = fcntl.ioctl(asking, _GET_FLAGS, _REQUEST.pack(name.encode(), 0))
    except OSError:  # it has just gone
        return 0
    return int(_REQUEST.unpack(answer)[1])


def _has_inet(asking: socket.socket, name: str) -> bool:
    try:
        fcntl.ioctl(asking, _GET_ADDRESS, _REQUEST.pack(name.encode(), 0))
    except OSError:
        return False
    return True


def _with_inet6() -> set[str]:
    """Interfaces with an IPv6 address that is not only the link's."""
    try:
        rows = [line.split() for line in _INET6_TABLE.read_text().splitlines()]
    except OSError:  # no IPv6 in this kernel
        return set()
    return {row[5] for row in rows if len(row) == 6 and row[3] == _GLOBAL_SCOPE}
