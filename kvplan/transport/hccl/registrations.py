"""Memory of this process that peers may reach over HCCL, and the generation table on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kvplan.status import LLMException
from kvplan.system.logs import Log
from kvplan.transport import announced
from kvplan.transport.announced import AnnouncedRegistrations
from kvplan.transport.hccl.connections import Connections
from kvplan.transport.hccl.device import HcclDevice, whole_pages
from kvplan.transport.hccl.metadata import MAX_SLOTS, Range
from kvplan.transport.host_memory import host_range, released_if_refused
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.registrations import Found, Registration

if TYPE_CHECKING:
    from kvplan.transport.hccl.regions import HeldRegion
    from kvplan.transport.protocol import Registrable

_LOG = Log("kvplan")


class Covered:
    """Registered memory, and the HCCL regions that hold it."""

    __slots__ = ("_hccl", "_keep", "regions")

    def __init__(self, hccl: HcclDevice, regions: tuple[HeldRegion, ...], keep: object) -> None:
        self._hccl = hccl
        self._keep = keep
        self.regions = regions

    def release(self) -> None:
        """Release the regions. Idempotent."""
        regions, self.regions = self.regions, ()
        self._hccl.regions.release(regions, self._hccl.forget)
        self._keep = None  # the registration, or the error of a refusal, may be kept for long


HcclRegistration = Registration[Range, Covered]


class _Memory(NamedTuple):
    """Memory that is about to be registered; `whole` is its allocation, if known."""

    address: int
    nbytes: int
    on_device: bool
    keep: Any  # the pin of host memory, or the buffer; None: the caller keeps it in place
    whole: tuple[int, int] | None


class HcclRegistrations(AnnouncedRegistrations[Range, Covered, Connections]):
    """See `Registrations`. Ending leases waits for writes in flight; deregistering does not."""

    transport = "an hccl transport"

    def __init__(
        self,
        hccl: HcclDevice,
        read: Callable[[Connections], announced.Tickets | None],
        linked: Callable[[], Iterable[Connections]],
    ) -> None:
        super().__init__(
            Range,
            hccl.generations,
            MAX_SLOTS,
            thread=f"kvplan-leases-{hccl.device.id}",
            read=read,
            linked=linked,
        )
        self._hccl = hccl
        self._pools: list[Covered] = []

    def preregister_pool(self, memory: Registrable, keep: object) -> None:
        """See `Transport.preregister_pool`: one region, so that parts do not renew connections."""
        covered = self._cover(self._locate(memory, writable=True), keep)
        with self.mutex:
            if not self._closed:
                self._pools.append(covered)
                return
        covered.release()

    def close(self) -> None:
        """See `Registrations.close`."""
        super().close()
        with self.mutex:
            pools, self._pools = self._pools, []
        for covered in pools:
            covered.release()

    def _withdraw(self, registration: HcclRegistration) -> None:
        try:
            super()._withdraw(registration)
        except LLMException as error:
            _LOG.warning(
                "event=generation_table_lost device=%d reason=%s", self._hccl.device.id, error
            )

    def _find(self, memory: Registrable, *, writable: bool) -> Found[Covered]:
        found = self._locate(memory, writable=writable)
        covered = self._cover(found)
        refs = tuple(region.ref for region in covered.regions)
        return Found(found.address, found.nbytes, covered, (found.on_device, refs))

    def _locate(self, memory: Registrable, *, writable: bool) -> _Memory:
        if isinstance(memory, DeviceRange):
            if (buffer := memory.buffer) is None:
                self._hccl.device.check_range("memory", memory.address, memory.nbytes)
            whole = None if buffer is None else (buffer.address, buffer.nbytes)
            return _Memory(memory.address, memory.nbytes, True, buffer, whole)
        product = self._hccl.product
        if "host" not in product.registers:
            raise TypeError(
                f"memory is on the host; on this product ({product.name}) HCCL reaches only device "
                "memory"
            )
        address, nbytes, pin, arena = host_range(memory, writable=writable)
        whole = None if arena is None else (arena.address, arena.nbytes)
        return _Memory(address, nbytes, False, pin, whole)

    def _cover(self, found: _Memory, also: object = None) -> Covered:
        address, nbytes, on_device, pin, whole = found
        keep = pin if also is None else (pin, also)
        pages = partial(whole_pages, self._hccl.device if on_device else None)
        address, nbytes = pages(address, nbytes)
        whole = whole and pages(*whole)
        with released_if_refused(None if on_device else pin):
            regions = self._hccl.regions.cover(
                address, nbytes, on_device=on_device, owner=keep, whole=whole
            )
        return Covered(self._hccl, regions, keep)
