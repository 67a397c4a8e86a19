"""What a network does to packets, done to one side of a cable."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from tools.namespaces import INTERFACE, Namespace, NamespacesError

DEADLINE_S = 30.0
LISTEN = "0A"  # the state, in /proc/net/tcp

# Classic BPF: load a random number; if it is at least the limit, 0 (let it pass), else 2 (drop it).
LOSE = "4,32 0 0 4294963256,53 0 1 {limit},6 0 0 0,6 0 0 2"


def received(host: Namespace, interface: str = INTERFACE) -> int:
    """Bytes that its interface has got so far."""
    return _number(host, interface, "statistics/rx_bytes")


def listening(host: Namespace, pid: int) -> list[int]:
    """The TCP ports at which that process of it awaits connections."""
    sockets = {path.stat().st_ino for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists()}
    files = ("/proc/net/tcp", "/proc/net/tcp6")
    rows = host.run("cat", *files, capture_output=True, text=True).stdout.splitlines()
    fields = [row.split() for row in rows]
    return [
        int(field[1].rpartition(":")[2], 16)
        for field in fields
        if field[3] == LISTEN and int(field[9]) in sockets
    ]


def _number(host: Namespace, interface: str, file: str) -> int:
    argv = ("cat", f"/sys/class/net/{interface}/{file}")
    return int(host.run(*argv, capture_output=True, text=True).stdout)


def wait_for_bytes(host: Namespace, nbytes: int) -> None:
    """Return as soon as its interface has got so many more."""
    enough, deadline = received(host) + nbytes, time.monotonic() + DEADLINE_S
    while received(host) < enough:
        assert time.monotonic() < deadline, f"{nbytes} bytes have not come"


def limit(host: Namespace, rate: str) -> None:
    """Let it send no faster than that ("100mbit"); what cannot wait 50 ms is dropped."""
    host.shape("tbf", "rate", rate, "burst", "128kb", "latency", "50ms")


def lose(host: Namespace, percent: float) -> None:
    """Drop so many of the packets that it sends, at random.

    Raises:
        NamespacesError: the kernel has no classifier to do it with.
    """
    what = ("tc", "filter", "add", "dev", host.interface, "egress", "bpf", "da", "bytecode")
    program = LOSE.format(limit=round(percent / 100 * 2**32))
    for argv in (("tc", "qdisc", "add", "dev", host.interface, "clsact"), (*what, program)):
        done = host.run(*argv, check=False, capture_output=True, text=True)
        if done.returncode:
            raise NamespacesError(f"{' '.join(argv)}: {done.stderr.strip()}")


def mend(*hosts: Namespace) -> None:
    """Undo all of this."""
    for host in hosts:
        host.restore()
        for kind in ("root", "clsact"):
            argv = ("tc", "qdisc", "del", "dev", host.interface, kind)
            host.run(*argv, check=False, capture_output=True)
    for host in hosts:
        host.wait_until_up()


def unplug(host: Namespace) -> None:
    """Let the cable be gone, and with it the interfaces at both ends."""
    host.run("ip", "link", "delete", host.interface)


def plug(here: Namespace, there: Namespace) -> None:
    """Join two hosts by a cable, as they were."""
    ends = ("type", "veth", "peer", "name", there.interface, "netns", str(there.pid))
    here.run("ip", "link", "add", here.interface, *ends)
    for host in (here, there):
        attach(host)
    for host in (here, there):
        host.wait_until_up()


def attach(host: Namespace) -> None:
    """Give its interface its address, and let it work."""
    host.run("ip", "address", "add", f"{host.address}/24", "dev", host.interface)
    host.run("ip", "link", "set", host.interface, "up")


def plugged(here: Namespace) -> bool:
    """Whether it has its interface."""
    with suppress(OSError):
        argv = ("ip", "link", "show", here.interface)
        return here.run(*argv, check=False, capture_output=True).returncode == 0
    return False
