"""Descriptors and threads of this process, by name: a count would include those of other tests.

Also the memory and the tasks that are kept, as counts.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 30
QUEUE = {"anon_inode:[eventfd]", "anon_inode:[eventpoll]"}
"""The descriptors of an engine's notifications, which can be read after its end."""

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Held:
    """Descriptors by number and target, threads by number and name."""

    descriptors: frozenset[tuple[str, str]]
    threads: frozenset[tuple[str, str]]

    @classmethod
    def now(cls) -> Held:
        """Collect garbage twice, because finalizers release more, and list what is held."""
        gc.collect()
        gc.collect()
        return cls._listed()

    def new(self) -> Held:
        """Return the descriptors and threads that are new since this list."""
        now = Held._listed()
        return Held(now.descriptors - self.descriptors, now.threads - self.threads)

    def check_nothing_new(self) -> None:
        """Fail if anything new is held."""
        gc.collect()
        gc.collect()
        new = self.new()
        assert not new.descriptors, new
        self.check_new_threads(set())

    def check_new_are_not_inherited(self) -> None:
        """Fail unless there are new descriptors and `exec` closes all of them."""
        numbers = [int(number) for number, _ in self.new().descriptors]
        assert numbers
        assert not [item for item in numbers if os.get_inheritable(item)], self.new()

    def check_new_threads(self, names: set[str]) -> None:
        """Wait until new threads have these names: a joined thread is listed a while longer."""
        new, deadline = self.new(), time.monotonic() + DEADLINE_S
        while {name for _, name in new.threads} != names:
            assert time.monotonic() < deadline, new
            new = self.new()

    @classmethod
    def _listed(cls) -> Held:
        descriptors, threads = set(), set()
        for file in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # the descriptor of /proc/self/fd itself
                descriptors.add((file.name, str(file.readlink())))
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since
                threads.add((task.name, (task / "comm").read_text().strip()))
        # This thread starts with the first generation table, and ends with the process.
        threads = {thread for thread in threads if thread[1] != "kvplan-life"}
        return cls(frozenset(descriptors), frozenset(threads))


def ended_tasks() -> int:
    """Return the number of asyncio tasks that have ended and are still referenced."""
    gc.collect()
    # Not `isinstance`, which asks proxies for the class of an object that may be gone.
    return sum(issubclass(type(held), asyncio.Task) and held.done() for held in gc.get_objects())


class MallInfo(ctypes.Structure):
    """The result of mallinfo2; see its manual page."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_libc.mallinfo2.restype = MallInfo


def allocated() -> int:
    """Return the bytes that malloc has handed out."""
    now = _libc.mallinfo2()
    return int(now.hblkhd + now.uordblks)
