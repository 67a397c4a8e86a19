"""A thread that ends leases at their deadlines, for peers that do not know this process's clock."""

from __future__ import annotations

import threading
import time
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, TypeVar

from kvnative._signals import Condition
from kvplan.status import LLMException
from kvplan.system.limits import start_thread
from kvplan.system.logs import Log
from kvplan.transport.registrations import lease_ended

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG: Final = Log("kvplan")
_RETRY_NS: Final = 10_000_000  # after an error of a device
_MAX_OLD: Final = 64  # heap entries beyond twice the keys
_Key = TypeVar("_Key", bound="int | tuple[int, int]")


class Deadlines(dict[_Key, int]):
    """Deadlines of keys in ns, ordered by a heap. Callers hold a lock of their own.

    Use `set` to add and to change. A later deadline leaves the old heap entry, which moves when its
    time comes. So a lease that is renewed often has one entry. Entries of removed keys stay until
    their time comes, or until there are many; `set` and `next_ns` count them until then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, _Key]] = []

    def set(self, key: _Key, deadline_ns: int) -> bool:
        """Set the deadline of a key; return True if no earlier entry is in the heap."""
        before = self.get(key)
        self[key] = deadline_ns
        if before is None or deadline_ns < before:
            heappush(self._heap, (deadline_ns, key))
            if len(self._heap) > 2 * len(self) + _MAX_OLD:
                self._heap = [(when, held) for held, when in self.items()]
                heapify(self._heap)
        return self._heap[0][0] >= deadline_ns

    def next_ns(self) -> int | None:
        """Return a time before which no deadline passes; None: the heap is empty."""
        return self._heap[0][0] if self._heap else None

    def pop_late(self, now_ns: int) -> _Key | None:
        """Remove and return a key whose deadline has passed, or None."""
        while self._heap and self._heap[0][0] <= now_ns:
            _, key = heappop(self._heap)
            deadline_ns = self.get(key)
            if deadline_ns is None:
                continue
            if deadline_ns <= now_ns:
                del self[key]
                return key
            heappush(self._heap, (deadline_ns, key))
        return None


def seconds_left(deadline_ns: int, clock: Callable[[], int] = time.monotonic_ns) -> float:
    """Return the seconds until a deadline, in [0, `threading.TIMEOUT_MAX`]."""
    return min(max(deadline_ns - clock(), 0) / 1e9, threading.TIMEOUT_MAX)


class LeaseExpiry:
    """The deadlines of one transport's leases. Any thread may call its methods.

    Args:
        end: Ends a lease by slot and generation, if it has not ended.
        name: The name of the thread, which starts with the first deadline.
        clock: Returns nanoseconds that never decrease.
    """

    def __init__(
        self,
        end: Callable[[int, int], None],
        name: str,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._end = end
        self._name = name
        self._clock = clock
        self._deadlines: Deadlines[tuple[int, int]] = Deadlines()
        self._changed = Condition()  # re-entrant: a signal handler may end a lease
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, slot: int, generation: int, deadline_ns: int) -> None:
        """End a lease at its deadline, or before this call returns if the deadline has passed."""
        with self._changed:
            is_first = self._deadlines.set((slot, generation), deadline_ns)
            self._end_late()
            if self._thread is None and not self._closed:
                self._thread = start_thread(self._name, self._run)
            elif is_first:
                self._changed.notify()

    def renew(self, slot: int, generation: int, deadline_ns: int) -> None:
        """Change the deadline of a lease; LLM_KV_CACHE_NOT_EXIST: the lease has ended."""
        with self._changed:
            if (slot, generation) not in self._deadlines:
                raise lease_ended()
            self.add(slot, generation, deadline_ns)

    def forget(self, slot: int, generation: int) -> None:
        """Forget a lease that the caller ends; ignore an unknown one."""
        with self._changed:
            self._deadlines.pop((slot, generation), None)

    def close(self) -> None:
        """Forget all leases and join the thread."""
        with self._changed:
            self._closed = True
            self._deadlines.clear()
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                next_ns = self._deadlines.next_ns()
                self._changed.wait(None if next_ns is None else seconds_left(next_ns, self._clock))
                self._end_late()

    def _end_late(self) -> None:
        """End all leases whose deadline has passed; called with the lock."""
        while (late := self._deadlines.pop_late(self._clock())) is not None:
            try:
                self._end(*late)
            except LLMException as error:
                _LOG.warning("event=lease_not_ended slot=%d reason=%s", late[0], error)
                self._deadlines.set(late, self._clock() + _RETRY_NS)
