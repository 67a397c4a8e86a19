"""What peers may reach of this process over UCX, before it is loaded and after."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.host_range import host_range
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.registration import RegisteredMemory, ranges_of
from kvplan.transport.ucx.end import transport_closed
from kvplan.transport.ucx.metadata import MAX_SLOTS, Range, RegionRef
from kvplan.validation import check_type

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvnative._host import Pin
    from kvplan.transport import protocol
    from kvplan.transport.protocol import Kind, Registrable
    from kvplan.transport.ucx.end import Natives


class Shown(NamedTuple):
    """What peers are told; see `Metadata`."""

    ranges: tuple[Range, ...]
    regions: tuple[RegionRef, ...] = ()
    board: RegionRef | None = None


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Registration(RegisteredMemory[Range]):
    """Memory [address, address + nbytes) that peers may reach; given back by `deregister`."""

    range: Range
    pin: Pin | None  # keeps the memory where it is; None: the caller does
    # Held by who ends it, and taken before the table's. Re-entrant: a signal handler may interrupt
    # him to do the same.
    ending: threading.RLock = field(default_factory=threading.RLock, init=False)


class Registrations:
    """Those of one transport; may be used from several threads.

    Each native end has a table of them, which it looks at for each request of a peer. Until those
    ends are made they are kept here alone: no peer can ask for anything.

    Args:
        num_slots: that there can be at once.

    Raises:
        TypeError, LLMException: LLM_PARAM_INVALID: `num_slots`.
    """

    def __init__(self, num_slots: int) -> None:
        check_num_slots(num_slots)
        self._num_slots = num_slots
        # Re-entrant: letting go of memory may run finalizers, which may deregister more.
        self._mutex = threading.RLock()
        self._by_slot: dict[int, Registration] = {}
        self._free: list[int] = []
        self._next = 0  # the first slot that was never taken
        self._generation = 0
        self._natives: Natives = ()
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_slot)

    reaches: frozenset[Kind] = frozenset({"host"})

    @property
    def regions(self) -> None:
        """None: UCX need not know the memory."""

    def attach(self, natives: Natives) -> None:
        """Let the native ends serve all of them, and those that come."""
        with self._mutex:
            for it in tuple(self._by_slot.values()):
                _serve(natives, it.range)
            self._natives = natives

    def add(self, memory: Registrable, *, writable: bool) -> Registration:
        """See `UcxTransport.register`."""
        if isinstance(memory, DeviceRange):
            raise LLMException(
                f"memory at {memory.address:#x} is of a device; over UCX peers reach host memory "
                "alone: have that cache on the host (Placement.HOST), or link over hccl",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        address, nbytes, pin, _ = host_range(memory, writable=writable)
        with self._mutex:
            if self._closed:
                raise transport_closed()
            slot = self._take()
            self._generation += 1
            known = Range(address, nbytes, slot, self._generation, writable)
            it = self._by_slot[slot] = Registration(known, pin)
            natives = self._natives
        _serve(natives, known)  # none yet: `attach` tells them
        return it

    def remove(self, registration: protocol.Registration) -> None:
        """See `UcxTransport.deregister`."""
        it = _own(registration)
        with it.ending:  # until all that is being sent from there is sent, whoever ended it
            with self._mutex:
                if self._by_slot.get(it.range.slot) is not it:
                    return
                natives = self._natives
                if not natives:
                    self._forget(it)
            if natives:
                from kvnative._ucx import remove_range

                # What an interrupted call has removed, or a signal handler, is there no more.
                with suppress(ValueError):
                    remove_range(natives, it.range.slot)  # waits for that
                if not self._forget(it):
                    return
        if it.pin is not None:
            it.pin.release()

    def shown(self, registrations: Iterable[protocol.Registration] | None) -> Shown:
        """What peers are told of `registrations`; None: all.

        Raises:
            LLMException: LLM_PARAM_INVALID: one of them is not registered here, or no longer.
            TypeError: one of them is no `Registration`.
        """
        given = None if registrations is None else [_own(it) for it in registrations]
        with self._mutex:
            return Shown(ranges_of(given, self._by_slot))

    def close(self) -> None:
        """Forget all, and take no more; the native ends, which serve them, have gone."""
        with self._mutex:
            self._closed = True
            self._natives = ()
            ended, self._by_slot = list(self._by_slot.values()), {}
        for it in ended:
            if it.pin is not None:
                it.pin.release()

    def _forget(self, it: Registration) -> bool:
        """True: it was there until now."""
        with self._mutex:
            if self._by_slot.get(it.range.slot) is not it:
                return False
            del self._by_slot[it.range.slot]
            self._free.append(it.range.slot)
            return True

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if self._next == self._num_slots:
            raise LLMException(
                f"all {self._num_slots} registrations are taken: deregister memory, or make the "
                f"transport with more max_registrations ({MAX_SLOTS} at most)",
                status_code=LLMStatusCode.LLM_OUT_OF_MEMORY,
            )
        self._next += 1
        return self._next - 1


def check_num_slots(num_slots: object) -> None:
    """Raise LLMException (LLM_PARAM_INVALID) or TypeError unless there can be so many slots."""
    if not 1 <= check_type("max_registrations", num_slots, int) <= MAX_SLOTS:
        raise LLMException(
            f"max_registrations={num_slots} is out of range [1, {MAX_SLOTS}]",
            status_code=LLMStatusCode.LLM_PARAM_INVALID,
        )


def _serve(natives: Natives, it: Range) -> None:
    for native in natives:
        native.add_range(it.slot, it.address, it.nbytes, it.writable, it.generation)


def _own(registration: protocol.Registration) -> Registration:
    return Registration.own(registration, "a ucx transport")
