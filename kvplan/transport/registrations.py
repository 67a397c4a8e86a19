"""Memory that peers may reach, as its owner holds it: the same for each transport."""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from kvnative._signals import Condition, Mutex
from kvplan.logs import LimitedLog, Log
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system_limits import start_thread
from kvplan.transport.metadata import Range
from kvplan.transport.protocol import kind_of
from kvplan.validation import check_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvplan.transport import protocol

PATIENCE_S: Final = 1.0
"""For a peer that writes and does not get on, before what it writes to is kept."""

MAX_LEASES: Final = 1 << 17
"""Of one transport at once, besides its registrations."""

_START_BITS: Final = 48  # of the random number that generations begin at
_LOOK_S: Final = 0.05  # between two looks whether it does

_LOG = Log("kvplan")
_LIMITED_LOG = LimitedLog(_LOG)  # of a loop

_Range_co = TypeVar("_Range_co", bound=Range, covariant=True)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Registration(Generic[_Range_co]):
    """Memory [address, address + nbytes) that peers may reach; given back by `deregister`.

    Attributes:
        range: as peers name it.
        pin: keeps the memory where it is; None: the caller does.
        keep: what else must not go before.
    """

    range: _Range_co
    pin: Releasable | None
    keep: object

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""
        return self.range.address

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.range.nbytes

    @property
    def writable(self) -> bool:
        """Whether peers may write to it."""
        return self.range.writable

    def release(self) -> None:
        """Let go of the memory: no peer writes to it any more. Idempotent."""
        if self.pin is not None:
            self.pin.release()

    def __repr__(self) -> str:
        return f"<Registration of {self.range}>"


_Registration = TypeVar("_Registration", bound=Registration[Range])


class RegistrationTable(Generic[_Registration]):
    """The registrations of one transport, by slot; may be used from several threads.

    Args:
        kind: of registration that it holds.
        transport: whose they are, for messages: "a local transport".
    """

    def __init__(self, kind: type[_Registration], transport: str) -> None:
        self._kind = kind
        self._transport = transport
        # Re-entrant: letting go of memory may run finalizers, which may deregister more.
        self.mutex = Mutex()
        self._by_slot: dict[int, _Registration] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_slot)

    def check_open(self) -> None:
        """Raise LLMException after `close`."""
        if self._closed:
            raise transport_closed()

    def add(self, it: _Registration) -> None:
        """Hold it, whose slot nothing else holds.

        Raises:
            LLMException: LLM_FAILED: the table is closed.
        """
        with self.mutex:
            self.check_open()
            self._by_slot[it.range.slot] = it

    def own(self, registration: protocol.Registration) -> _Registration:
        """`registration`, if it is one of such a transport.

        Raises:
            TypeError: it is something else.
        """
        if not isinstance(registration, self._kind):
            raise TypeError(
                f"registration is a {type(registration).__name__}; it must be a Registration that "
                f"`register` of {self._transport} has returned"
            )
        return registration

    def holds(self, it: _Registration) -> bool:
        """Whether it is registered here."""
        return self._by_slot.get(it.range.slot) is it

    def remove(self, it: _Registration) -> bool:
        """Forget it; returns whether it was held."""
        with self.mutex:
            held = self.holds(it)
            if held:
                del self._by_slot[it.range.slot]
            return held

    def select(
        self, registrations: Iterable[protocol.Registration] | None = None
    ) -> tuple[_Registration, ...]:
        """`registrations`, if they are held; None: all that are.

        Raises:
            LLMException: LLM_PARAM_INVALID: one of them is not registered here, or no longer.
            TypeError: one of them is no `Registration`.
        """
        given = None if registrations is None else tuple(self.own(it) for it in registrations)
        with self.mutex:
            if given is None:
                return tuple(self._by_slot.values())
            for it in given:
                if not self.holds(it):
                    raise invalid(f"{it!r} is not registered here, or no longer")
        return given

    def close(self) -> tuple[_Registration, ...]:
        """Forget all, and take no more; returns those that were held, which the caller ends."""
        with self.mutex:
            self._closed = True
            ended, self._by_slot = tuple(self._by_slot.values()), {}
        return ended


class Slots:
    """Numbers of registrations that are free, and the generation of each that is taken.

    Not for several threads at once.

    Args:
        count: registrations that there can be at once.
        most: what `count` may be.

    Raises:
        LLMException: LLM_PARAM_INVALID: `count` is not in [1, most].
        TypeError: `count` is no int.
    """

    def __init__(self, count: int, most: int) -> None:
        check_slots(count, most)
        self.count = count
        self._most = most
        self._free: list[int] = []
        self._unused = iter(range(count))  # those that were never taken
        self._generation = secrets.randbits(_START_BITS)  # a word of one process is none of another

    def take(self) -> tuple[int, int]:
        """A slot, and a generation that no other registration has had.

        Raises:
            LLMException: LLM_OUT_OF_MEMORY: all are taken.
        """
        if (slot := self._free.pop() if self._free else next(self._unused, None)) is None:
            raise slots_taken(f"all {self.count} registrations are taken", self._most)
        self._generation += 1
        return slot, self._generation

    def release(self, slot: int) -> None:
        """Nothing has it any more."""
        self._free.append(slot)


def check_slots(count: int, most: int) -> None:
    """Refuse a number of registrations that a transport cannot have at once."""
    if not 1 <= check_type("max_registrations", count, int) <= most:
        raise invalid(f"max_registrations={count} is out of range [1, {most}]")


def slots_taken(what: object, most: int) -> LLMException:
    """No room for another registration: LLM_OUT_OF_MEMORY."""
    return LLMException(
        f"{what}: deregister memory, or make the transport with more max_registrations ({most} at "
        "most)",
        status_code=LLMStatusCode.LLM_OUT_OF_MEMORY,
    )


def leases_taken(most: int) -> LLMException:
    """No room for another lease: LLM_OUT_OF_MEMORY."""
    return LLMException(
        f"all {most} leases are taken: release one before",
        status_code=LLMStatusCode.LLM_OUT_OF_MEMORY,
    )


def transport_closed() -> LLMException:
    """The transport was closed: LLM_FAILED."""
    return LLMException("the transport is closed")


class Releasable(Protocol):
    """Memory that is held."""

    def release(self) -> None:
        """Let go of the memory."""


class Quarantine:
    """Memory that is deregistered, but that a peer may still write to: held until it cannot.

    By a thread, which is begun with the first. One for the process: it outlives the transports.
    """

    def __init__(self) -> None:
        self.begin()
        # In a forked child the thread is not there, and the lock may be held for ever.
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Hold nothing."""
        self._changed = Condition()
        self._held: list[tuple[Callable[[], bool], Releasable]] = []
        self._thread: threading.Thread | None = None

    def add(self, is_written: Callable[[], bool], memory: Releasable) -> None:
        """Hold `memory` as long as `is_written()`, which the thread asks; then release it."""
        with self._changed:
            self._held.append((is_written, memory))
            if self._thread is None:
                with suppress(LLMException):  # no more threads: it is held for ever
                    self._thread = start_thread("kvplan-quarantine", self._run)

    def _run(self) -> None:
        with self._changed:
            while self._held:
                self._changed.wait(_LOOK_S)
                for entry in list(self._held):
                    self._look(*entry)
            self._thread = None

    def _look(self, is_written: Callable[[], bool], memory: Releasable) -> None:
        """Release `memory` unless a peer may still write to it, as is assumed on an error."""
        try:
            if is_written():
                return
            self._held.remove((is_written, memory))
            memory.release()
        except Exception as error:
            text = "could not release memory of a peer's writes: %r"
            _LIMITED_LOG.error(text, error, exc_info=True)


QUARANTINE: Final = Quarantine()


@dataclass(frozen=True, slots=True)
class Offer:
    """What peers may reach of a cache, over all transports of this process.

    Attributes:
        metadata: what a peer needs to reach it, by the name of the transport; empty where that
            does not reach such memory.
        registrations: each with its transport.
    """

    metadata: Mapping[str, bytes]
    registrations: tuple[tuple[protocol.Transport, protocol.Registration], ...]

    def deregister(self) -> None:
        """End the registrations. A second time is fine, and waits for what the first waits for."""
        with ExitStack() as all_of_them:
            for transport, it in self.registrations:
                all_of_them.callback(transport.deregister, it)


def offer(
    transports: Sequence[protocol.Transport],
    ranges: Sequence[protocol.Registrable],
    writable: bool,
    keep: object = None,
) -> Offer:
    """Let peers reach `ranges`, and keep `keep` until none can write to them any more.

    No ranges: nothing is offered, and nobody needs anything. Peers that use a transport which does
    not reach such memory learn of the cache, with empty metadata.

    Raises:
        LLMException: the transport's, that cannot offer them.
    """
    metadata = {}
    made: list[tuple[protocol.Transport, protocol.Registration]] = []
    with ExitStack() as undo:
        for transport in transports if ranges else ():
            metadata[transport.name] = b""
            if kind_of(ranges[0]) not in transport.reaches:
                continue
            try:
                offered = _offer_by(transport, ranges, writable, keep)
            except LLMException as error:
                if error.status_code is not LLMStatusCode.LLM_FEATURE_NOT_ENABLED:
                    raise
                _LOG.info("peers do not reach a cache over transport %s: %s", transport.name, error)
            else:
                undo.callback(offered.deregister)
                metadata |= offered.metadata
                made += offered.registrations
        undo.pop_all()
    return Offer(MappingProxyType(metadata), tuple(made))


def _offer_by(
    transport: protocol.Transport,
    ranges: Sequence[protocol.Registrable],
    writable: bool,
    keep: object,
) -> Offer:
    registrations = []
    with ExitStack() as unless_all:
        for memory_range in ranges:
            registrations.append(transport.register(memory_range, writable=writable, keep=keep))
            unless_all.callback(transport.deregister, registrations[-1])
        metadata = transport.metadata(registrations)
        unless_all.pop_all()
    return Offer({transport.name: metadata}, tuple((transport, it) for it in registrations))
