"""The state of one link, and the operations in flight over it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from threading import RLock
from weakref import ref

from kvplan.links.state import LOST, STEPS, LinkState
from kvplan.status import LLMException, LLMStatusCode


class LinkLife:
    """Steps are taken by the control thread; operations begin and end in any.

    Attributes:
        cluster_id: the peer's.
        state: see LinkState.
        since: when the state began, in seconds since the epoch.
        reason: why the link is broken or closed, or never came to be; empty otherwise.
        settled: set once the handshake has ended, well or not.
        ended: set once the link is broken, closed or unlinked.
    """

    def __init__(self, cluster_id: int) -> None:
        self.cluster_id = cluster_id
        self.state = LinkState.LINKING
        self.since = time.time()
        self.reason = ""
        self.settled = asyncio.Event()
        self.ended = asyncio.Event()
        self.operations = 0
        self.bytes_pulled = 0
        self.bytes_pushed = 0
        self.last_error = ""
        # Operations call nothing while they hold it: a signal handler that ran then, and finalized
        # the engine, would wait for the control thread, and that for the lock. Re-entrant: the
        # collector of garbage may end one in there, a push by layers that was dropped.
        self._mutex = RLock()
        # Weakly: an interrupt may drop an operation before it could end, and it is out then.
        self._in_flight: set[ref[object]] = set()
        self._telling: set[int] = set()
        self._idle = asyncio.Event()
        self._waiting: list[asyncio.AbstractEventLoop] = []  # for the last operation to end

    @property
    def in_flight(self) -> int:
        """Operations that have not ended yet, and what they have left to be told."""
        return len(self._in_flight) + len(self._telling)

    @property
    def is_live(self) -> bool:
        """Whether the link stands, or is about to."""
        return self.state in {LinkState.LINKING, LinkState.LINKED, LinkState.UNLINKING}

    def become(self, state: LinkState, reason: str = "", *, unless_busy: bool = False) -> bool:
        """Take a step, and tell those that wait for it.

        Args:
            state: the next one.
            reason: why, for a step that ends the link.
            unless_busy: stay as it is while operations are in flight.

        Returns:
            Whether the step was taken.
        """
        with self._mutex:
            assert state in STEPS[self.state], f"{self.state} -> {state}"
            if unless_busy and self.in_flight:
                return False
            self.state, self.since, self.reason = state, time.time(), reason
            if state in LOST:
                self.last_error = reason
        self.settled.set()
        if not self.is_live:
            self.ended.set()
        return True

    def begin(self, operation: object) -> None:
        """An operation starts; it is in flight until `end`, or until nobody has it any more.

        Args:
            operation: what the caller holds meanwhile, and can be referenced weakly.

        Raises:
            LLMException: LLM_LINK_FAILED: the link is broken or closed, and why; LLM_NOT_YET_LINK:
                it is being made or unlinked, or was unlinked.
        """
        with self._mutex:
            if is_linked := self.state is LinkState.LINKED:
                self._in_flight.add(ref(operation, self._in_flight.discard))
                self.operations += 1
        if not is_linked:
            raise self.refusal()

    def hold(self, claim_id: int) -> None:
        """Be busy with telling the peer of a claim; `let_go` must follow, in any state."""
        self._telling.add(claim_id)

    def let_go(self, claim_id: int) -> None:
        """The peer was told of the claim, or never will be."""
        self._telling.discard(claim_id)
        self._wake()

    def end(
        self,
        operation: object,
        nbytes_pulled: int = 0,
        nbytes_pushed: int = 0,
        error: BaseException | None = None,
    ) -> None:
        """An operation has its outcome; nothing happens if it is not in flight."""
        begun = ref(operation)
        if begun not in self._in_flight:
            return
        if error is not None:
            self.last_error = str(error)
        with self._mutex:
            self._in_flight.discard(begun)
            self.bytes_pulled += nbytes_pulled
            self.bytes_pushed += nbytes_pushed
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        if self._waiting and not self.in_flight:
            for loop in tuple(self._waiting):
                with suppress(RuntimeError):  # closed: who waited has gone with it
                    loop.call_soon_threadsafe(self._idle.set)

    async def until_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; returns whether that came to be in time."""
        # Before it looks: whatever ends after that look sees that somebody waits.
        self._waiting.append(asyncio.get_running_loop())
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._idle.clear()
                    if not self.in_flight:
                        return True
                    await self._idle.wait()
        except TimeoutError:
            return not self.in_flight  # an operation that was dropped tells nobody
        finally:
            self._waiting.pop()

    def refusal(self) -> LLMException:
        """Why nothing can be transferred over the link as it is now."""
        return self.refusal_in(self.state, self.reason)

    def refusal_in(self, state: LinkState, reason: str) -> LLMException:
        """Why nothing can be transferred over the link when it is in `state`."""
        who = f"the link to cluster {self.cluster_id}"
        if state in LOST:
            how = "is broken" if state is LinkState.BROKEN else "was ended by the peer"
            return LLMException(f"{who} {how}: {reason}", status_code=LLMStatusCode.LLM_LINK_FAILED)
        doing = {
            LinkState.LINKING: "is still being made",
            LinkState.UNLINKING: "is being unlinked",
        }.get(state, f"has ended: {reason}")
        return LLMException(f"{who} {doing}", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
