"""Changes to one side of a cable: rate, loss and disconnection."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from tools.namespaces import INTERFACE, Namespace, NamespacesError

DEADLINE_S = 30.0
LISTEN = "0A"  # the state LISTEN in /proc/net/tcp

# Classic BPF that loads a random number: below the limit it returns 2 (drop), otherwise 0 (pass).
LOSE = "4,32 0 0 4294963256,53 0 1 {limit},6 0 0 0,6 0 0 2"


def received(host: Namespace, interface: str = INTERFACE) -> int:
    """Return the bytes that a host's interface has received."""
    return read_counter(host, interface, "statistics/rx_bytes")


def listening(host: Namespace, pid: int) -> list[int]:
    """Return the TCP ports at which a process of the host listens."""
    sockets = {path.stat().st_ino for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists()}
    files = ("/proc/net/tcp", "/proc/net/tcp6")
    rows = host.run("cat", *files, capture_output=True, text=True).stdout.splitlines()
    fields = [row.split() for row in rows]
    return [
        int(field[1].rpartition(":")[2], 16)
        for field in fields
        if field[3] == LISTEN and int(field[9]) in sockets
    ]


def read_counter(host: Namespace, interface: str, file: str) -> int:
    argv = ("cat", f"/sys/class/net/{interface}/{file}")
    return int(host.run(*argv, capture_output=True, text=True).stdout)


def wait_for_bytes(host: Namespace, nbytes: int) -> None:
    """Wait until a host's interface has received `nbytes` more."""
    enough, deadline = received(host) + nbytes, time.monotonic() + DEADLINE_S
    while received(host) < enough:
        assert time.monotonic() < deadline, f"{nbytes} bytes have not come"


def limit(host: Namespace, rate: str) -> None:
    """Limit a host's rate, such as "100mbit"; packets that would wait over 50 ms are dropped."""
    host.shape("tbf", "rate", rate, "burst", "128kb", "latency", "50ms")


def lose(host: Namespace, percent: float) -> None:
    """Drop a random share of the packets that a host sends.

    Raises:
        NamespacesError: the kernel has no classifier for packets.
    """
    command = ("tc", "filter", "add", "dev", host.interface, "egress", "bpf", "da", "bytecode")
    program = LOSE.format(limit=round(percent / 100 * 2**32))
    for argv in (("tc", "qdisc", "add", "dev", host.interface, "clsact"), (*command, program)):
        done = host.run(*argv, check=False, capture_output=True, text=True)
        if done.returncode:
            raise NamespacesError(f"{' '.join(argv)}: {done.stderr.strip()}")


def mend(*hosts: Namespace) -> None:
    """Restore the hosts' cables to their first state."""
    for host in hosts:
        host.restore()
        for kind in ("root", "clsact"):
            argv = ("tc", "qdisc", "del", "dev", host.interface, kind)
            host.run(*argv, check=False, capture_output=True)
    for host in hosts:
        host.wait_until_up()


def unplug(host: Namespace) -> None:
    """Delete a host's cable with the interfaces at both ends."""
    host.run("ip", "link", "delete", host.interface)


def plug(here: Namespace, there: Namespace) -> None:
    """Join two hosts by a new cable with the first addresses."""
    ends = ("type", "veth", "peer", "name", there.interface, "netns", str(there.pid))
    here.run("ip", "link", "add", here.interface, *ends)
    for host in (here, there):
        attach(host)
    for host in (here, there):
        host.wait_until_up()


def attach(host: Namespace) -> None:
    """Give a host's interface its address, and set it up."""
    host.run("ip", "address", "add", f"{host.address}/24", "dev", host.interface)
    host.run("ip", "link", "set", host.interface, "up")


def is_plugged(here: Namespace) -> bool:
    """Return True if a host has its interface."""
    with suppress(OSError):
        argv = ("ip", "link", "show", here.interface)
        return here.run(*argv, check=False, capture_output=True).returncode == 0
    return False
