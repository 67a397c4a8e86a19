"""Ends leases whose time has passed, for peers that read their words and not this clock."""

from __future__ import annotations

import threading
import time
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from kvnative._signals import Condition
from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode
from kvplan.system_limits import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG: Final = Log("kvplan")
_RETRY_NS: Final = 10_000_000  # after a device did not take it


class LeaseExpiry:
    """The deadlines of one transport's leases; may be used from several threads.

    Args:
        end: ends a lease by slot and generation, if it has not ended; peers find that at once.
        name: of the thread that does it, from the first deadline on.
        clock: nanoseconds that never go back.
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
        self._deadlines: dict[tuple[int, int], int] = {}
        # What `_deadlines` held at some time, by deadline; what it does not hold any more is old.
        self._order: list[tuple[int, int, int]] = []
        self._changed = Condition()  # re-entrant: a signal handler may end a lease
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, slot: int, generation: int, deadline_ns: int) -> None:
        """End a lease at its deadline; where that has passed, on return."""
        with self._changed:
            self._deadlines[slot, generation] = deadline_ns
            heappush(self._order, (deadline_ns, slot, generation))
            self._end_late()
            if self._thread is None and not self._closed:
                self._thread = start_thread(self._name, self._run)
            elif self._order and self._order[0][0] >= deadline_ns:
                self._changed.notify()

    def renew(self, slot: int, generation: int, deadline_ns: int) -> None:
        """Give a lease another deadline.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: it has ended.
        """
        with self._changed:
            if (slot, generation) not in self._deadlines:
                raise LLMException(
                    "the lease has expired: release it",
                    status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
                )
            self.add(slot, generation, deadline_ns)

    def forget(self, slot: int, generation: int) -> None:
        """The lease is ended by others; unknown: nothing happens."""
        with self._changed:
            self._deadlines.pop((slot, generation), None)
            if not self._deadlines:
                self._order.clear()

    def close(self) -> None:
        """Forget all, and wait for the thread's end."""
        with self._changed:
            self._closed = True
            self._deadlines.clear()
            self._order.clear()
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                left_s = None
                if self._order:
                    left_ns = self._order[0][0] - self._clock()
                    left_s = min(max(left_ns, 0) / 1e9, threading.TIMEOUT_MAX)
                self._changed.wait(left_s)
                self._end_late()

    def _end_late(self) -> None:
        """With the lock: end all whose deadline has passed."""
        while self._order and self._order[0][0] <= self._clock():
            deadline_ns, slot, generation = heappop(self._order)
            if self._deadlines.get((slot, generation)) != deadline_ns:
                continue
            try:
                self._end(slot, generation)
            except LLMException as error:
                _LOG.warning("event=lease_not_ended slot=%d reason=%s", slot, error)
                self._deadlines[slot, generation] = retried_ns = self._clock() + _RETRY_NS
                heappush(self._order, (retried_ns, slot, generation))
            else:
                self._deadlines.pop((slot, generation), None)
