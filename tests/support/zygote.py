"""Processes that are forks of a zygote, which has imported their modules.

An interpreter that imports kvplan takes half a second of processor time, and the suite starts a
thousand peers. A fork takes milliseconds. A fork has the modules of its zygote, but no memory,
thread or descriptor of another fork, since a zygote only imports.

`multiprocessing.forkserver` is not enough: tests wait for peers and see them stop, which only a
parent can. So a zygote forks twice, and when the process in the middle ends, the tests become the
parent of the other. This file is also the program of a zygote.
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
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
READ_AT_START = ("KVPLAN_TEST_", "LANG", "LC_", "LD_", "MALLOC_", "OPENBLAS_", "PYTHON")
"""Prefixes of variables that the interpreter, or a module while it is imported, reads."""
USED_LATER = (
    *("encodings.idna", "numpy.random", "kvnative._observed", "kvplan.device.ascend"),
    *("kvplan.device.cuda", "kvplan.engine.layer_event", "kvplan.planning.reference"),
    *(f"kvplan.transport.{name}.transport" for name in ("hccl", "tcp", "ucx")),
)
"""Modules that kvplan's engines and NumPy import at their first use, which is after a fork."""
MAX_ZYGOTES = 4  # of one process of the tests; each holds some 40 MB
MAX_REQUEST_NBYTES = 1 << 20
TIMEOUT_S = 120
NUM_LIMITS = 16  # of resources
HUGE_PAGE = 1 << 21  # the system aligns large arrays to this size
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h

_prctl = ctypes.CDLL(None).prctl
IS_USABLE = _prctl(PR_SET_CHILD_SUBREAPER, 0) == 0
"""False under qemu-user.

Forks can start threads under sanitizers, too, because a zygote has only one thread.
"""


Limits = dict[int, tuple[int, int]]
"""The soft and the hard limit of each resource."""

Request = tuple[Sequence[str], dict[str, str], Limits]
"""The arguments, the environment and the limits of a process."""


class Zygote(NamedTuple):
    """A running zygote. The tests keep no descriptor of it, which would be counted as a leak."""

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
    program: str,
    arguments: Sequence[str],
    imported: Sequence[str],
    flags: Sequence[str],
    environment: Mapping[str, str],
    descriptors: tuple[int, int, int],
) -> Forked:
    """Fork a process that calls `main` of a module, instead of `python FLAGS -m PROGRAM`.

    Args:
        program: name of that module.
        arguments: arguments of its `main`.
        imported: names of other modules that the zygote imports.
        flags: flags of the interpreter.
        environment: variables of the process.
        descriptors: descriptors that become its stdin, stdout and stderr.
    """
    at_start = {name: environment[name] for name in environment if name.startswith(READ_AT_START)}
    key = program, *imported, *flags, *sorted(at_start.items())
    request = pickle.dumps((arguments, dict(environment), _limits()))
    with _lock, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        if key not in _zygotes:
            _end_zygotes(MAX_ZYGOTES - 1)
            _zygotes[key] = _start(program, imported, flags, environment)
        asking.connect(_zygotes[key].address)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(asking, [request], descriptors)
            pid = int(asking.recv(64))
            asking.recv(64)  # returns when the process in the middle has ended
        finally:
            _prctl(PR_SET_CHILD_SUBREAPER, 0)
    return Forked(pid)


def run(
    program: str,
    *arguments: str,
    imported: Sequence[str] = (),
    flags: Sequence[str] = (),
    environment: Mapping[str, str],
    stdin: str = "",
    timeout_s: float | None = TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Run `python FLAGS -m PROGRAM ARGUMENTS` to its end, by `fork` if that is possible."""
    with TemporaryFile("w+") as given, TemporaryFile("w+") as said, TemporaryFile("w+") as errors:
        given.write(stdin)
        given.seek(0)
        descriptors = given.fileno(), said.fileno(), errors.fileno()
        process: Forked | subprocess.Popen[bytes]
        if IS_USABLE:
            process = fork(program, arguments, imported, flags, environment, descriptors)
        else:
            command = [sys.executable, *flags, "-m", program, *arguments]
            paths = {"PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(command, 0, None, *descriptors, env={**environment, **paths})
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        for file in (said, errors):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, said.read(), errors.read())


def _start(
    program: str, imported: Sequence[str], flags: Sequence[str], environment: Mapping[str, str]
) -> Zygote:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind("")  # an abstract name, which the kernel chooses
        listening.listen()
        command = [sys.executable, *flags, "-m", "tests.support.zygote", str(os.getpid())]
        # A fork does not have the threads that NumPy would start.
        variables = {**environment, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        actions = [(os.POSIX_SPAWN_DUP2, listening.fileno(), 0)]
        pid = os.posix_spawn(
            sys.executable, [*command, program, *imported], variables, file_actions=actions
        )
        return Zygote(pid, listening.getsockname())


def _limits() -> Limits:
    return {number: resource.getrlimit(number) for number in range(NUM_LIMITS)}


@atexit.register
def _end_zygotes(left: int = 0) -> None:
    """End the oldest zygotes, all but `left`."""
    while len(_zygotes) > left:
        oldest = _zygotes.pop(next(iter(_zygotes)))
        os.kill(oldest.pid, signal.SIGKILL)
        os.waitpid(oldest.pid, 0)


def main(tests: str, program: str, *imported: str) -> None:
    """Be a zygote until the tests end; in a fork, be the program."""
    given = dict(os.environ)
    process = os.pidfd_open(int(tests))
    if os.getppid() != int(tests):
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.chdir(ROOT)
    _import(program, *imported)
    if "kvplan.engine.datadist" in sys.modules:
        _import(*USED_LATER)
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
    arguments, environment, limits = received
    for number, limit in limits.items() - _limits().items():
        resource.setrlimit(number, limit)
    for name in given.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment.items() - given.items())
    # Different addresses, as in two programs: otherwise a test may not see a mix-up of processes.
    with mmap.mmap(-1, HUGE_PAGE * (1 + os.getpid() % 64), mmap.MAP_PRIVATE):
        importlib.import_module(program).main(*arguments)


def _import(*names: str) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # a fork imports the module again, and reports why
            importlib.import_module(name)


def _fork(listening: socket.socket) -> Request | None:
    """Fork a process; return the request there, and None in the zygote."""
    asking, _ = listening.accept()
    with asking:
        request, descriptors, _, _ = socket.recv_fds(asking, MAX_REQUEST_NBYTES, 3)
        if between := os.fork():
            os.waitpid(between, 0)
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        if pid := os.fork():
            asking.send(b"%d" % pid)
            os._exit(0)
    listening.detach()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    received: Request = pickle.loads(request)
    return received


if __name__ == "__main__":
    main(*sys.argv[1:])
