"""What peers may reach of this process one-sidedly: memory that UCX knows, and a board."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvnative._backend import NativeError
from kvnative._host import Board
from kvnative._ucx_one_sided import UcxRegions
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.host_range import host_range
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.registration import RegisteredMemory, ranges_of
from kvplan.transport.ucx.end import transport_closed, ucx_error
from kvplan.transport.ucx.metadata import MAX_SLOTS, Range, RegionRef
from kvplan.transport.ucx.registrations import Shown, check_num_slots

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvnative._host import Arena, Pin
    from kvnative._ucx_one_sided import UcxRegion
    from kvplan.transport import protocol
    from kvplan.transport.protocol import Kind, Registrable
    from kvplan.transport.ucx.end import Natives

_WORD_NBYTES = 8


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Registration(RegisteredMemory[Range]):
    """Memory [address, address + nbytes) that peers may reach; given back by `deregister`."""

    range: Range
    pin: Pin | None  # keeps the memory where it is; None: the caller does
    region: UcxRegion  # that it lies in: itself, or the arena that it is a part of


class MappedRegistrations:
    """Those of one transport of mode one_sided; may be used from several threads.

    Peers read and write the memory without asking; what they read from the board beside it tells
    them whether that counts. An arena is made known to UCX as a whole, and once.

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
        self._board: Board | None = None
        self._shown: UcxRegion | None = None
        self._regions: UcxRegions | None = None
        self._reaches_devices = False

    def __len__(self) -> int:
        return len(self._by_slot)

    @property
    def reaches(self) -> frozenset[Kind]:
        """The kinds of memory that can be registered."""
        return frozenset({"host", "device"} if self._reaches_devices else {"host"})

    @property
    def regions(self) -> UcxRegions | None:
        """What this process's UCX knows, once it is there."""
        return self._regions

    def attach(self, natives: Natives) -> None:
        """Show a board; from here on memory can be registered.

        Raises:
            LLMException: UCX does not take the board's memory, and why.
        """
        (native,) = natives
        regions, board = UcxRegions(native), Board(self._num_slots)
        try:
            self._shown = regions.map(board.address, self._num_slots * _WORD_NBYTES, owner=board)
        except NativeError as error:
            raise ucx_error(error, "UCX does not take memory of this process") from error
        self._board, self._regions = board, regions
        self._reaches_devices = "cuda" in native.transports

    def add(self, memory: Registrable, *, writable: bool) -> Registration:
        """See `UcxTransport.register`."""
        address, nbytes, pin, region = self._map(memory, writable=writable)
        with self._mutex:
            if (board := self._board) is None:
                _let_go_of(region, pin)
                raise transport_closed()
            try:
                slot, generation = board.take()
            except MemoryError as error:
                _let_go_of(region, pin)
                raise LLMException(
                    f"{error}: deregister memory, or make the transport with more "
                    f"max_registrations ({MAX_SLOTS} at most)",
                    status_code=LLMStatusCode.LLM_OUT_OF_MEMORY,
                ) from error
            it = Registration(Range(address, nbytes, slot, generation, writable), pin, region)
            self._by_slot[slot] = it
        return it

    def remove(self, registration: protocol.Registration) -> None:
        """See `UcxTransport.deregister`."""
        it = _own(registration)
        with self._mutex:
            board = self._board
            if self._by_slot.get(it.range.slot) is not it or board is None:
                return
            del self._by_slot[it.range.slot]
            board.release(it.range.slot, it.range.generation)
        _let_go_of(it.region, it.pin)

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
            board = None if self._shown is None else _ref(0, self._shown)
        regions = {_name(it): it for it in held_by}
        numbers = {name: i for i, name in enumerate(regions)}
        return Shown(
            tuple(
                replace(it, region=numbers[_name(region)])
                for it, region in zip(ranges, held_by, strict=True)
            ),
            tuple(_ref(numbers[name], it) for name, it in regions.items()),
            board,
        )

    def close(self) -> None:
        """Forget all, and take no more; the end, over which peers reached them, has gone."""
        with self._mutex:
            ended, self._by_slot = list(self._by_slot.values()), {}
            board, self._board = self._board, None
            shown, self._shown = self._shown, None
            if board is not None:
                for it in ended:
                    board.release(it.range.slot, it.range.generation)
        for it in ended:
            _let_go_of(it.region, it.pin)
        if shown is not None:
            shown.release()

    def _map(
        self, memory: Registrable, *, writable: bool
    ) -> tuple[int, int, Pin | None, UcxRegion]:
        if (regions := self._regions) is None or self._board is None:
            raise transport_closed()
        pin: Pin | None = None
        whole: Arena | DeviceRange | None
        if isinstance(memory, DeviceRange):
            if not self._reaches_devices:
                raise LLMException(
                    f"memory at {memory.address:#x} is of a device, and UCX has no transport for "
                    "it here: have that cache on the host (Placement.HOST), or link over hccl",
                    status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                )
            address, nbytes, whole = memory.address, memory.nbytes, memory
        else:
            address, nbytes, pin, whole = host_range(memory, writable=writable)
        start, size = (address, nbytes) if whole is None else (whole.address, whole.nbytes)
        is_device = isinstance(memory, DeviceRange)
        try:
            region = regions.map(start, size, kind="cuda" if is_device else "host", owner=whole)
        except BaseException as error:
            if pin is not None:
                pin.release()
            if isinstance(error, NativeError):
                raise ucx_error(error, f"UCX does not take {size} bytes at {start:#x}") from error
            raise
        return address, nbytes, pin, region


def _let_go_of(region: UcxRegion, pin: Pin | None) -> None:
    region.release()
    if pin is not None:
        pin.release()


def _name(region: UcxRegion) -> tuple[int, int]:
    return region.address, region.nbytes


def _ref(number: int, region: UcxRegion) -> RegionRef:
    return RegionRef(number, region.address, region.nbytes, region.rkey)


def _own(registration: protocol.Registration) -> Registration:
    return Registration.own(registration, "a ucx transport")
