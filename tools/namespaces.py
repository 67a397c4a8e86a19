"""Hosts of our own on one machine: network namespaces joined by veth pairs.

    with namespaces(2) as (prefill, decode):
        server = prefill.start(sys.executable, "-m", "my_server", prefill.address)
        decode.run(sys.executable, "-m", "my_client", prefill.address)

Two are the ends of one veth pair; more hang on a bridge, which has a namespace of its own. Each has
its loopback up, and a /sys of its own, where its interfaces are. They have no names at all: a
namespace lives as long as some process is in it, here the keeper, which ends with its standard
input. So nothing is left behind, not even by a process that was killed.

Works as root, and as any user where the kernel lets users have user namespaces. In a shell,
`python -m tools.namespaces 2 -- COMMAND` runs a command in the first of two, and `--check` says
whether they can be made.
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
"""Addresses are of no network but that of the namespaces: any number of tests may use the same."""

KEEPER = "mount -t sysfs sysfs /sys && ip link set lo up && echo ready && exec cat"
PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
USERS_OWN = ("--user", "--map-root-user")


class NamespacesError(RuntimeError):
    """Namespaces cannot be made here; the message says why, and what would help."""


@dataclass
class Namespace:
    """One of them. Processes started in it are killed with it."""

    address: str
    interface: str
    _keeper: subprocess.Popen[str]
    _enter: tuple[str, ...]
    _started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def command(self, *argv: str | Path) -> list[str]:
        """`argv` as a command of this process that runs in the namespace, in this directory."""
        return [*self._enter, "env", f"--chdir={Path.cwd()}", *map(str, argv)]

    def run(self, *argv: str | Path, **arguments: Any) -> subprocess.CompletedProcess[Any]:
        """`subprocess.run` in the namespace; a failure is an exception unless check=False."""
        arguments.setdefault("check", True)
        return subprocess.run(self.command(*argv), **arguments)  # noqa: PLW1510

    def start(self, *argv: str | Path, **arguments: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen` in the namespace; its pid is that of the program itself."""
        process = subprocess.Popen(self.command(*argv), **arguments)
        self._started.append(process)
        return process

    def cut(self) -> None:
        """Take the cable out: packets get lost, connections stay."""
        self.run("ip", "link", "set", self.interface, "down")

    def restore(self) -> None:
        """Put it in again."""
        self.run("ip", "link", "set", self.interface, "up")

    def wait_until_up(self, interface: str = INTERFACE) -> None:
        """Return when the kernel has noticed that its cable is in.

        Until then, which may be a second, programs find an interface without one.

        Raises:
            NamespacesError: it is not in.
        """
        deadline = time.monotonic() + 10
        # To be asked for its carrier lets the kernel look. What is no cable says "unknown".
        ask = ("sh", "-c", f"cd /sys/class/net/{interface} && cat carrier operstate")
        while self.run(*ask, capture_output=True, text=True).stdout.endswith("down\n"):
            if time.monotonic() > deadline:
                raise NamespacesError(f"{interface} of {self.address} does not come up")

    def shape(self, *words: str) -> None:
        """Give what this end sends a queueing discipline, as tc says it: "netem", "delay", "5ms".

        Raises:
            NamespacesError: this kernel does not know it.
        """
        _say(self, "tc", "qdisc", "replace", "dev", self.interface, "root", *words)

    @property
    def pid(self) -> int:
        """The keeper's."""
        return self._keeper.pid

    def close(self) -> None:
        """End all that runs in it, and thereby the namespace."""
        for process in self._started:
            with process:  # its pipes as well
                process.kill()
        self._keeper.kill()
        self._keeper.communicate()


@contextmanager
def namespaces(count: int) -> Iterator[list[Namespace]]:
    """Make `count` namespaces that reach each other, gone at the end of the block.

    Raises:
        ValueError: not 1 to 250.
        NamespacesError: not on this machine, not by this user, or a program is missing.
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
    """Move this process, which has no thread but this one, to where process `keeper` is.

    For those that are not started by a command: children of multiprocessing, say.

    Raises:
        OSError: not allowed; or there are threads.
    """
    wanted = [
        name
        for name in ("user", "mnt", "net")
        if Path(f"/proc/{keeper}/ns/{name}").stat() != Path(f"/proc/self/ns/{name}").stat()
    ]
    folder = Path.cwd()
    for file in [os.open(f"/proc/{keeper}/ns/{name}", os.O_RDONLY) for name in wanted]:
        # os.setns is of Python 3.12.
        if ctypes.CDLL(None, use_errno=True).setns(file, 0):
            code = ctypes.get_errno()
            raise OSError(code, f"setns to the namespaces of {keeper}: {os.strerror(code)}")
        os.close(file)
    os.chdir(folder)


def refusal() -> str:
    """Why namespaces cannot be made here; the empty string where they can."""
    try:
        with namespaces(2):
            return ""
    except NamespacesError as error:
        return str(error)


def _first(opened: ExitStack) -> Namespace:
    """The first namespace: as we are, else in a user namespace, where we are allowed everything."""
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
    """One more; all belong to the first one's user namespace."""
    users_own = "--user" in first._enter
    inside = ("nsenter", f"--target={first.pid}", "--user", "--preserve-credentials")
    make = (*inside, "unshare") if users_own else ("unshare",)
    return _kept(opened, make, number, users_own=users_own)


def _kept(opened: ExitStack, make: tuple[str, ...], number: int, *, users_own: bool) -> Namespace:
    """A namespace with its keeper; `number` is the last of its address."""
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
    """A veth pair from `name` here to the interface of the other one."""
    _say(here, "ip", "link", "add", name, "type", "veth",
         "peer", "name", other.interface, "netns", str(other.pid))  # fmt: skip


def _join_by_bridge(switch: Namespace, hosts: list[Namespace]) -> None:
    _say(switch, "ip", "link", "add", "bridge", "up", "type", "bridge")
    for number, host in enumerate(hosts, 1):
        port = f"port{number}"
        _join(switch, port, host)
        _say(switch, "ip", "link", "set", port, "master", "bridge", "up")


def _say(where: Namespace, *argv: str) -> None:
    """Run what fails where the kernel has no such kind of thing."""
    done = where.run(*argv, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NamespacesError(f"{' '.join(argv)}: {done.stderr.strip()}")


def main() -> int:
    """Run a command in the first of some namespaces; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("count", type=int, nargs="?", default=2, help="how many namespaces (default: 2)")
    add("command", nargs="*", metavar="-- COMMAND", help="default: a shell")
    add("--check", action="store_true", help="only say whether they can be made")
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
