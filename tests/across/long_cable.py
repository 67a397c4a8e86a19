"""A cable with a delay, for kernels that cannot delay packets themselves (no netem).

Its ends are TAP devices. A process of this file holds each of them: it passes frames of its device
to the other process, and delivers frames of the other process to its device after the delay. A
device ends with its process.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.across import network
from tools.namespaces import Namespace, NamespacesError

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 2, 0x1000
FRAME = 65536


@contextmanager
def long_cable(here: Namespace, there: Namespace, delay_s: float) -> Iterator[None]:
    """Replace the cable between two hosts by one with a delay.

    Raises:
        NamespacesError: TAP devices are not available.
    """
    if not os.access(TUN, os.R_OK | os.W_OK):
        raise NamespacesError(f"{TUN} cannot be opened: load the module tun, as root")
    network.unplug(here)
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    started = []
    try:
        for host, end in zip((here, there), ends, strict=True):
            argv = (sys.executable, "-m", __spec__.name, str(end.fileno()), host.interface)
            process = host.start(
                *argv, str(delay_s), pass_fds=(end.fileno(),), stdout=-1, stderr=-1, text=True
            )
            started.append(process)
            if process.stdout.readline() != "ready\n":
                raise NamespacesError(f"no TAP device: {process.stderr.read()}")
            network.attach(host)
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()
        for end in ends:
            end.close()


def carry(tap: int, other: socket.socket, delay_s: float) -> None:
    """Pass frames in both directions, delaying those to `tap`, until the other process ends."""
    under_way: deque[tuple[float, bytes]] = deque()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([tap, other], [], [], wait)
        if tap in ready:
            other.send(os.read(tap, FRAME))
        if other in ready:
            frame = other.recv(FRAME)
            if not frame:
                return
            under_way.append((time.monotonic() + delay_s, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            with suppress(OSError):  # a device that is down loses the frame
                os.write(tap, under_way.popleft()[1])


def main(end: str, interface: str, delay_s: str) -> None:
    """Make the device in this network namespace, print "ready", and pass frames."""
    tap = os.open(TUN, os.O_RDWR)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", interface.encode(), IFF_TAP | IFF_NO_PI))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    with socket.socket(fileno=int(end)) as other:
        carry(tap, other, float(delay_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
