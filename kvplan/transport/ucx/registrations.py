"""Memory of this process that peers may reach over UCX, and the generation table that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from msgspec.structs import replace

from kvnative._host import GenerationTable, Pin
from kvnative._ucx import UcxEndpoint, UcxRegion, UcxWorker
from kvplan.execution.task import native_errors
from kvplan.status import unsupported
from kvplan.transport.announced import AnnouncedRegistrations, Tickets
from kvplan.transport.host_memory import host_range, released_if_refused
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.registrations import (
    MAX_LEASES,
    AnyRegistration,
    Found,
    LateWriters,
    Registration,
    transport_closed,
)
from kvplan.transport.ucx.metadata import MAX_SLOTS, Range, RegionRef
from kvplan.validation import check_range

if TYPE_CHECKING:
    from kvplan.transport.protocol import Kind, Registrable

_WORD_NBYTES: Final = 8


class Mapped(NamedTuple):
    """Memory that is registered with UCX.

    Attributes:
        region: The memory itself, or the arena that contains it.
        pin: Keeps the memory in place; None: the caller does.
    """

    region: UcxRegion
    pin: Pin | None

    def release(self) -> None:
        """Release the memory. Idempotent."""
        self.region.release()
        if self.pin is not None:
            self.pin.release()


UcxRegistration = Registration[Range, Mapped]


class Published(NamedTuple):
    """The fields of `Metadata` that describe memory."""

    ranges: tuple[Range, ...]
    regions: tuple[RegionRef, ...]
    generations: RegionRef
    tickets: RegionRef


class UcxRegistrations(AnnouncedRegistrations[Range, Mapped, UcxEndpoint]):
    """See `Registrations`. An arena is registered with UCX once, and as a whole."""

    transport = "a ucx transport"

    def __init__(
        self,
        worker: UcxWorker,
        max_registrations: int,
        read: Callable[[UcxEndpoint], Tickets | None],
        linked: Callable[[], Iterable[UcxEndpoint]],
    ) -> None:
        check_range("max_registrations", max_registrations, 1, MAX_SLOTS)
        table = GenerationTable(max_registrations, MAX_LEASES)
        super().__init__(
            Range, table, MAX_SLOTS, thread="kvplan-ucx-leases", read=read, linked=linked
        )
        self._table = table
        self._worker: UcxWorker | None = worker  # None: closed
        self._table_region = _map(worker, table.address, table.num_slots * _WORD_NBYTES, table)
        self._tickets = worker.tickets()
        self.reaches: frozenset[Kind] = frozenset(
            {"host", "device"} if "cuda" in worker.transports else {"host"}
        )

    def published(self, registrations: Sequence[AnyRegistration]) -> Published:
        """Return the fields of the metadata for these registrations."""
        regions = {_key(named.holder.region): named.holder.region for named in registrations}
        # Slots, as links use documents of several caches at a time: no two regions share a number.
        numbers = {_key(named.holder.region): named.range.slot for named in registrations}
        return Published(
            tuple(
                replace(named.range, region=numbers[_key(named.holder.region)])
                for named in registrations
            ),
            tuple(_ref(numbers[name], region) for name, region in regions.items()),
            _ref(0, self._table_region),
            _ref(0, self._tickets),
        )

    def close(self) -> None:
        """See `Registrations.close`."""
        self._worker = None
        super().close()

    def close_table(self) -> None:
        """Release the tables that peers read, after the worker is closed."""
        self._table_region.release()
        self._tickets.release()
        self._table.close()

    def _wait_for_writers(self) -> LateWriters | None:
        return self._writers.wait(self._linked())

    def _find(self, memory: Registrable, *, writable: bool) -> Found[Mapped]:
        if (worker := self._worker) is None:
            raise transport_closed()
        if isinstance(memory, DeviceRange):
            if "device" not in self.reaches:
                raise unsupported(
                    f"memory at {memory.address:#x} is on a device that UCX does not reach here: "
                    "place the cache on the host (Placement.HOST), or link over hccl"
                )
            region = _map(worker, memory.address, memory.nbytes, memory, kind="cuda")
            return Found(memory.address, memory.nbytes, Mapped(region, None), (0,))
        address, nbytes, pin, arena = host_range(memory, writable=writable)
        start, size = (address, nbytes) if arena is None else (arena.address, arena.nbytes)
        with released_if_refused(pin):
            region = _map(worker, start, size, arena)
        # `published` numbers the regions.
        return Found(address, nbytes, Mapped(region, pin), (0,))


def _map(
    worker: UcxWorker,
    address: int,
    nbytes: int,
    owner: object,
    kind: Literal["host", "cuda"] = "host",
) -> UcxRegion:
    with native_errors(f"UCX could not register {nbytes} bytes at {address:#x}"):
        return worker.map(address, nbytes, kind=kind, owner=owner)


def _key(region: UcxRegion) -> tuple[int, int]:
    return region.address, region.nbytes


def _ref(number: int, region: UcxRegion) -> RegionRef:
    return RegionRef(region.address, region.nbytes, number, region.rkey)
