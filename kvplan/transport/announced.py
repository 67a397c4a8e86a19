"""Registrations whose peers announce writes in a table of their own, which this process reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Generic, TypeVar
from weakref import WeakKeyDictionary

from kvplan.planning.texts import plural
from kvplan.transport.host_memory import Releasable
from kvplan.transport.lease_expiry import LeaseExpiry
from kvplan.transport.metadata import Range
from kvplan.transport.registrations import (
    WRITER_TIMEOUT_S,
    Generations,
    LateWriters,
    Registrations,
    still_written,
)

Tickets = frozenset[tuple[int, int]]
"""A peer's writes to this process at one moment, each as (index in the peer's table, number)."""

_POLL_S: Final = 100e-6  # at first; later a sixteenth of the time that was waited
_STALLED_S: Final = 0.02  # timeout for peers that made no progress since the last wait

_Peer = TypeVar("_Peer")
_Range = TypeVar("_Range", bound=Range)
_Holder = TypeVar("_Holder", bound=Releasable | None)


class Writer(Generic[_Peer]):
    """A peer that may have been writing to memory whose registration or lease has ended."""

    def __init__(self, peer: _Peer, read: Callable[[_Peer], Tickets | None]) -> None:
        self.peer = peer
        self.tickets: Tickets | None = None  # in progress since the first read; None: not read yet
        self.is_late = False  # by the last read
        self._read = read

    def is_writing(self) -> bool:
        """Return whether a write that the first read has found may still be in progress."""
        if (standing := self._read(self.peer)) is not None:
            self.tickets = standing if self.tickets is None else self.tickets & standing
        self.is_late = standing is None or bool(self.tickets)
        return self.is_late


class Writers(Generic[_Peer]):
    """The writers of one transport. Any thread may wait for them."""

    def __init__(self, read: Callable[[_Peer], Tickets | None]) -> None:
        self._read = read
        # Tickets that were left after the last wait: the next wait for them is shorter.
        self._stalled: WeakKeyDictionary[_Peer, Tickets | None] = WeakKeyDictionary()

    def wait(self, peers: Iterable[_Peer]) -> LateWriters | None:
        """Wait for peers that are writing; return those that do not stop in time."""
        writers = [Writer(peer, self._read) for peer in peers]
        writers.sort(key=lambda writer: writer.peer in self._stalled)  # others may answer at once
        began = time.monotonic()
        while late := _late(writers, began + WRITER_TIMEOUT_S):
            patience = _STALLED_S if all(map(self._has_stalled, late)) else WRITER_TIMEOUT_S
            if (waited_s := time.monotonic() - began) > patience:
                break
            time.sleep(max(_POLL_S, waited_s / 16))
            writers = late
        stalled = [writer for writer in late if writer.is_late]  # the others were not asked again
        for writer in stalled:
            self._stalled[writer.peer] = writer.tickets
        if not late:
            return None
        return LateWriters(
            plural(len(stalled), "peer"), lambda: any(writer.is_writing() for writer in late)
        )

    def _has_stalled(self, writer: Writer[_Peer]) -> bool:
        """Return whether the peer made no progress since the end of the last wait."""
        before = self._stalled.get(writer.peer, frozenset())
        if before is None or writer.tickets is None:
            return before is writer.tickets
        return writer.tickets <= before


def _late(writers: Iterable[Writer[_Peer]], deadline: float) -> list[Writer[_Peer]]:
    """Return the writers that may be writing; past the deadline one is enough to ask no others."""
    late: list[Writer[_Peer]] = []
    for writer in writers:
        if (late and time.monotonic() > deadline) or writer.is_writing():
            late.append(writer)
    return late


class AnnouncedRegistrations(Registrations[_Range, _Holder], Generic[_Range, _Holder, _Peer]):
    """Registrations whose peers read the generation table and announce their writes.

    A thread ends leases at their deadlines, since peers do not know the clock of this process.

    Args:
        range_type: The class of the ranges.
        generations: The generation table.
        max_slots: The maximum of `max_registrations`, for messages.
        thread: The name of the thread.
        read: Returns the writes of a peer to this process; None: they cannot be read now.
        linked: Returns the peers that may write.
    """

    def __init__(
        self,
        range_type: type[_Range],
        generations: Generations,
        max_slots: int,
        *,
        thread: str,
        read: Callable[[_Peer], Tickets | None],
        linked: Callable[[], Iterable[_Peer]],
    ) -> None:
        super().__init__(range_type, generations, max_slots)
        self._writers = Writers(read)
        self._linked = linked
        self._expiry = LeaseExpiry(self._end_lease, thread)

    def begin_lease(self, deadline_ns: int) -> tuple[int, int]:
        """See `Transport.begin_lease`."""
        slot, generation = super().begin_lease(0)
        if deadline_ns:
            try:
                self._expiry.add(slot, generation, deadline_ns)
            except BaseException:  # no thread could be started, or an interrupt
                self.end_leases([(slot, generation)])
                raise
        return slot, generation

    def renew_lease(self, slot: int, generation: int, deadline_ns: int) -> None:
        """See `Transport.renew_lease`."""
        self._expiry.renew(slot, generation, deadline_ns)

    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        """See `Transport.end_leases`."""
        for slot, generation in leases:
            self._expiry.forget(slot, generation)
            self._end_lease(slot, generation)
        if (late := self._writers.wait(self._linked())) is not None:
            raise still_written(late)

    def close(self) -> None:
        """See `Registrations.close`."""
        self._expiry.close()
        super().close()

    def _end_lease(self, slot: int, generation: int) -> None:
        with self.mutex, suppress(ValueError):  # it has ended before
            self._slots.release(slot, generation)
