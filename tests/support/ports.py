"""Ports for tests that must name one before they listen, or at which no process listens."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path
from typing import Final

FIRST: Final = 10_000
"""Lowest port; from here to the ports that the system gives, it gives none by itself."""

_numbers = itertools.count()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port at which no process listens, and which the system gives to no other process.

    Processes that ask at the same time begin at different ports.
    """
    range_ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    count = int(range_[0]) - FIRST
    assert count > 0, range_
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in itertools.islice(_numbers, count):
        port = FIRST + (os.getpid() * 101 + number) % count
        try:
            socket.create_server((host, port), family=family).close()
        except OSError:
            continue
        return port
    raise AssertionError("no port is free")
