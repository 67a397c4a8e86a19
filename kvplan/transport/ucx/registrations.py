"""What peers may reach of this process over UCX: memory that it knows, and a board."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from kvnative._backend import NativeError
from kvnative._host import Board
from kvplan.execution.task import status_code_of
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.host_range import host_range, released_if_refused
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.registration import RegisteredMemory, ranges_of
from kvplan.transport.ucx.metadata import MAX_SLOTS, Range, RegionRef
from kvplan.validation import check_type

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvnative._host import Pin
    from kvnative._ucx import UcxRegion, UcxWorker
    from kvplan.transport import protocol
    from kvplan.transport.protocol import Kind, Registrable

_WORD_NBYTES: Final = 8


class Shown(NamedTuple):
    """What peers are told; see `Metadata`."""

    ranges: tuple[Range, ...]
    regions: tuple[RegionRef, ...]
    board: RegionRef
    tickets: RegionRef


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Registration(RegisteredMemory[Range]):
    """Memory [address, address + nbytes) that peers may reach; given back by `deregister`."""

    range: Range
    pin: Pin | None  # keeps the memory where it is; None: the caller does
    region: UcxRegion  # that it lies in: itself, or the arena that it is a part of
    keep: object = None  # what else must not go before

    def release(self) -> None:
        """Let go of the memory: no peer writes to it any more. Idempotent."""
        _release(self.region, self.pin)


class Registrations:
    """Those of one transport; may be used from several threads.

    Peers read and write the memory without asking; what they read from the board beside it tells
    them whether that counts. An arena is made known to UCX as a whole, and once.

    Args:
        worker: of this process.
        num_slots: that there can be at once.

    Raises:
        TypeError, LLMException: LLM_PARAM_INVALID: `num_slots`; otherwise UCX does not take the
            board's memory, and why.
    """

    def __init__(self, worker: UcxWorker, num_slots: int) -> None:
        if not 1 <= check_type("max_registrations", num_slots, int) <= MAX_SLOTS:
            raise invalid(f"max_registrations={num_slots} is out of range [1, {MAX_SLOTS}]")
        # Re-entrant: letting go of memory may run finalizers, which may deregister more.
        self._mutex = threading.RLock()
        self._by_slot: dict[int, Registration] = {}
        self._board = Board(num_slots)
        self._worker: UcxWorker | None = worker  # None: closed
        self._shown = _mapped(worker, self._board.address, num_slots * _WORD_NBYTES, self._board)
        self._tickets = worker.tickets()
        self.reaches: frozenset[Kind] = frozenset(
            {"host", "device"} if "cuda" in worker.transports else {"host"}
        )

    def __len__(self) -> int:
        return len(self._by_slot)

    def add(self, memory: Registrable, *, writable: bool, keep: object) -> Registration:
        """See `UcxTransport.register`."""
        address, nbytes, pin, region = self._map(memory, writable=writable)
        with self._mutex:
            try:
                slot, generation = self._take()
            except LLMException:
                _release(region, pin)
                raise
            # Which of the regions it is in, `shown` says.
            known = Range(address, nbytes, slot, generation, writable, 0)
            it = self._by_slot[slot] = Registration(known, pin, region, keep)
        return it

    def end(self, registration: protocol.Registration) -> Registration:
        """From here on no peer begins to read or write it. A second time is fine.

        Raises:
            TypeError: it is no `Registration`.
        """
        it = _own(registration)
        with self._mutex:
            if self._by_slot.get(it.range.slot) is it:
                del self._by_slot[it.range.slot]
                self._board.release(it.range.slot, it.range.generation)
        return it

    def end_all(self) -> list[Registration]:
        """As `end`, of all that there are, and take no more."""
        with self._mutex:
            self._worker = None
            return [self.end(it) for it in tuple(self._by_slot.values())]

    def shown(self, registrations: Iterable[protocol.Registration] | None) -> Shown:
        """What peers are told of `registrations`; None: all.

        Raises:
            LLMException: LLM_PARAM_INVALID: one of them is not registered here, or no longer.
            TypeError: one of them is no `Registration`.
        """
        given = None if registrations is None else [_own(it) for it in registrations]
        with self._mutex:
            ranges = ranges_of(given, self._by_slot)
            held_by = [self._by_slot[it.slot].region for it in ranges]
        regions = {_name(it): it for it in held_by}
        numbers = {name: i for i, name in enumerate(regions)}
        return Shown(
            tuple(
                replace(it, region=numbers[_name(region)])
                for it, region in zip(ranges, held_by, strict=True)
            ),
            tuple(_ref(numbers[name], it) for name, it in regions.items()),
            _ref(0, self._shown),
            _ref(0, self._tickets),
        )

    def close(self) -> None:
        """Let go of what peers looked at; the worker, over which they reached it, is closed."""
        self._shown.release()
        self._tickets.release()
        self._board.close()

    def _take(self) -> tuple[int, int]:
        if self._worker is None:
            raise LLMException("the transport is closed")
        try:
            return self._board.take()
        except MemoryError as error:
            raise LLMException(
                f"{error}: deregister memory, or make the transport with more max_registrations "
                f"({MAX_SLOTS} at most)",
                status_code=LLMStatusCode.LLM_OUT_OF_MEMORY,
            ) from error

    def _map(
        self, memory: Registrable, *, writable: bool
    ) -> tuple[int, int, Pin | None, UcxRegion]:
        if (worker := self._worker) is None:
            raise LLMException("the transport is closed")
        if isinstance(memory, DeviceRange):
            if "device" not in self.reaches:
                raise LLMException(
                    f"memory at {memory.address:#x} is of a device, and UCX has no transport for "
                    "it here: have that cache on the host (Placement.HOST), or link over hccl",
                    status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                )
            region = _mapped(worker, memory.address, memory.nbytes, memory, kind="cuda")
            return memory.address, memory.nbytes, None, region
        address, nbytes, pin, arena = host_range(memory, writable=writable)
        start, size = (address, nbytes) if arena is None else (arena.address, arena.nbytes)
        with released_if_refused(pin):
            return address, nbytes, pin, _mapped(worker, start, size, arena)


def _mapped(
    worker: UcxWorker,
    address: int,
    nbytes: int,
    owner: object,
    kind: Literal["host", "cuda"] = "host",
) -> UcxRegion:
    try:
        return worker.map(address, nbytes, kind=kind, owner=owner)
    except NativeError as error:
        raise LLMException(
            f"UCX does not take {nbytes} bytes at {address:#x}: {error}",
            status_code=status_code_of(getattr(error, "status", None)),
        ) from error


def _release(region: UcxRegion, pin: Pin | None) -> None:
    region.release()
    if pin is not None:
        pin.release()


def _name(region: UcxRegion) -> tuple[int, int]:
    return region.address, region.nbytes


def _ref(number: int, region: UcxRegion) -> RegionRef:
    return RegionRef(number, region.address, region.nbytes, region.rkey)


def _own(registration: protocol.Registration) -> Registration:
    return Registration.own(registration, "a ucx transport")
