"""The physical limit: `limits.c`, compiled for this machine on first use."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.compiled import compiled

if TYPE_CHECKING:
    from types import TracebackType

Columns = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]
"""dst, src, nbytes: one item for each descriptor."""

COPIES: Final = {"memcpy": 0, "stream": 1, "movsb": 2}
READV: Final = 3


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(compiled("limits.c", ".so", "-shared", "-fPIC", "-pthread")))
    library.limit_open.restype = ctypes.c_void_p
    library.limit_open.argtypes = (ctypes.c_int,)
    library.limit_close.restype = None
    library.limit_close.argtypes = (ctypes.c_void_p,)
    library.limit_run.restype = ctypes.c_int64
    library.limit_run.argtypes = (
        (ctypes.c_void_p, ctypes.c_int, ctypes.c_int) + (ctypes.c_void_p,) * 3 + (ctypes.c_size_t,)
    )
    library.limit_repeat.restype = ctypes.c_int64
    library.limit_repeat.argtypes = (ctypes.c_int, *(ctypes.c_uint64,) * 3, ctypes.c_int)
    return library


class Team:
    """Threads that run bare loops over descriptors. A context manager."""

    def __init__(self, threads: int) -> None:
        self._library = _library()
        self._team: int | None = self._library.limit_open(threads)

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._library.limit_close(self._team)
        self._team = None

    def copy_seconds(self, how: str, columns: Columns) -> float:
        """Copy all descriptors once; `how` is a key of COPIES."""
        return self._run(COPIES[how], 0, columns)

    def readv_seconds(self, peer: int, columns: Columns) -> float:
        """Read all descriptors from process `peer`, 1,024 ranges a call.

        Raises:
            OSError: as process_vm_readv failed.
        """
        return self._run(READV, peer, columns)

    def _run(self, how: int, peer: int, columns: Columns) -> float:
        dst, src, nbytes = columns
        ns: int = self._library.limit_run(
            self._team, how, peer, dst.ctypes.data, src.ctypes.data, nbytes.ctypes.data, len(dst)
        )
        if ns < 0:
            raise OSError(-ns, os.strerror(-ns))
        return ns / 1e9


def best_seconds(seconds: Callable[[Team], float], blocks: int) -> float:
    """Return the median seconds of a loop over `blocks`, by one or more threads, the faster."""
    medians = []
    for threads in {1, len(os.sched_getaffinity(0))}:
        with Team(threads) as team:
            medians.append(median(seconds(team) for _ in range(max(101 // blocks, 11))))
    return min(medians)


def repeat_seconds(how: str, dst: int, src: int, nbytes: int, repeats: int) -> float:
    """Return the seconds of one copy of `nbytes`, from `repeats` copies by this thread."""
    ns: int = _library().limit_repeat(COPIES[how], dst, src, nbytes, repeats)
    return ns / 1e9 / repeats
