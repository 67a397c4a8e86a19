"""Registered memory as its owner holds it, the same for each transport.

Transports implement hooks of `Registrations`. This module must not depend on one of them.
"""

from __future__ import annotations

import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
)

from kvnative._signals import Condition, Mutex
from kvplan.status import LLMException, LLMStatusCode, invalid, timed_out
from kvplan.system.limits import start_thread
from kvplan.system.logs import LimitedLog, Log
from kvplan.transport.host_memory import Releasable, released_if_refused
from kvplan.transport.metadata import Range
from kvplan.validation import check_type

if TYPE_CHECKING:
    from kvplan.transport.protocol import Registrable

PATIENCE_S: Final = 1.0
"""Seconds to wait for a peer that writes, before the memory that it writes to is quarantined."""

MAX_LEASES: Final = 1 << 17  # per transport, besides its registrations

_START_BITS: Final = 48  # of the random number at which generations begin
_POLL_S: Final = 0.05  # of the quarantine

_LOG = Log("kvplan")
_LIMITED_LOG = LimitedLog(_LOG)  # for the loop of a thread

_Range_co = TypeVar("_Range_co", bound=Range, covariant=True)
_Range = TypeVar("_Range", bound=Range)
_Holder_co = TypeVar("_Holder_co", bound=Releasable | None, covariant=True)
_Holder = TypeVar("_Holder", bound=Releasable | None)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Registration(Generic[_Range_co, _Holder_co]):
    """Memory [address, address + nbytes) that peers may reach until it is deregistered.

    Attributes:
        range: The memory as peers name it.
        holder: Keeps the memory in place; None: the caller does.
        keep: An object that must not be freed before peers can no longer write to the memory.
    """

    range: _Range_co
    holder: _Holder_co
    keep: object

    @property
    def address(self) -> int:
        """The address of the first byte, in this process."""
        return self.range.address

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.range.nbytes

    @property
    def writable(self) -> bool:
        """True if peers may write to the memory."""
        return self.range.writable

    def release(self) -> None:
        """Let go of the memory, which no peer writes to any more. Idempotent."""
        if self.holder is not None:
            self.holder.release()

    def __repr__(self) -> str:
        return f"<Registration of {self.range}>"


AnyRegistration: TypeAlias = Registration[Any, Any]


class Found(NamedTuple, Generic[_Holder]):
    """Memory that is about to be registered.

    Attributes:
        address, nbytes: The memory, in this process.
        holder: Keeps the memory in place; None: the caller does.
        details: The fields that the transport adds to `Range`.
    """

    address: int
    nbytes: int
    holder: _Holder
    details: tuple[Any, ...] = ()


class Generations(Protocol):
    """The slots of a transport, and the generation of each slot that is in use."""

    def take(self, is_lease: bool = False, *, deadline_ns: int = 0) -> tuple[int, int]:
        """Return a slot and its generation, for a registration or a lease.

        Raises:
            MemoryError: All slots are in use.
        """

    def release(self, slot: int, generation: int) -> None:
        """End a registration or lease.

        Raises:
            ValueError: It is not the one that the slot has now.
        """


class LateWriters(NamedTuple):
    """Peers that did not stop writing to memory of this process in time.

    Attributes:
        names: Of the peers, for messages: "process 12", "2 peers".
        are_writing: Returns whether any of them may still write.
    """

    names: str
    are_writing: Callable[[], bool]


class Registrations(ABC, Generic[_Range, _Holder]):
    """The registrations and leases of one transport. Any thread may call its methods."""

    transport: ClassVar[str]  # for messages: "a local transport"

    def __init__(self, range_type: type[_Range], generations: Generations, max_slots: int) -> None:
        self._range_type = range_type
        self._slots = generations
        self._max_slots = max_slots
        # Re-entrant: letting go of memory may run finalizers, which may deregister more.
        self.mutex = Mutex()
        self._by_slot: dict[int, Registration[_Range, _Holder]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_slot)

    def add(
        self, memory: Registrable, *, writable: bool, keep: object = None
    ) -> Registration[_Range, _Holder]:
        """Let peers reach `memory`."""
        found = self._find(memory, writable=writable)
        with self.mutex:
            with released_if_refused(found.holder):
                self.check_open()
                try:
                    slot, generation = self._slots.take()
                except MemoryError as error:
                    raise self._full(
                        f"{error}: deregister memory, or make the transport with more "
                        f"max_registrations ({self._max_slots} at most)"
                    ) from error
                known = self._range_type(
                    found.address, found.nbytes, slot, generation, writable, *found.details
                )
                made = Registration(known, found.holder, keep)
            # Before it is served: an interrupt in between must not leave memory that is not held.
            self._by_slot[slot] = made
            self._serve(made)
        return made

    def end(self, registration: AnyRegistration) -> None:
        """Deregister: no peer begins to reach the memory any more. Idempotent.

        If a peer that writes does not stop in time, the memory is quarantined.
        """
        ended = self.own(registration)
        self._withdraw(ended)
        self._release([ended])

    def own(self, registration: object) -> Registration[_Range, _Holder]:
        """Return `registration`; raise TypeError if such a transport did not make it."""
        if (
            not isinstance(registration, Registration)
            or type(registration.range) is not self._range_type
        ):
            raise TypeError(
                f"registration is a {type(registration).__name__}; it must be a Registration that "
                f"`register` of {self.transport} has returned"
            )
        return registration

    def holds(self, registration: Registration[_Range, _Holder]) -> bool:
        """Return whether the registration still stands."""
        return self._by_slot.get(registration.range.slot) is registration

    def select(
        self, registrations: Iterable[AnyRegistration] | None = None
    ) -> tuple[Registration[_Range, _Holder], ...]:
        """Return `registrations`, or all of them; refuse any that does not stand here."""
        given = None if registrations is None else tuple(map(self.own, registrations))
        with self.mutex:
            if given is None:
                return tuple(self._by_slot.values())
            for registration in given:
                if not self.holds(registration):
                    raise invalid(f"{registration!r} is not registered here, or no longer")
        return given

    def preregister_pool(self, memory: Registrable, keep: object) -> None:
        """See `Transport.preregister_pool`."""

    def begin_lease(self, deadline_ns: int) -> tuple[int, int]:
        """See `Transport.begin_lease`."""
        with self.mutex:
            self.check_open()
            try:
                return self._slots.take(True, deadline_ns=deadline_ns)
            except MemoryError as error:
                raise self._full("all leases are taken: release one before") from error

    @abstractmethod
    def renew_lease(self, slot: int, generation: int, deadline_ns: int) -> None:
        """See `Transport.renew_lease`."""

    @abstractmethod
    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        """See `Transport.end_leases`."""

    def check_open(self) -> None:
        """Raise LLMException after `close`."""
        if self._closed:
            raise transport_closed()

    def close(self) -> None:
        """Deregister everything, and refuse new memory."""
        with self.mutex:
            self._closed = True
            ended = self.select()
            for registration in ended:
                self._withdraw(registration)
        self._release(ended)

    @abstractmethod
    def _find(self, memory: Registrable, *, writable: bool) -> Found[_Holder]:
        """Look at memory that is about to be registered, and hold it."""

    def _serve(self, registration: Registration[_Range, _Holder]) -> None:
        """Let peers reach memory that was registered; called with the mutex."""

    def _withdraw(self, registration: Registration[_Range, _Holder]) -> None:
        """Keep peers from beginning to reach the memory. Idempotent."""
        with self.mutex:
            if self._forget(registration):
                self._slots.release(registration.range.slot, registration.range.generation)

    def _forget(self, registration: Registration[_Range, _Holder]) -> bool:
        """Remove the registration; return whether it was there. Called with the mutex."""
        is_held = self.holds(registration)
        if is_held:
            del self._by_slot[registration.range.slot]
        return is_held

    def _wait_for_writers(self) -> LateWriters | None:
        """Wait for peers that write now; return those that do not stop within `PATIENCE_S`."""
        return None

    def _release(self, ended: Sequence[Registration[_Range, _Holder]]) -> None:
        """Let go of memory that was withdrawn, or quarantine it while a peer writes to it."""
        announced = [registration for registration in ended if registration.range.is_announced]
        late = self._wait_for_writers() if announced else None
        for registration in ended:
            if (
                late is None
                or not registration.range.is_announced
                or not registration.range.is_mapped
            ):
                registration.release()
            else:
                self._warn(registration.range, late)
                QUARANTINE.add(late.are_writing, registration)

    def _warn(self, memory: _Range, late: LateWriters) -> None:
        _LOG.warning(
            "%s is deregistered, but %s was writing to this process's memory and did not stop "
            "within %g s (is it stopped, or cut off?): the memory is not used again before it "
            "stops, or its link ends",
            memory,
            late.names,
            PATIENCE_S,
        )

    def _full(self, message: str) -> LLMException:
        return LLMException(message, status_code=LLMStatusCode.LLM_OUT_OF_MEMORY)


def still_written(late: LateWriters) -> LLMException:
    """Return the error of a lease whose blocks a peer may still write: LLM_TIMEOUT."""
    return timed_out(
        f"{late.names} had begun to write to this process's memory and did not stop within "
        f"{PATIENCE_S:g} s (is it stopped, or cut off, or does its GPU copy that much?): use the "
        "blocks again when it has stopped, or its link has ended"
    )


def transport_closed() -> LLMException:
    """Return the error of a transport that was closed: LLM_FAILED."""
    return LLMException("the transport is closed")


def check_max_registrations(count: int, most: int) -> None:
    """Refuse a number of registrations that a transport cannot have at the same time."""
    if not 1 <= check_type("max_registrations", count, int) <= most:
        raise invalid(f"max_registrations={count} is out of range [1, {most}]")


class _FreeSlots:
    def __init__(self, first: int, count: int, what: str) -> None:
        self._released: list[int] = []
        self._unused = iter(range(first, first + count))
        self._full = f"all {count} {what} are taken"

    def take(self) -> int:
        slot = self._released.pop() if self._released else next(self._unused, None)
        if slot is None:
            raise MemoryError(self._full)
        return slot

    def release(self, slot: int) -> None:
        self._released.append(slot)


class Slots:
    """`Generations` in memory of this process only. Callers hold a lock of their own.

    Slots of leases follow those of registrations.
    """

    def __init__(self, count: int, most: int, num_leases: int) -> None:
        check_max_registrations(count, most)
        self.num_slots = count + num_leases
        self._count = count
        self._registrations = _FreeSlots(0, count, "registrations")
        self._leases = _FreeSlots(count, num_leases, "leases")
        self._taken: dict[int, int] = {}  # generations by slot
        # Random, since a generation of one process must not be taken for another's.
        self._generation = secrets.randbits(_START_BITS)

    def take(self, is_lease: bool = False, *, deadline_ns: int = 0) -> tuple[int, int]:
        """See `Generations.take`; the deadline is the caller's concern."""
        slot = (self._leases if is_lease else self._registrations).take()
        self._generation += 1
        self._taken[slot] = self._generation
        return slot, self._generation

    def release(self, slot: int, generation: int) -> None:
        """See `Generations.release`."""
        if not self.holds(slot, generation):
            raise ValueError(f"slot {slot} does not have generation {generation} any more")
        del self._taken[slot]
        (self._registrations if slot < self._count else self._leases).release(slot)

    def holds(self, slot: int, generation: int) -> bool:
        """Return whether the slot has that generation now."""
        return self._taken.get(slot) == generation

    def leases(self) -> list[tuple[int, int]]:
        """Return slot and generation of each lease that has not ended."""
        return [
            (slot, generation) for slot, generation in self._taken.items() if slot >= self._count
        ]


class Quarantine:
    """Deregistered memory that a peer may still write to, held until it cannot.

    A thread, started with the first memory, polls the peers. There is one quarantine per process,
    since it outlives the transports.
    """

    def __init__(self) -> None:
        self.begin()
        # In a forked child the thread does not exist, and the lock may be held forever.
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Drop everything."""
        self._changed = Condition()
        self._held: list[tuple[Callable[[], bool], Releasable]] = []
        self._thread: threading.Thread | None = None

    def add(self, is_written: Callable[[], bool], memory: Releasable) -> None:
        """Hold `memory` as long as `is_written()`, which the thread calls; then release it."""
        with self._changed:
            self._held.append((is_written, memory))
            if self._thread is None:
                with suppress(LLMException):  # without a thread the memory is held forever
                    self._thread = start_thread("kvplan-quarantine", self._run)

    def _run(self) -> None:
        with self._changed:
            while self._held:
                self._changed.wait(_POLL_S)
                for entry in list(self._held):
                    self._look(*entry)
            self._thread = None

    def _look(self, is_written: Callable[[], bool], memory: Releasable) -> None:
        """Release `memory` unless a peer may still write to it, which an error leaves open."""
        try:
            if is_written():
                return
            self._held.remove((is_written, memory))
            memory.release()
        except Exception as error:
            text = "could not release memory of a peer's writes: %r"
            _LIMITED_LOG.error(text, error, exc_info=True)


QUARANTINE: Final = Quarantine()
