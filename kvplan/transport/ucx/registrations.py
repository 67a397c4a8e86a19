"""What peers may reach of this process over UCX: memory that it knows, and a generation table."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from msgspec.structs import replace

from kvnative._backend import NativeError
from kvnative._host import GenerationTable
from kvplan.execution.task import status_code_of
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.host_memory import host_range, released_if_refused
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.registrations import (
    MAX_LEASES,
    Registration,
    RegistrationTable,
    check_slots,
    leases_taken,
    slots_taken,
    transport_closed,
)
from kvplan.transport.ucx.metadata import MAX_SLOTS, Range, RegionRef

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvnative._host import Pin
    from kvnative._ucx import UcxRegion, UcxWorker
    from kvplan.transport import protocol
    from kvplan.transport.protocol import Kind, Registrable
    from kvplan.transport.registrations import Releasable

_WORD_NBYTES: Final = 8


class Shown(NamedTuple):
    """What is published to peers; see `Metadata`."""

    ranges: tuple[Range, ...]
    regions: tuple[RegionRef, ...]
    generations: RegionRef
    tickets: RegionRef


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class UcxRegistration(Registration[Range]):
    """Memory that peers may reach over UCX.

    Attributes:
        region: that it lies in: itself, or the arena that it is a part of.
    """

    region: UcxRegion

    def release(self) -> None:
        """Let go of the memory: no peer writes to it any more. Idempotent."""
        _release(self.region, self.pin)


class Registrations:
    """Those of one transport; may be used from several threads.

    Peers read and write the memory without asking; what they read from the generation table says
    whether that counts. An arena is made known to UCX as a whole, and once.

    Args:
        worker: of this process.
        num_slots: that there can be at once.

    Raises:
        TypeError, LLMException: LLM_PARAM_INVALID: `num_slots`; otherwise UCX does not take the
            generation table's memory, and why.
    """

    def __init__(self, worker: UcxWorker, num_slots: int) -> None:
        check_slots(num_slots, MAX_SLOTS)
        self._table = RegistrationTable(UcxRegistration, "a ucx transport")
        self._generations = GenerationTable(num_slots, MAX_LEASES)
        self._worker: UcxWorker | None = worker  # None: closed
        self._shown = _mapped(
            worker,
            self._generations.address,
            self._generations.num_slots * _WORD_NBYTES,
            self._generations,
        )
        self._tickets = worker.tickets()
        self.reaches: frozenset[Kind] = frozenset(
            {"host", "device"} if "cuda" in worker.transports else {"host"}
        )

    def __len__(self) -> int:
        return len(self._table)

    def add(self, memory: Registrable, *, writable: bool, keep: object) -> UcxRegistration:
        """See `UcxTransport.register`."""
        address, nbytes, pin, region = self._map(memory, writable=writable)
        with self._table.mutex:
            try:
                slot, generation = self._take()
            except LLMException:
                _release(region, pin)
                raise
            # Which of the regions it is in, `shown` says.
            known = Range(address, nbytes, slot, generation, writable, 0)
            it = UcxRegistration(known, pin, keep, region)
            self._table.add(it)
        return it

    def end(self, registration: protocol.Registration) -> UcxRegistration:
        """From here on no peer begins to read or write it. A second time is fine.

        Raises:
            TypeError: it is no `Registration`.
        """
        it = self._table.own(registration)
        with self._table.mutex:
            if self._table.remove(it):
                self._generations.release(it.range.slot, it.range.generation)
        return it

    def end_all(self) -> list[UcxRegistration]:
        """As `end`, of all that there are, and take no more."""
        with self._table.mutex:
            self._worker = None
            return [self.end(it) for it in self._table.select()]

    def begin_lease(self) -> tuple[int, int]:
        """See `UcxTransport.begin_lease`."""
        with self._table.mutex:
            if self._worker is None:
                raise transport_closed()
            try:
                return self._generations.take(is_lease=True)
            except MemoryError as error:
                raise leases_taken(MAX_LEASES) from error

    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        """From here on no peer begins to read or write with them; others have ended before."""
        with self._table.mutex:
            if self._worker is None:
                raise transport_closed()
            for slot, generation in leases:
                with suppress(ValueError):
                    self._generations.release(slot, generation)

    def shown(self, registrations: Iterable[protocol.Registration] | None) -> Shown:
        """What is published of `registrations`; None: all.

        Raises:
            LLMException: LLM_PARAM_INVALID: one of them is not registered here, or no longer.
            TypeError: one of them is no `Registration`.
        """
        named = self._table.select(registrations)
        held_by = [it.region for it in named]
        regions = {_name(it): it for it in held_by}
        numbers = {name: i for i, name in enumerate(regions)}
        return Shown(
            tuple(replace(it.range, region=numbers[_name(it.region)]) for it in named),
            tuple(_ref(numbers[name], it) for name, it in regions.items()),
            _ref(0, self._shown),
            _ref(0, self._tickets),
        )

    def close(self) -> None:
        """Let go of what peers looked at; the worker, over which they reached it, is closed."""
        self._shown.release()
        self._tickets.release()
        self._generations.close()

    def _take(self) -> tuple[int, int]:
        if self._worker is None:
            raise transport_closed()
        try:
            return self._generations.take()
        except MemoryError as error:
            raise slots_taken(error, MAX_SLOTS) from error

    def _map(
        self, memory: Registrable, *, writable: bool
    ) -> tuple[int, int, Pin | None, UcxRegion]:
        if (worker := self._worker) is None:
            raise transport_closed()
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


def _release(region: UcxRegion, pin: Releasable | None) -> None:
    region.release()
    if pin is not None:
        pin.release()


def _name(region: UcxRegion) -> tuple[int, int]:
    return region.address, region.nbytes


def _ref(number: int, region: UcxRegion) -> RegionRef:
    return RegionRef(region.address, region.nbytes, number, region.rkey)
