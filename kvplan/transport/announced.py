"""Waiting for peers that have announced what they write, in a table of theirs that is read."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

from kvplan.inspection.units import plural
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.registrations import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Tickets = frozenset[tuple[int, int]]
"""What a peer writes here at one time: of each transfer a place of its table, and a number."""

_NAP_S: Final = 100e-6
_STALLED_S: Final = 0.02  # for a peer that did not get on when it was last waited for

_Peer = TypeVar("_Peer")


class Writer(Generic[_Peer]):
    """A peer that may be writing to this process's memory since before something ended."""

    def __init__(self, peer: _Peer, read: Callable[[_Peer], Tickets | None]) -> None:
        self.peer = peer
        self.tickets: Tickets | None = None  # that it had then, and has; None: not seen
        self._read = read

    def is_writing(self) -> bool:
        """Whether one of the transfers that it had announced has not ended; or that is unknown."""
        if (standing := self._read(self.peer)) is None:
            return True
        self.tickets = standing if self.tickets is None else self.tickets & standing
        return bool(self.tickets)


class Writers(Generic[_Peer]):
    """Those of one transport; may be used from several threads.

    Args:
        read: the tickets of a peer now; None: they cannot be known.
    """

    def __init__(self, read: Callable[[_Peer], Tickets | None]) -> None:
        self._read = read
        # What peers did not end in the last wait, for which the next one is shorter.
        self._stalled: WeakKeyDictionary[_Peer, Tickets | None] = WeakKeyDictionary()

    def wait(self, peers: Iterable[_Peer]) -> list[Writer[_Peer]]:
        """Wait for those of `peers` that write now; return those that did not end it in time."""
        writers = [Writer(it, self._read) for it in peers]
        began = time.monotonic()
        while late := [it for it in writers if it.is_writing()]:
            patience = _STALLED_S if all(map(self._has_stalled, late)) else PATIENCE_S
            if time.monotonic() > began + patience:
                break
            time.sleep(_NAP_S)
            writers = late
        for it in late:
            self._stalled[it.peer] = it.tickets
        return late

    def check(self, peers: Iterable[_Peer]) -> None:
        """As `wait`, of leases.

        Raises:
            LLMException: LLM_TIMEOUT: there are such.
        """
        if late := self.wait(peers):
            raise LLMException(
                f"{plural(len(late), 'peer')} had begun to write to this process's memory and did "
                f"not end that within {PATIENCE_S:g} s (stopped, or cut off?): use the blocks "
                "again when they have, or their links have ended",
                status_code=LLMStatusCode.LLM_TIMEOUT,
            )

    def _has_stalled(self, it: Writer[_Peer]) -> bool:
        """Whether it is where it was at the end of the last wait."""
        before = self._stalled.get(it.peer, frozenset())
        if before is None or it.tickets is None:
            return before is it.tickets
        return it.tickets <= before


def tag_of(instance: str) -> int:
    """By which a process knows what is written to its memory."""
    return int(instance[:8], 16)
