"""Metadata of the transport `hccl`."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from kvplan.transport import metadata
from kvplan.transport.hccl.addresses import DeviceAddress
from kvplan.transport.hccl.ports import ServerAddress
from kvplan.transport.metadata import (
    Address,
    Extent,
    InstanceMetadata,
    Name,
    Number,
    Record,
    check_printable,
    check_slots,
)
from kvplan.validation import resolved

MAX_SLOTS: Final = 1 << 24
WORD_NBYTES: Final = 8


class GenerationTableRef(Record, frozen=True):
    """The generation table in the memory of the device: a word of 8 bytes per slot.

    The tickets follow, with which this process announces its writes to memory of peers.
    """

    address: Address
    num_slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]

    @property
    def tickets(self) -> int:
        """The address of the tickets."""
        return self.address + WORD_NBYTES * self.num_slots


class RegionRef(Extent, frozen=True):
    """Memory [address, address + nbytes) in HCCL. Each new region has a higher number."""

    number: Number


class Range(metadata.Range, frozen=True):
    """Registered memory [address, address + nbytes) of a process.

    Attributes:
        on_device: True if the memory is on the device.
        regions: The HCCL regions that cover the memory, by address.
    """

    on_device: bool
    regions: tuple[RegionRef, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        at, end = self.address, self.address + self.nbytes
        for i, region in enumerate(self.regions):
            if not region.address <= at < region.address + region.nbytes:
                raise ValueError(
                    f"regions[{i}] at {region.address}, nbytes {region.nbytes}, does not hold "
                    f"byte {at}"
                )
            at = min(end, region.address + region.nbytes)
        if at < end:
            raise ValueError(f"regions end at {at}; the range ends at {end}")

    def region_of(self, address: int, nbytes: int) -> RegionRef | None:
        """Return the region that holds all of [address, address + nbytes), or None."""
        return next((region for region in self.regions if region.holds(address, nbytes)), None)

    def __str__(self) -> str:
        kind = "device" if self.on_device else "host"
        return f"{self.address:#x}+{self.nbytes} ({kind}{'' if self.writable else ', read-only'})"


@resolved
class Metadata(InstanceMetadata, frozen=True, tag="kvplan.hccl 4"):
    """Everything that a peer needs to reach the device of this process.

    Attributes:
        product: The product of the device, such as "A2".
        device: The address of the device.
        generations: The generation table.
        newest: The highest number of a region so far. A later connection binds all regions up to
            this number that still exist.
        ranges: The registered memory.
        server: The address of HIXL's server; None: HCCL's communicators connect both ends.
    """

    product: Name
    device: DeviceAddress
    generations: GenerationTableRef
    newest: Number
    ranges: tuple[Range, ...] = ()
    server: ServerAddress | None = None

    def __post_init__(self) -> None:
        check_printable(product=self.product)
        check_slots(self.ranges, self.generations.num_slots)
        pod = self.device.super_pod_id or "0"
        if self.server is not None and not (pod.isdecimal() and int(pod) < 2**32):
            raise ValueError(f"super_pod_id is {pod}; over HIXL it must be in [0, {2**32})")
        for i, item in enumerate(self.ranges):
            for k, region in enumerate(item.regions):
                if region.number > self.newest:
                    raise ValueError(
                        f"ranges[{i}].regions[{k}].number is {region.number}; the newest region "
                        f"is {self.newest}"
                    )

    def __str__(self) -> str:
        return f"device {self.device.device_id} of host {self.device.server_id}"

    def is_of_owner(self, other: Metadata) -> bool:
        """See `PeerMetadata.is_of_owner`."""
        return (self.instance, self.generations) == (other.instance, other.generations)
