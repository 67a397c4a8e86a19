"""The state of one link, and its operations in flight."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from weakref import ref

from kvnative._signals import Mutex
from kvnative._tally import Traffic
from kvplan.links.values import LOST, NEXT_STATES, LinkState
from kvplan.status import LLMException, link_failed, not_linked


class LinkLifecycle:
    """The state of a link and its operations in flight.

    The control thread changes the state. Operations begin and end in any thread.

    Attributes:
        cluster_id: Cluster id of the peer.
        state: See LinkState.
        since: Start of the state, in seconds since the epoch.
        reason: Why the link or its handshake has ended; empty before.
        settled: Set once the handshake has succeeded or failed.
        traffic: Counts of moved bytes and operations.
        ended: Set once the link is broken, closed or unlinked.
    """

    def __init__(self, cluster_id: int) -> None:
        self.cluster_id = cluster_id
        self.state = LinkState.LINKING
        self.since = time.time()
        self.reason = ""
        self.settled = asyncio.Event()
        self.ended = asyncio.Event()
        self.traffic = Traffic()
        self.last_error = ""
        # Call nothing while holding this lock: a signal handler that finalizes the engine would
        # wait for the control thread, which would wait for the lock. It is re-entrant, because
        # garbage collection may end an operation meanwhile, such as a dropped push by layers.
        self._mutex = Mutex()
        # Weak references: an interrupt may drop an operation before its `end` is called.
        self._in_flight: set[ref[object]] = set()
        self._pending_releases: set[int] = set()
        self._idle = asyncio.Event()
        self._waiting: list[asyncio.AbstractEventLoop] = []  # of callers of `wait_idle`

    @property
    def in_flight(self) -> int:
        """The number of operations in flight and of claims whose release is not confirmed."""
        return len(self._in_flight) + len(self._pending_releases)

    @property
    def is_live(self) -> bool:
        """True while the link is being made, is up, or is being ended."""
        return self.state in {LinkState.LINKING, LinkState.LINKED, LinkState.UNLINKING}

    def change_state(self, state: LinkState, reason: str = "") -> None:
        """Enter `state` and wake its waiters."""
        with self._mutex:
            assert state in NEXT_STATES[self.state], f"{self.state} -> {state}"
            self.state, self.since, self.reason = state, time.time(), reason
            if state in LOST:
                self.last_error = reason
        self.settled.set()
        if not self.is_live:
            self.ended.set()

    def begin(self, operation: object) -> None:
        """Begin an operation. It is in flight until `end` or until it is garbage-collected."""
        with self._mutex:
            if is_linked := self.state is LinkState.LINKED:
                self._in_flight.add(ref(operation, self._in_flight.discard))
        if not is_linked:
            raise self.refusal()
        self.traffic.add(1)

    def add_pending_release(self, claim_id: int) -> None:
        """Keep the link busy until `remove_pending_release`, which must follow in any state."""
        self._pending_releases.add(claim_id)

    def remove_pending_release(self, claim_id: int) -> None:
        """Forget a claim whose release is confirmed, or can no longer be."""
        self._pending_releases.discard(claim_id)
        self._wake()

    def end(
        self,
        operation: object,
        nbytes_pulled: int = 0,
        nbytes_pushed: int = 0,
        error: BaseException | None = None,
    ) -> None:
        """Conclude an operation. Nothing happens if it is not in flight."""
        begun = ref(operation)
        if begun not in self._in_flight:
            return
        try:
            if error is not None:
                self.last_error = str(error)  # `__str__` of a hook's exception may raise
        finally:
            with self._mutex:
                self._in_flight.discard(begun)
            self.traffic.add(0, nbytes_pulled, nbytes_pushed)
            if self._waiting:
                self._wake()

    def _wake(self) -> None:
        if self._waiting and not self.in_flight:
            for loop in list(self._waiting):
                with suppress(RuntimeError):  # the loop was closed with its waiting coroutines
                    loop.call_soon_threadsafe(self._idle.set)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight, and return True if that happened in time."""
        # Before the check, so that an operation that ends after the check sees this waiter.
        self._waiting.append(asyncio.get_running_loop())
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._idle.clear()
                    if not self.in_flight:
                        return True
                    await self._idle.wait()
        except TimeoutError:
            return not self.in_flight  # a dropped operation wakes no waiter
        finally:
            self._waiting.pop()

    def refusal(self) -> LLMException:
        """Return the error of transfers over the link in its current state."""
        return self.refusal_in(self.state, self.reason)

    def refusal_in(self, state: LinkState, reason: str) -> LLMException:
        """Return the error of transfers over the link in `state`."""
        who = f"the link to cluster {self.cluster_id}"
        if state in LOST:
            how = "is broken" if state is LinkState.BROKEN else "was ended by the peer"
            return link_failed(f"{who} {how}: {reason}")
        condition = {
            LinkState.LINKING: "is still being made",
            LinkState.UNLINKING: "is being unlinked",
        }.get(state, f"has ended: {reason}")
        return not_linked(f"{who} {condition}")
