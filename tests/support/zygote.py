"""Peers that are forks of a process which has imported their module before, their zygote.

An interpreter that imports kvplan takes half a second of processor time, and the suite starts a
thousand peers. A fork takes milliseconds. It has the modules of its zygote, but no memory, thread
or descriptor of another peer, since a zygote only imports.

`multiprocessing.forkserver` is not enough: tests wait for peers and see them stop, which only their
parent can. A zygote forks twice. As the process between ends, the tests inherit the peer.

As a program, this file is a zygote.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

READ_AT_START = ("KVPLAN_", "LD_", "MALLOC_", "OPENBLAS_", "PYTHON")
"""Prefixes of variables that the interpreter, or a module while it is imported, reads."""
MAX_ZYGOTES = 4  # of one process of the tests; each holds some 40 MB
MAX_REQUEST_NBYTES = 1 << 20
HUGE_PAGE = 1 << 21  # the system aligns large arrays to it
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h

_prctl = ctypes.CDLL(None).prctl
IS_USABLE = "LD_PRELOAD" not in os.environ and _prctl(PR_SET_CHILD_SUBREAPER, 0) == 0
"""False under sanitizers, whose runtimes do not expect forks, and where qemu-user emulates."""


class Zygote(NamedTuple):
    """A zygote that runs. The tests hold no descriptor of it, which a test would find."""

    pid: int
    address: bytes


_zygotes: dict[tuple[object, ...], Zygote] = {}
_lock = threading.Lock()
os.register_at_fork(after_in_child=_zygotes.clear)


class Forked:
    """A process that a zygote has forked: a child of this one, with the methods of Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        while (code := self.poll()) is None:
            process = os.pidfd_open(self.pid)
            try:
                if not select.select([process], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            finally:
                os.close(process)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(
    module: str,
    flags: Sequence[str],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    connection: int,
    output: int,
) -> Forked:
    """Start a peer: `python FLAGS -m tests.support.peer MODULE ARGUMENTS`, but forked.

    Args:
        module: module with the peer's names.
        flags: flags of the interpreter.
        arguments: arguments of the module's `names`.
        environment: variables of the peer.
        connection: descriptor that becomes its stdin.
        output: descriptor that becomes its stdout and stderr.
    """
    at_start = {name: environment[name] for name in environment if name.startswith(READ_AT_START)}
    key = module, *flags, *sorted(at_start.items())
    request = pickle.dumps((arguments, dict(environment)))
    with _lock, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        if key not in _zygotes:
            _start(key, module, flags, environment)
        asking.connect(_zygotes[key].address)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(asking, [request], [connection, output])
            pid = int(asking.recv(64))
            asking.recv(64)  # nothing comes; its end says that the parent of the peer has ended
        finally:
            _prctl(PR_SET_CHILD_SUBREAPER, 0)
    return Forked(pid)


def _start(
    key: tuple[object, ...], module: str, flags: Sequence[str], environment: Mapping[str, str]
) -> None:
    _end_zygotes(MAX_ZYGOTES - 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind("")  # an abstract name, which the kernel chooses
        listening.listen()
        command = [sys.executable, *flags, "-m", "tests.support.zygote", module, str(os.getpid())]
        # A fork does not have the threads that NumPy would start.
        variables = {**environment, "OPENBLAS_NUM_THREADS": "1"}
        actions = [(os.POSIX_SPAWN_DUP2, listening.fileno(), 0)]
        pid = os.posix_spawn(sys.executable, command, variables, file_actions=actions)
        _zygotes[key] = Zygote(pid, listening.getsockname())


@atexit.register
def _end_zygotes(left: int = 0) -> None:
    """End the oldest of them."""
    while len(_zygotes) > left:
        oldest = _zygotes.pop(next(iter(_zygotes)))
        os.kill(oldest.pid, signal.SIGKILL)
        os.waitpid(oldest.pid, 0)


def main(module: str, tests: str) -> None:
    """Be a zygote until the tests end; in a fork, be its peer."""
    given = dict(os.environ)
    process = os.pidfd_open(int(tests))
    if os.getppid() != int(tests):
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tests.support import peer

    os.chdir(peer.ROOT)
    if module:
        with contextlib.suppress(Exception):  # each peer imports it again, and says why it cannot
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    listening = socket.socket(fileno=0)
    while process not in select.select([listening, process], [], [])[0]:
        if (received := _fork(listening)) is not None:
            break
    else:
        return
    os.close(process)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments, environment = received
    for name in given.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment.items() - given.items())
    # Two programs have unlike addresses, without which a test may not see one taken for the other.
    with mmap.mmap(-1, HUGE_PAGE * (1 + os.getpid() % 64), mmap.MAP_PRIVATE):
        peer.main(module, *arguments)


def _fork(listening: socket.socket) -> tuple[Sequence[str], dict[str, str]] | None:
    """Fork a peer. Returns its arguments and environment there, and None in the zygote."""
    asking, _ = listening.accept()
    with asking:
        request, descriptors, _, _ = socket.recv_fds(asking, MAX_REQUEST_NBYTES, 2)
        if between := os.fork():
            os.waitpid(between, 0)
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        if pid := os.fork():
            asking.send(b"%d" % pid)
            os._exit(0)
    listening.detach()
    connection, output = descriptors
    for old, new in ((connection, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    for descriptor in descriptors:
        os.close(descriptor)
    return pickle.loads(request)


if __name__ == "__main__":
    main(*sys.argv[1:])
