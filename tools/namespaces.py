"""Virtual hosts on one machine: network namespaces joined by veth pairs.

    with namespaces(2) as (prefill, decode):
        server = prefill.start(sys.executable, "-m", "my_server", prefill.address)
        decode.run(sys.executable, "-m", "my_client", prefill.address)

Two namespaces are the ends of one veth pair; more are joined by a bridge in another namespace. Each
has its own loopback, which is up, and its own /sys with its interfaces. Namespaces have no names:
each lives as long as a process in it, here the keeper, which ends with its standard input. So even
a killed process leaves nothing behind.

Works as root, and as any user if the kernel permits user namespaces. In a shell,
`python -m tools.namespaces 2 -- COMMAND` runs a command in the first of two, and `--check` tells
whether namespaces can be made.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INTERFACE = "eth0"
"""The interface of every namespace."""

PREFIX = "10.77.0."
"""Prefix of addresses. They are private to the namespaces: several tests may use the same ones."""

KEEPER = "mount -t sysfs sysfs /sys && ip link set lo up && echo ready && exec cat"
PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
USERS_OWN = ("--user", "--map-root-user")


class NamespacesError(RuntimeError):
    """Namespaces cannot be made here; the message has the reason and the remedy."""


@dataclass
class Namespace:
    """A network namespace. Closing it kills the processes that were started in it."""

    address: str
    interface: str
    _keeper: subprocess.Popen[str]
    _enter: tuple[str, ...]
    _started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def command(self, *argv: str | Path) -> list[str]:
        """Return a command that runs `argv` in the namespace, in the current directory."""
        return [*self._enter, "env", f"--chdir={Path.cwd()}", *map(str, argv)]

    def run(self, *argv: str | Path, **arguments: Any) -> subprocess.CompletedProcess[Any]:
        """Call `subprocess.run` in the namespace; a failure raises unless check=False."""
        arguments.setdefault("check", True)
        return subprocess.run(self.command(*argv), **arguments)  # noqa: PLW1510

    def start(self, *argv: str | Path, **arguments: Any) -> subprocess.Popen[Any]:
        """Call `subprocess.Popen` in the namespace; the pid is that of the program itself."""
        process = subprocess.Popen(self.command(*argv), **arguments)
        self._started.append(process)
        return process

    def cut(self) -> None:
        """Unplug the cable: packets get lost, connections stay."""
        self.run("ip", "link", "set", self.interface, "down")

    def restore(self) -> None:
        """Plug the cable in again."""
        self.run("ip", "link", "set", self.interface, "up")

    def wait_until_up(self, interface: str = INTERFACE) -> None:
        """Wait until the kernel has noticed that the cable is plugged in.

        Until then, for up to a second, programs find an interface without a cable.

        Raises:
            NamespacesError: the cable is not plugged in.
        """
        deadline = time.monotonic() + 10
        # Reading `carrier` makes the kernel look. Interfaces without cables report "unknown".
        ask = ("sh", "-c", f"cd /sys/class/net/{interface} && cat carrier operstate")
        while self.run(*ask, capture_output=True, text=True).stdout.endswith("down\n"):
            if time.monotonic() > deadline:
                raise NamespacesError(f"{interface} of {self.address} does not come up")

    def shape(self, *words: str) -> None:
        """Set the queueing discipline of sent packets, in words of tc: "netem", "delay", "5ms".

        Raises:
            NamespacesError: this kernel does not have the discipline.
        """
        _say(self, "tc", "qdisc", "replace", "dev", self.interface, "root", *words)

    @property
    def pid(self) -> int:
        """The process id of the keeper."""
        return self._keeper.pid

    def close(self) -> None:
        """Kill the processes that were started in the namespace, and its keeper."""
        for process in self._started:
            with process:  # closes its pipes as well
                process.kill()
        self._keeper.kill()
        self._keeper.communicate()


@contextmanager
def namespaces(count: int) -> Iterator[list[Namespace]]:
    """Make `count` namespaces that reach each other, until the end of the block.

    Raises:
        ValueError: `count` is not 1 to 250.
        NamespacesError: the kernel or this user cannot make them, or a program is missing.
    """
    if not 1 <= count <= 250:
        raise ValueError(f"count={count}: expected 1 to 250")
    with ExitStack() as opened:
        first = _first(opened)
        others = [_made(opened, first, number) for number in range(2, count + 1)]
        made = [first, *others]
        if count == 2:
            _join(first, INTERFACE, others[0])
        elif count > 2:
            _join_by_bridge(_made(opened, first, 0), made)
        for each in made if count > 1 else ():
            each.run("ip", "address", "add", f"{each.address}/24", "dev", INTERFACE)
            each.run("ip", "link", "set", INTERFACE, "up")
        for each in made if count > 1 else ():
            each.wait_until_up()
        yield made


def enter(keeper: int) -> None:
    """Move this process, which must have a single thread, into the namespaces of process `keeper`.

    For processes that are not started by a command, such as children of multiprocessing.

    Raises:
        OSError: not permitted, or this process has several threads.
    """
    wanted = [
        name
        for name in ("user", "mnt", "net")
        if Path(f"/proc/{keeper}/ns/{name}").stat() != Path(f"/proc/self/ns/{name}").stat()
    ]
    folder = Path.cwd()
    for file in [os.open(f"/proc/{keeper}/ns/{name}", os.O_RDONLY) for name in wanted]:
        # os.setns needs Python 3.12.
        if ctypes.CDLL(None, use_errno=True).setns(file, 0):
            code = ctypes.get_errno()
            raise OSError(code, f"setns to the namespaces of {keeper}: {os.strerror(code)}")
        os.close(file)
    os.chdir(folder)


def refusal() -> str:
    """Return the reason why namespaces cannot be made here; empty: they can."""
    try:
        with namespaces(2):
            return ""
    except NamespacesError as error:
        return str(error)


def _first(opened: ExitStack) -> Namespace:
    """Make the first namespace: as this user or, if that fails, in a new user namespace."""
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            raise NamespacesError(f"no program {program}: apt install {package}")
    reasons = []
    for users_own in ((), USERS_OWN):
        try:
            return _kept(opened, ("unshare", *users_own), 1, users_own=bool(users_own))
        except NamespacesError as error:
            reasons.append(str(error))
    raise NamespacesError(
        "network namespaces cannot be made here: run as root with CAP_SYS_ADMIN and CAP_NET_ADMIN "
        "(docker run --privileged), or let users make user namespaces. As this user: "
        f"{reasons[0]}; in a user namespace: {reasons[1]}"
    )


def _made(opened: ExitStack, first: Namespace, number: int) -> Namespace:
    """Make another namespace, which belongs to the user namespace of the first one."""
    users_own = "--user" in first._enter
    inside = ("nsenter", f"--target={first.pid}", "--user", "--preserve-credentials")
    make = (*inside, "unshare") if users_own else ("unshare",)
    return _kept(opened, make, number, users_own=users_own)


def _kept(opened: ExitStack, make: tuple[str, ...], number: int, *, users_own: bool) -> Namespace:
    """Make a namespace with its keeper; `number` is the last part of its address."""
    keeper = subprocess.Popen(
        [*make, "--net", "--mount", "--propagation", "slave", "sh", "-c", KEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    user = ("--user", "--preserve-credentials") if users_own else ()
    enter = ("nsenter", f"--target={keeper.pid}", *user, "--mount", "--net", "--")
    made = Namespace(f"{PREFIX}{number}", INTERFACE, keeper, enter)
    assert keeper.stdout is not None
    if keeper.stdout.readline() != "ready\n":
        assert keeper.stderr is not None
        said = keeper.stderr.read().strip()
        made.close()
        raise NamespacesError(said or "the keeper of the namespace was killed")
    opened.callback(made.close)
    return made


def _join(here: Namespace, name: str, other: Namespace) -> None:
    """Join `name` in one namespace to the interface of the other by a veth pair."""
    _say(here, "ip", "link", "add", name, "type", "veth",
         "peer", "name", other.interface, "netns", str(other.pid))  # fmt: skip


def _join_by_bridge(switch: Namespace, hosts: list[Namespace]) -> None:
    _say(switch, "ip", "link", "add", "bridge", "up", "type", "bridge")
    for number, host in enumerate(hosts, 1):
        port = f"port{number}"
        _join(switch, port, host)
        _say(switch, "ip", "link", "set", port, "master", "bridge", "up")


def _say(where: Namespace, *argv: str) -> None:
    """Run a command; report a failure as a missing feature of the kernel."""
    done = where.run(*argv, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NamespacesError(f"{' '.join(argv)}: {done.stderr.strip()}")


def main() -> int:
    """Run a command in the first of several namespaces; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("count", type=int, nargs="?", default=2, help="how many namespaces (default: 2)")
    add("command", nargs="*", metavar="-- COMMAND", help="default: a shell")
    add("--check", action="store_true", help="only print whether they can be made")
    asked = parser.parse_args()
    if asked.check:
        reason = refusal()
        print(reason or "namespaces can be made here", file=sys.stderr if reason else sys.stdout)
        return int(bool(reason))
    with namespaces(asked.count) as made:
        status: int = made[0].run(*(asked.command or ["sh"]), check=False).returncode
        return status


if __name__ == "__main__":
    sys.exit(main())
