"""Registrations and leases of this process: the base class for all transports."""

from __future__ import annotations

import os
import secrets
import threading
from abc import ABC, abstractmethod
from array import array
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
from kvplan.status import LLMException, LLMStatusCode, invalid, not_exist, timed_out
from kvplan.system.limits import start_thread
from kvplan.system.logs import LimitedLog, Log
from kvplan.transport.host_memory import Releasable, released_if_refused
from kvplan.transport.metadata import Range
from kvplan.validation import check_range

if TYPE_CHECKING:
    from kvplan.transport.protocol import Registrable

WRITER_TIMEOUT_S: Final = 1.0
"""Timeout of waiting for a peer that is writing; then the memory is quarantined."""

MAX_LEASES: Final = 1 << 17  # per transport, besides its registrations

_START_BITS: Final = 48  # bits of the random first generation
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
        range: The memory as published to peers.
        holder: Keeps the memory in place; None: the caller does.
        keep: An object to keep alive until no peer can write to the memory any more.
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
        """Release the memory, which no peer writes any more. Idempotent."""
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
            ValueError: The slot does not have this generation any more.
        """


class LateWriters(NamedTuple):
    """Peers that did not stop writing to memory of this process in time.

    Attributes:
        names: The peers, for messages: "process 12", "2 peers".
        are_writing: Returns whether any of the peers may still be writing.
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
        # Re-entrant: releasing memory may run finalizers, which may deregister more.
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
            # Before `_serve`: an interrupt in between must not leave memory that nothing keeps.
            self._by_slot[slot] = made
            self._serve(made)
        return made

    def end(self, registration: AnyRegistration) -> None:
        """Deregister memory, so that no peer begins another transfer with it. Idempotent.

        If a peer that is writing does not stop in time, the memory is quarantined.
        """
        ended = self.own(registration)
        self._withdraw(ended)
        self._release([ended])

    def own(self, registration: object) -> Registration[_Range, _Holder]:
        """Return `registration`; raise TypeError if a transport of another kind made it."""
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
        """Return True until the registration ends."""
        return self._by_slot.get(registration.range.slot) is registration

    def select(
        self, registrations: Iterable[AnyRegistration] | None = None
    ) -> tuple[Registration[_Range, _Holder], ...]:
        """Return `registrations`, or by default all; refuse any that is not registered here."""
        given = None if registrations is None else tuple(map(self.own, registrations))
        with self.mutex:
            if given is None:
                return tuple(self._by_slot.values())
            for registration in given:
                if not self.holds(registration):
                    raise invalid(
                        f"{registration!r} is not registered with this transport, or has ended"
                    )
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
                raise self._full(f"{error}: release a lease first") from error

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
        """Locate memory that is about to be registered, and keep it in place."""

    def _serve(self, registration: Registration[_Range, _Holder]) -> None:
        """Let peers reach registered memory; called with the mutex."""

    def _withdraw(self, registration: Registration[_Range, _Holder]) -> None:
        """Let no peer begin to reach the memory any more. Idempotent."""
        with self.mutex:
            if self._forget(registration):
                self._slots.release(registration.range.slot, registration.range.generation)

    def _forget(self, registration: Registration[_Range, _Holder]) -> bool:
        """Remove the registration; return whether it was registered. Called with the mutex."""
        is_held = self.holds(registration)
        if is_held:
            del self._by_slot[registration.range.slot]
        return is_held

    def _wait_for_writers(self) -> LateWriters | None:
        """Wait for peers that are writing; return those that do not stop in time."""
        return None

    def _release(self, ended: Sequence[Registration[_Range, _Holder]]) -> None:
        """Release withdrawn memory, or quarantine it while a peer writes to it."""
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
            "within %g s (is it stopped, or cut off?): the memory is quarantined until the write "
            "or the link ends",
            memory,
            late.names,
            WRITER_TIMEOUT_S,
        )

    def _full(self, message: str) -> LLMException:
        return LLMException(message, status_code=LLMStatusCode.LLM_OUT_OF_MEMORY)


def still_written(late: LateWriters) -> LLMException:
    """Return the error of a lease whose blocks a peer may still write: LLM_TIMEOUT."""
    return timed_out(
        f"{late.names} had begun to write to this process's memory and did not stop within "
        f"{WRITER_TIMEOUT_S:g} s (is it stopped, or cut off, or does its GPU copy that much?): do "
        "not use the blocks again before the write or the link has ended"
    )


def lease_ended() -> LLMException:
    """Return the error of a lease that cannot be renewed: LLM_KV_CACHE_NOT_EXIST."""
    return not_exist("the lease has ended or expired: release it")


def transport_closed() -> LLMException:
    """Return the error of a transport that was closed: LLM_FAILED."""
    return LLMException("the transport is closed")


class _Numbers:
    """Numbers of slots from `first` on, and the generation of each; 0: free."""

    def __init__(self, first: int, count: int, what: str) -> None:
        self._first, self._count, self._what = first, count, what
        self._released: list[int] = []
        self._generations = array("Q")  # no dict: an owner may have 100,000 leases

    def take(self, generation: int) -> int:
        if self._released:
            slot = self._released.pop()
            self._generations[slot - self._first] = generation
            return slot
        if len(self._generations) == self._count:
            raise MemoryError(f"all {self._count} {self._what} are taken")
        self._generations.append(generation)
        return self._first + len(self._generations) - 1

    def release(self, slot: int) -> None:
        self._generations[slot - self._first] = 0
        self._released.append(slot)

    def generation(self, slot: int) -> int:
        at = slot - self._first
        return self._generations[at] if 0 <= at < len(self._generations) else 0

    def taken(self) -> list[tuple[int, int]]:
        return [(slot, held) for slot, held in enumerate(self._generations, self._first) if held]


class Slots:
    """`Generations` in memory of this process. Callers hold a lock of their own.

    Slots of leases follow those of registrations.
    """

    def __init__(self, count: int, most: int, num_leases: int) -> None:
        check_range("max_registrations", count, 1, most)
        self.num_slots = count + num_leases
        self._count = count
        self._registrations = _Numbers(0, count, "registrations")
        self._leases = _Numbers(count, num_leases, "leases")
        # Random, so that a generation of one process does not equal one of another process.
        self._generation = secrets.randbits(_START_BITS)

    def take(self, is_lease: bool = False, *, deadline_ns: int = 0) -> tuple[int, int]:
        """See `Generations.take`; the caller keeps the deadline."""
        self._generation += 1
        numbers = self._leases if is_lease else self._registrations
        return numbers.take(self._generation), self._generation

    def release(self, slot: int, generation: int) -> None:
        """See `Generations.release`."""
        if not self.holds(slot, generation):
            raise ValueError(f"slot {slot} does not have generation {generation} any more")
        self._numbers_of(slot).release(slot)

    def holds(self, slot: int, generation: int) -> bool:
        """Return whether the slot has that generation now."""
        return 0 < generation == self._numbers_of(slot).generation(slot)

    def leases(self) -> list[tuple[int, int]]:
        """Return slot and generation of each lease that has not ended."""
        return self._leases.taken()

    def _numbers_of(self, slot: int) -> _Numbers:
        return self._registrations if slot < self._count else self._leases


class Quarantine:
    """Deregistered memory, kept alive as long as a peer may write to it.

    A thread, started with the first memory, polls the peers. There is one quarantine per process,
    since it outlives the transports.
    """

    def __init__(self) -> None:
        self.begin()
        # In a forked child the thread does not exist, and the lock may stay locked.
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Begin empty, without a thread."""
        self._changed = Condition()
        self._held: list[tuple[Callable[[], bool], Releasable]] = []
        self._thread: threading.Thread | None = None

    def add(self, is_written: Callable[[], bool], memory: Releasable) -> None:
        """Keep `memory` alive until the thread finds `is_written()` False; then release it."""
        with self._changed:
            self._held.append((is_written, memory))
            if self._thread is None:
                with suppress(LLMException):  # memory stays until a later `add` starts the thread
                    self._thread = start_thread("kvplan-quarantine", self._run)

    def _run(self) -> None:
        with self._changed:
            while self._held:
                self._changed.wait(_POLL_S)
                for entry in list(self._held):
                    self._try_release(*entry)
            self._thread = None

    def _try_release(self, is_written: Callable[[], bool], memory: Releasable) -> None:
        """Release `memory` if no peer can write to it any more; keep it if `is_written` raises."""
        try:
            if is_written():
                return
            self._held.remove((is_written, memory))
            memory.release()
        except Exception as error:
            _LIMITED_LOG.error("could not release quarantined memory: %r", error, exc_info=True)


QUARANTINE: Final = Quarantine()
