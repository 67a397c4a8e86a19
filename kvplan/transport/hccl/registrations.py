"""What peers may reach of this process over HCCL: registrations, and which of them still stand."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvnative._hccl import NUM_TICKETS, Tickets
from kvnative._signals import Mutex
from kvplan.logs import Log
from kvplan.status import LLMException, invalid
from kvplan.transport.hccl.metadata import MAX_SLOTS, WORD_NBYTES, GenerationTableRef, Range
from kvplan.transport.host_memory import host_range
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.registrations import (
    MAX_LEASES,
    Registration,
    RegistrationTable,
    Slots,
    leases_taken,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvnative._acl import DeviceBuffer
    from kvplan.device.device import Device
    from kvplan.transport import protocol
    from kvplan.transport.hccl.device import HcclDevice
    from kvplan.transport.hccl.regions import HeldRegion
    from kvplan.transport.protocol import Registrable

_LOG = Log("kvplan")


class GenerationTable:
    """A word for each slot: the generation of the registration or lease that has it, or 0.

    A peer that transfers reads the words of the ranges that it used after its bytes, in the order
    of its stream: where one is not what was published, nothing of the transfer counts. Slots of
    leases follow those of registrations; then come this process's own tickets, and words that
    tickets of peers are read into.

    Args:
        device: whose memory it lies in.
        num_slots: registrations that there can be at once.

    Raises:
        LLMException: LLM_DEVICE_OUT_OF_MEMORY, or what else the device says.
    """

    def __init__(self, device: Device, num_slots: int) -> None:
        self._slots = Slots(num_slots, MAX_SLOTS)
        # None: there is room for registrations alone.
        num_leases = min(MAX_LEASES, MAX_SLOTS - num_slots)
        self._lease_slots = Slots(num_leases, MAX_LEASES) if num_leases else None
        self._leases: dict[int, int] = {}  # generations of those that have not ended, by slot
        self._device = device
        self.nbytes = (num_slots + num_leases + 2 * NUM_TICKETS) * WORD_NBYTES
        self.buffer: DeviceBuffer | None = device.allocate(self.nbytes)
        self.ref = GenerationTableRef(self.buffer.address, num_slots + num_leases)
        device.write(self.ref.address, bytes(self.nbytes))
        self.tickets = Tickets(self.ref.tickets, self.buffer)
        self.seen = self.ref.tickets + NUM_TICKETS * WORD_NBYTES  # of a peer
        self._mutex = Mutex()  # re-entrant: a signal handler may end a lease

    def take(self) -> tuple[int, int]:
        """A slot, and the generation that its word says from here on.

        Raises:
            LLMException: LLM_OUT_OF_MEMORY: all are taken; what the device says.
        """
        with self._mutex:
            slot, generation = self._slots.take()
        try:
            self._write(slot, generation)
        except LLMException:
            with self._mutex:
                self._slots.release(slot)
            raise
        return slot, generation

    def release(self, slot: int) -> None:
        """From here on no transfer that uses the slot's registration succeeds.

        Raises:
            LLMException: what the device says; the slot is not used again then.
        """
        self._write(slot, 0)
        with self._mutex:
            self._slots.release(slot)

    def begin_lease(self) -> tuple[int, int]:
        """A slot for a lease, and the generation that its word says from here on.

        Raises:
            LLMException: LLM_OUT_OF_MEMORY: all are taken; what the device says.
        """
        with self._mutex:
            if (slots := self._lease_slots) is None:
                raise leases_taken(0)
            try:
                number, generation = slots.take()
            except LLMException:
                raise leases_taken(slots.count) from None
        slot = self._slots.count + number
        try:
            self._write(slot, generation)
        except LLMException:
            with self._mutex:
                slots.release(number)
            raise
        with self._mutex:
            self._leases[slot] = generation
        return slot, generation

    def end_lease(self, slot: int, generation: int) -> None:
        """From here on no transfer with it succeeds; one that has ended before is fine.

        Raises:
            LLMException: what the device says; it may not have ended then.
        """
        with self._mutex:
            if (slots := self._lease_slots) is None or self._leases.get(slot) != generation:
                return
            self._write(slot, 0)
            del self._leases[slot]
            slots.release(slot - self._slots.count)

    def close(self) -> None:
        """Let go of the memory: no connection reaches it any more."""
        self.buffer = None
        del self.tickets

    def address_of(self, slot: int) -> int:
        """Of a slot's word."""
        return self.ref.address + WORD_NBYTES * slot

    def _write(self, slot: int, generation: int) -> None:
        self._device.write(self.address_of(slot), generation.to_bytes(WORD_NBYTES, "little"))


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class HcclRegistration(Registration[Range]):
    """Memory that peers may reach over HCCL.

    Attributes:
        regions: that hold it, as HCCL knows them.
    """

    regions: tuple[HeldRegion, ...]


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
        hccl: the device.
    """

    def __init__(self, hccl: HcclDevice) -> None:
        self._hccl = hccl
        self._table = RegistrationTable(HcclRegistration, "an hccl transport")
        self._pools: list[tuple[HeldRegion, ...]] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._table)

    def preregister_pool(self, memory: Registrable, keep: object) -> None:
        """Let HCCL know memory whose parts will be registered."""
        found = self._find(memory, writable=True)
        regions = self._cover(found._replace(keep=(found.keep, keep)))
        with self._table.mutex:
            if not self._closed:
                self._pools.append(regions)
                return
        self._release(regions)

    def add(self, memory: Registrable, *, writable: bool) -> HcclRegistration:
        """See `HcclTransport.register`."""
        found = self._find(memory, writable=writable)
        regions = self._cover(found)
        try:
            slot, generation = self._hccl.generations.take()
        except BaseException:
            self._release(regions)
            raise
        refs = tuple(it.ref for it in regions)
        known = Range(
            found.address, found.nbytes, slot, generation, writable, found.on_device, refs
        )
        it = HcclRegistration(known, None, found.keep, regions)
        try:
            self._table.add(it)
        except LLMException:
            self._end_one(it)
            raise
        return it

    def remove(self, registration: protocol.Registration) -> None:
        """See `HcclTransport.deregister`."""
        it = self._table.own(registration)
        if self._table.remove(it):
            self._end_one(it)

    def ranges(self, registrations: Iterable[protocol.Registration] | None) -> tuple[Range, ...]:
        """What is published of `registrations`; None: all."""
        return tuple(it.range for it in self._table.select(registrations))

    def close(self) -> None:
        """End all, and take no more."""
        with self._table.mutex:
            self._closed = True
            ended = self._table.close()
            pools, self._pools = self._pools, []
        for it in ended:
            self._end_one(it)
        for regions in pools:
            self._release(regions)

    def _find(self, memory: Registrable, *, writable: bool) -> _Found:
        if isinstance(memory, DeviceRange):
            buffer = memory.buffer
            if buffer is None:
                self._hccl.device.check_range("memory", memory.address, memory.nbytes)
            whole = None if buffer is None else (buffer.address, buffer.nbytes)
            return _Found(memory.address, memory.nbytes, True, buffer, whole)
        product = self._hccl.product
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
        pages = partial(whole_pages, self._hccl.device if on_device else None)
        address, nbytes = pages(address, nbytes)
        whole = whole and pages(*whole)
        regions = self._hccl.regions.cover(
            address, nbytes, on_device=on_device, owner=keep, whole=whole
        )
        if any(it.on_device is not on_device for it in regions):
            self._release(regions)
            raise invalid(f"memory at {address:#x} is registered already, as another kind")
        return regions

    def _end_one(self, it: HcclRegistration) -> None:
        try:
            # First: from here on no transfer of a peer succeeds, whatever still moves.
            self._hccl.generations.release(it.range.slot)
        except LLMException as error:
            _LOG.warning(
                "event=generation_table_lost device=%d reason=%s", self._hccl.device.id, error
            )
        self._release(it.regions)

    def _release(self, regions: tuple[HeldRegion, ...]) -> None:
        self._hccl.regions.release(regions, self._hccl.forget)


def whole_pages(device: Device | None, address: int, nbytes: int) -> tuple[int, int]:
    """The pages of a device or the host that a range lies in: (address, nbytes).

    HCCS shares memory by the page, and the host's is mapped by the page. Of one region that is
    refused no connection could be made at all.
    """
    page = mmap.PAGESIZE if device is None else device.native.page_nbytes(address) or 1
    start = address - address % page
    return start, -((start - address - nbytes) // page) * page
