"""Peers as forks of a process that has imported their module once, a zygote.

An interpreter that imports kvplan takes half a second of processor time, and the suite starts a thousand
peers. A fork has the same names, but no memory, thread or descriptor of another peer: its zygote never
calls `names`. As a program, this file is a zygote, whose stdin listens for the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
READ_BY_NEW_PROGRAMS = ("LD_", "MALLOC_", "OPENBLAS_", "PYTHON")
"""Variables that a fork has too late: peers that differ in them have different zygotes."""
MAX_REQUEST_NBYTES = 1 << 20
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h

NOWHERE = b"\0"

_zygotes: dict[object, bytes] = {}
"""Where each one listens. The tests hold no descriptor of it, which a test would find."""


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
            ended = os.pidfd_open(self.pid)
            try:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            finally:
                os.close(ended)
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
    early = {it: text for it, text in environment.items() if it.startswith(READ_BY_NEW_PROGRAMS)}
    key = (os.getpid(), module, *flags, *early.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        try:
            asking.connect(_zygotes.get(key, NOWHERE))
        except ConnectionRefusedError:
            _zygotes[key] = _start(module, flags, environment)
            asking.connect(_zygotes[key])
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # inherits the child of the zygote's child, which ends
        try:
            request = pickle.dumps((tuple(arguments), dict(environment)))
            socket.send_fds(asking, [request], [connection, output])
            return Forked(int(asking.recv(64)))
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0)


def _start(module: str, flags: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """Start a zygote, which ends with this process; return where it listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind("")  # an abstract name, which the kernel chooses
        listening.listen()
        command = [sys.executable, *flags, "-m", "tests.support.zygote", module, str(os.getpid())]
        actions = [(os.POSIX_SPAWN_DUP2, listening.fileno(), 0)]
        os.posix_spawn(sys.executable, command, environment, file_actions=actions)
        return bytes(listening.getsockname())


def main(module: str, tests: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(tests):
        return
    from tests.support import peer

    os.chdir(peer.ROOT)
    if module:
        with contextlib.suppress(Exception):  # each peer imports it again, and says why it cannot
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    listening = socket.socket(fileno=0)
    while (arguments := _serve(listening)) is None:
        pass
    peer.main(module, *arguments)


def _serve(listening: socket.socket) -> tuple[str, ...] | None:
    """Fork a peer; return its arguments in the peer, and None in the zygote."""
    asking, _ = listening.accept()
    request, descriptors, _, _ = socket.recv_fds(asking, MAX_REQUEST_NBYTES, 2)
    reading, writing = os.pipe()
    # The child of a child that has ended is a child of the tests.
    if between := os.fork():
        os.waitpid(between, 0)
        asking.send(os.read(reading, 64))
        for it in (reading, writing, *descriptors):
            os.close(it)
        asking.close()
        return None
    if pid := os.fork():
        os.write(writing, b"%d" % pid)
        os._exit(0)
    listening.detach()
    asking.close()
    connection, output = descriptors
    for old, new in ((connection, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    for it in (reading, writing, *descriptors):
        os.close(it)
    arguments, environment = pickle.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    return arguments


if __name__ == "__main__":
    main(*sys.argv[1:])
