"""Memory of this process that peers on this host may reach, and the tables that peers map."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from kvnative._host import GenerationTable
from kvnative._writers import Ticket, WriterTable
from kvplan.device.device import Device
from kvplan.device.sharing import Exported
from kvplan.status import LLMException, LLMStatusCode
from kvplan.system.logs import Log
from kvplan.transport.host_memory import Releasable, host_range
from kvplan.transport.local.descriptors import DescriptorServer
from kvplan.transport.local.memory import offer
from kvplan.transport.local.metadata import MAX_SLOTS, GenerationTableRef, Range, WritersRef
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.registrations import (
    MAX_LEASES,
    WRITER_TIMEOUT_S,
    Found,
    LateWriters,
    Registration,
    Registrations,
    lease_ended,
    still_written,
)
from kvplan.validation import check_range

if TYPE_CHECKING:
    from kvplan.transport.protocol import Kind, Registrable

_LOG = Log("kvplan")


class _ExportPin:
    """A `Releasable` that keeps an export alive."""

    __slots__ = ("_exported",)

    def __init__(self, exported: Exported) -> None:
        self._exported: Exported | None = exported

    def release(self) -> None:
        """Drop the export. Idempotent."""
        self._exported = None


LocalRegistration = Registration[Range, Releasable | None]


class LocalRegistrations(Registrations[Range, Releasable | None]):
    """See `Registrations`. Peers map the generation table and announce writes in a writer table."""

    transport = "a local transport"

    def __init__(self, max_registrations: int, device: Device | None) -> None:
        check_range("max_registrations", max_registrations, 1, MAX_SLOTS)
        self._table = GenerationTable(max_registrations, MAX_LEASES)
        self._writers = WriterTable()
        super().__init__(Range, self._table, MAX_SLOTS)
        self._device = device
        self.sharing = None if device is None else device.sharing
        self.descriptors = None if self.sharing is None else DescriptorServer()
        self._pools: list[Exported] = []

    @property
    def reaches(self) -> frozenset[Kind]:
        """See `Transport.reaches`."""
        device: tuple[Literal["device"], ...] = () if self.sharing is None else ("device",)
        return frozenset(("host", *device))

    def refs(self) -> tuple[GenerationTableRef, WritersRef]:
        """Return the references by which peers find the tables."""
        table, writers = self._table, self._writers
        return (
            GenerationTableRef(table.fd, table.inode, table.num_slots, table.address),
            WritersRef(writers.fd, writers.inode, writers.num_entries, writers.address),
        )

    def preregister_pool(self, memory: Registrable, keep: object) -> None:
        """See `Transport.preregister_pool`: peers map a pool of a device once for all its parts."""
        if self.sharing is None or not isinstance(memory, DeviceRange):
            return
        try:
            pool = self.sharing.export(memory.address, memory.nbytes, memory.buffer, is_pool=True)
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_FEATURE_NOT_ENABLED:
                raise
            return  # `add` will refuse each part
        with self.mutex:
            self.check_open()
            self._pools.append(pool)
        self._send(pool)

    def renew_lease(self, slot: int, generation: int, deadline_ns: int) -> None:
        """See `Transport.renew_lease`."""
        with self.mutex:
            self.check_open()
            try:
                self._table.renew(slot, generation, deadline_ns)
            except ValueError:
                raise lease_ended() from None

    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        """See `Transport.end_leases`."""
        try:
            late = self._late(self._writers.end_leases(self._table, leases, WRITER_TIMEOUT_S))
        except ValueError:
            self.check_open()  # raises if `close` came first
            raise
        if late is not None:
            raise still_written(late)

    def close(self) -> None:
        """See `Registrations.close`; also close the tables."""
        self._writers.close()
        if self.descriptors is not None:
            self.descriptors.close()
        with self.mutex:
            ended = self.select()
            for registration in ended:
                self._withdraw(registration)
            self._closed = True
            self._pools = []
            self._table.close()
        self._release(ended)

    def close_in_child(self) -> None:
        """Unmap the tables in a forked child. The slots are the parent's."""
        self._closed = True
        self._writers.close()
        self._table.close()
        if self.descriptors is not None:
            self.descriptors.close_in_child()

    def _send(self, exported: Exported) -> None:
        if self.descriptors is not None and not exported.ref.handle:
            self.descriptors.add(exported)

    def _find(self, memory: Registrable, *, writable: bool) -> Found[Releasable | None]:
        if self._device is None or self.sharing is None or not isinstance(memory, DeviceRange):
            address, nbytes, pin, arena = host_range(memory, writable=writable)
            return Found(address, nbytes, pin, (None if arena is None else offer(arena), None))
        if memory.buffer is None:
            self._device.check_range("memory", memory.address, memory.nbytes)
        exported = self.sharing.export(memory.address, memory.nbytes, memory.buffer)
        self._send(exported)
        return Found(memory.address, memory.nbytes, _ExportPin(exported), (None, exported.ref))

    def _wait_for_writers(self) -> LateWriters | None:
        return self._late(self._writers.drain(WRITER_TIMEOUT_S))

    def _late(self, tickets: list[Ticket]) -> LateWriters | None:
        if not tickets:
            return None
        pids = sorted({ticket.pid for ticket in tickets})
        return LateWriters(
            f"process {', '.join(map(str, pids))}",
            lambda: any(map(self._writers.stands, tickets)),
        )

    def _warn(self, memory: Range, late: LateWriters) -> None:
        if not memory.announces_reads:
            super()._warn(memory, late)
            return
        _LOG.warning(
            "%s is deregistered, but %s was using it and did not stop within %g s (is it stopped, "
            "or does its GPU copy that much?): kvplan does not own this memory and cannot "
            "quarantine it: do not free it before the transfer or that process has ended",
            memory,
            late.names,
            WRITER_TIMEOUT_S,
        )
