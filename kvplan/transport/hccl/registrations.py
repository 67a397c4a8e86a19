"""What peers may reach of this process over HCCL: registrations, and the regions that hold them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvplan.logs import Log
from kvplan.status import LLMException, invalid
from kvplan.transport.hccl.end import whole_pages
from kvplan.transport.hccl.metadata import Range
from kvplan.transport.host_range import host_range
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.registration import RegisteredMemory, ranges_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvplan.transport import protocol
    from kvplan.transport.hccl.end import HcclEnd
    from kvplan.transport.hccl.regions import HeldRegion
    from kvplan.transport.protocol import Registrable

_LOG = Log("kvplan")


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Registration(RegisteredMemory[Range]):
    """Memory [address, address + nbytes) that peers may reach; given back by `deregister`."""

    range: Range
    regions: tuple[HeldRegion, ...]
    keep: object  # keeps the memory where it is; None: the caller does


class _Found(NamedTuple):
    """Memory that is to be registered."""

    address: int
    nbytes: int
    on_device: bool
    keep: object
    whole: tuple[int, int] | None  # what was allocated, where that is known


class Registrations:
    """Those of one transport; may be used from several threads.

    Args:
        end: the device.
    """

    def __init__(self, end: HcclEnd) -> None:
        self._end = end
        # Re-entrant: letting go of memory may run finalizers, which may deregister more.
        self._mutex = threading.RLock()
        self._by_slot: dict[int, Registration] = {}
        self._expected: list[tuple[HeldRegion, ...]] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_slot)

    def expect(self, memory: Registrable, keep: object) -> None:
        """Let HCCL know memory whose parts will be registered."""
        found = self._find(memory, writable=True)
        regions = self._cover(found._replace(keep=(found.keep, keep)))
        with self._mutex:
            if not self._closed:
                self._expected.append(regions)
                return
        self._release(regions)

    def add(self, memory: Registrable, *, writable: bool) -> Registration:
        """See `HcclTransport.register`."""
        found = self._find(memory, writable=writable)
        regions = self._cover(found)
        try:
            slot, generation = self._end.board.take()
        except BaseException:
            self._release(regions)
            raise
        refs = tuple(it.ref for it in regions)
        known = Range(
            found.address, found.nbytes, slot, generation, writable, found.on_device, refs
        )
        it = Registration(known, regions, found.keep)
        with self._mutex:
            if not self._closed:
                self._by_slot[slot] = it
                return it
        self._end_one(it)
        raise LLMException("the transport is closed")

    def remove(self, registration: protocol.Registration) -> None:
        """See `HcclTransport.deregister`."""
        it = _own(registration)
        with self._mutex:
            if self._by_slot.get(it.range.slot) is not it:
                return
            del self._by_slot[it.range.slot]
        self._end_one(it)

    def ranges(self, registrations: Iterable[protocol.Registration] | None) -> tuple[Range, ...]:
        """As peers are told `registrations`; None: all.

        Raises:
            LLMException: LLM_PARAM_INVALID: one of them is not registered here, or no longer.
            TypeError: one of them is no `Registration`.
        """
        given = None if registrations is None else [_own(it) for it in registrations]
        with self._mutex:
            return ranges_of(given, self._by_slot)

    def close(self) -> None:
        """End all, and take no more."""
        with self._mutex:
            self._closed = True
            ending, self._by_slot = list(self._by_slot.values()), {}
            expected, self._expected = self._expected, []
        for it in ending:
            self._end_one(it)
        for regions in expected:
            self._release(regions)

    def _find(self, memory: Registrable, *, writable: bool) -> _Found:
        if isinstance(memory, DeviceRange):
            buffer = memory.buffer
            if buffer is None:
                self._end.device.check_range("memory", memory.address, memory.nbytes)
            whole = None if buffer is None else (buffer.address, buffer.nbytes)
            return _Found(memory.address, memory.nbytes, True, buffer, whole)
        product = self._end.product
        if "host" not in product.registers:
            raise TypeError(
                f"memory is of the host; on this product ({product.name}) HCCL reaches device "
                "memory alone"
            )
        address, nbytes, pin, arena = host_range(memory, writable=writable)
        whole = None if arena is None else (arena.address, arena.nbytes)
        return _Found(address, nbytes, False, pin, whole)

    def _cover(self, found: _Found) -> tuple[HeldRegion, ...]:
        address, nbytes, on_device, keep, whole = found
        if on_device:
            native = self._end.device.native
            address, nbytes = whole_pages(native, address, nbytes)
            whole = whole and whole_pages(native, *whole)
        regions = self._end.regions.cover(
            address, nbytes, on_device=on_device, owner=keep, whole=whole
        )
        if any(it.on_device is not on_device for it in regions):
            self._release(regions)
            raise invalid(f"memory at {address:#x} is registered already, as another kind")
        return regions

    def _end_one(self, it: Registration) -> None:
        try:
            # First: from here on no transfer of a peer succeeds, whatever still moves.
            self._end.board.release(it.range.slot)
        except LLMException as error:
            _LOG.warning("event=board_lost device=%d reason=%s", self._end.device.id, error)
        self._release(it.regions)

    def _release(self, regions: tuple[HeldRegion, ...]) -> None:
        self._end.regions.release(regions, self._end.end_region)


def _own(registration: protocol.Registration) -> Registration:
    return Registration.own(registration, "an hccl transport")
