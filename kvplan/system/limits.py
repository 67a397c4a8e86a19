"""Limits of the system, the limit that caused an error, threads, and checks of the process."""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Callable, Iterator
from errno import EAGAIN, EFBIG, EMFILE, ENFILE, ENOMEM, ENOSPC
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Final, NamedTuple

from kvplan.status import LLMException, LLMStatusCode

_ROOT: Final = Path("/")
_LACKS: Final = frozenset({EAGAIN, EFBIG, EMFILE, ENFILE, ENOMEM, ENOSPC})
_GONE_S: Final = 1.0  # maximum wait until the kernel no longer counts a joined thread


class MemoryLimit(NamedTuple):
    """The maximum memory and swap of this process.

    Attributes:
        nbytes: The limit in bytes.
        whose: The owner of the limit, for messages, such as "this machine".
    """

    nbytes: float
    whose: str


def memory_limit(root: Path = _ROOT) -> MemoryLimit | None:
    """Return the smallest limit of memory and swap of this process; None: unreadable.

    `root` is the folder that contains /proc and /sys.
    """
    try:
        meminfo = (root / "proc/meminfo").read_text()
        cgroups = list(_cgroups("memory", root))
        sizes = {name: int(kib) << 10 for name, kib in _MEMINFO.findall(meminfo)}
        memory, swap = sizes["MemTotal"], sizes["SwapTotal"]
    except (KeyError, OSError):
        return None
    limits = [MemoryLimit(memory + swap, "this machine")]
    for folder, name, is_first in cgroups:
        limit_of = _limit_of_version_1 if is_first else _limit_of_version_2
        limits.append(MemoryLimit(limit_of(folder, swap), name))
    return min(limits)


_MEMINFO = re.compile(r"^(MemTotal|SwapTotal): +([0-9]+) kB$", re.MULTILINE)


def _cgroups(controller: str, root: Path) -> Iterator[tuple[Path, str, bool]]:
    """Yield each cgroup of this process: its folder, its name, and True for version 1."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounted = root / (f"sys/fs/cgroup/{controller}" if controllers else "sys/fs/cgroup")
        names = [name for name in path.split("/") if name not in ("", "..")]
        # Limits of parent groups count too, and a container may see only the root.
        for depth in range(len(names) + 1):
            folder = mounted.joinpath(*names[:depth])
            yield folder, f"cgroup /{'/'.join(names[:depth])}", bool(controllers)


def _limit_of_version_1(cgroup: Path, swap: int) -> float:
    memory = _number_in(cgroup / "memory.limit_in_bytes")
    return min(memory + swap, _number_in(cgroup / "memory.memsw.limit_in_bytes"))


def _limit_of_version_2(cgroup: Path, swap: int) -> float:
    memory = _number_in(cgroup / "memory.max")
    return memory + min(swap, _number_in(cgroup / "memory.swap.max"))


def _number_in(path: Path) -> float:
    """Return the number in a file of the system; infinity for "max" or a missing file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return math.inf


def system_error(what: str, error: Exception) -> LLMException:
    """Convert an error of the system or of the native layer to an LLMException.

    LLM_OUT_OF_MEMORY for a lack of memory, threads, descriptors or room in a file, with the
    possible limits; otherwise LLM_FAILED.
    """
    return LLMException(
        f"{what}: {reason_of(error)}",
        status_code=LLMStatusCode.LLM_OUT_OF_MEMORY if is_lack(error) else LLMStatusCode.LLM_FAILED,
    )


def is_lack(error: Exception) -> bool:
    """Return True if the system lacks memory, threads, descriptors or room in a file."""
    return _errno_of(error) in _LACKS


def reason_of(error: Exception) -> str:
    """Return the text of an error, with the limits that may have caused it."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    limits = ", ".join(_limits_behind(_errno_of(error)))
    return ": ".join(filter(None, (reason or "no memory", limits)))


def _errno_of(error: Exception) -> int:
    if isinstance(error, MemoryError):
        return ENOMEM
    if "can't start new thread" in str(error):  # Python's RuntimeError has no number
        return EAGAIN
    number = getattr(error, "errno", None) or 0  # of an OSError, or a NativeError
    # EAGAIN of a socket does not mean a lack.
    return 0 if number == EAGAIN and isinstance(error, OSError) else number


def _limits_behind(errno: int) -> Iterator[str]:
    if errno == EMFILE:
        yield from _own_limit("RLIMIT_NOFILE", "ulimit -n")
    elif errno == ENFILE:
        yield f"/proc/sys/fs/file-max is {_number_in(Path('/proc/sys/fs/file-max')):.0f}"
    elif errno == EFBIG:
        yield from _own_limit("RLIMIT_FSIZE", "bytes of a file or memfd, ulimit -f")
    elif errno == EAGAIN:
        yield from _own_limit("RLIMIT_NPROC", "threads of this user, ulimit -u")
        yield from _fewest_pids()
        yield f"kernel.threads-max is {_number_in(Path('/proc/sys/kernel/threads-max')):.0f}"
    elif errno == ENOMEM:
        yield from _own_limit("RLIMIT_AS", "bytes of address space, ulimit -v")
        if (limit := memory_limit()) is not None:
            yield f"{limit.whose} has {limit.nbytes:.0f} bytes of memory and swap"


def _own_limit(name: str, what: str) -> Iterator[str]:
    limit, _ = resource.getrlimit(getattr(resource, name))
    if limit != resource.RLIM_INFINITY:
        yield f"{name} is {limit} ({what})"


def _fewest_pids() -> Iterator[str]:
    try:
        cgroups = list(_cgroups("pids", _ROOT))
    except OSError:
        return
    found = ((_number_in(folder / "pids.max"), name) for folder, name, _ in cgroups)
    limit, name = min(found, default=(math.inf, ""))
    if limit < math.inf:
        yield f"pids.max of {name} is {limit:.0f}"


def check_process(pid: int, what: str) -> None:
    """Raise LLMException (LLM_FAILED) unless this is process `pid`, the owner of `what`."""
    if (here := os.getpid()) != pid:
        raise LLMException(
            f"{what} belongs to process {pid}, and this is its forked child {here}; make another "
            "one in the child"
        )


def start_thread(name: str, target: Callable[..., object], *args: object) -> Thread:
    """Start a daemon thread; a lack of threads is an LLMException."""
    thread = Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise system_error(f"thread {name} cannot start", error) from error
    return thread


def check_threads(count: int) -> None:
    """Check that `count` threads can run at once, for a library that aborts if they cannot."""
    end = Event()
    threads = [Thread(target=end.wait, name="kvplan-room", daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        raise system_error(f"{count} threads must be free", error) from error
    finally:
        end.set()
        started = [thread for thread in threads if thread.ident is not None]
        for thread in started:
            thread.join()
        # The kernel still counts a thread for a moment after `join`.
        deadline = monotonic() + _GONE_S
        for counted in [Path(f"/proc/self/task/{thread.native_id}") for thread in started]:
            while counted.exists() and monotonic() < deadline:
                os.sched_yield()
