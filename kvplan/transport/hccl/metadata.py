"""What a process publishes to its peers about its device and the memory it has registered, as JSON.

Checked as strictly as the local transport's: it comes from outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvplan.transport import ranges
from kvplan.transport.base import PeerMetadata
from kvplan.transport.hccl.addresses import DeviceAddress
from kvplan.transport.wire import (
    ADDRESS,
    NUMBER,
    PEER,
    SIZE,
    fields_of,
    range_bounds,
    write_schema,
)

SCHEMA: Final = "kvplan.hccl"
SCHEMA_VERSION: Final = 2
MAX_SLOTS: Final = 1 << 24
WORD_NBYTES: Final = 8

_GENERATION_TABLE = {"address": ADDRESS, "num_slots": (1, MAX_SLOTS)}
_RANGE = range_bounds((0, MAX_SLOTS - 1))
_REGION = {"number": NUMBER, "address": ADDRESS, "nbytes": SIZE}
_TOP = ("instance", "product", "device", "board", "newest", "ranges")


@dataclass(frozen=True, slots=True)
class GenerationTableRef:
    """Where the generation table lies in the device's memory: a word of 8 bytes for each slot.

    The words of tickets follow, by which a writer announces itself to its peers.
    """

    address: int
    num_slots: int

    @property
    def tickets(self) -> int:
        """The address of those."""
        return self.address + WORD_NBYTES * self.num_slots


@dataclass(frozen=True, slots=True)
class RegionRef:
    """Memory [address, address + nbytes) that HCCL knows; numbers rise with each new region."""

    number: int
    address: int
    nbytes: int

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether [address, address + nbytes) lies inside."""
        return self.address <= address and address + nbytes <= self.address + self.nbytes


@dataclass(frozen=True, slots=True)
class Range(ranges.Range):
    """Registered memory [address, address + nbytes) of a process.

    Attributes:
        on_device: whether it is memory of the device.
        regions: what HCCL knows it as, in the order of addresses.
    """

    on_device: bool
    regions: tuple[RegionRef, ...]

    def region_of(self, address: int, nbytes: int) -> RegionRef | None:
        """The one region that holds [address, address + nbytes); None: it takes several."""
        return next((it for it in self.regions if it.holds(address, nbytes)), None)

    def __str__(self) -> str:
        kind = "device" if self.on_device else "host"
        return f"{self.address:#x}+{self.nbytes} ({kind}{'' if self.writable else ', read-only'})"


@dataclass(frozen=True, slots=True)
class Metadata(PeerMetadata):
    """All that a peer needs to reach this process's device.

    Attributes:
        instance: 32 hexadecimal digits, which no other transport has.
        product: of the device, such as "A2".
        device: where it is.
        generations: of registrations.
        newest: the highest number of a region so far; a connection that is made later has bound
            all of them, but for those that have gone.
        ranges: that it names.
    """

    instance: str
    product: str
    device: DeviceAddress
    generations: GenerationTableRef
    newest: int
    ranges: tuple[Range, ...] = ()

    def __str__(self) -> str:
        return f"device {self.device.device_id} of host {self.device.server_id}"

    @property
    def owner(self) -> str:
        """See `PeerMetadata.owner`."""
        return f"instance {self.instance}"

    def is_of_owner(self, other: Metadata) -> bool:
        """See `PeerMetadata.is_of_owner`."""
        return (self.instance, self.generations) == (other.instance, other.generations)

    def to_bytes(self) -> bytes:
        """As JSON, UTF-8."""
        fields = {
            "instance": self.instance,
            "product": self.product,
            "device": self.device.to_dict(),
            "board": fields_of(self.generations),
            "newest": self.newest,
            "ranges": [
                {**fields_of(it), "regions": [fields_of(region) for region in it.regions]}
                for it in self.ranges
            ],
        }
        return write_schema(SCHEMA, SCHEMA_VERSION, fields)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Metadata:
        """Check and read what `to_bytes` of a peer has written.

        Raises:
            LLMException: LLM_PARAM_INVALID, naming the field, its value and the allowed range.
            TypeError: `blob` is not bytes.
        """
        document = PEER.read_schema(blob, SCHEMA, SCHEMA_VERSION)
        fields = PEER.fields("", document, {"schema", "schema_version", *_TOP})
        ref = GenerationTableRef(**PEER.record("board", fields["board"], _GENERATION_TABLE))
        newest = PEER.numbers("document", fields, {"newest": NUMBER})["newest"]
        named = PEER.elements("ranges", fields["ranges"])
        return cls(
            PEER.instance(fields["instance"]),
            PEER.printable("product", fields["product"]),
            DeviceAddress.of_fields(PEER, "device", fields["device"]),
            ref,
            newest,
            tuple(_range(f"ranges[{i}]", it, ref, newest) for i, it in enumerate(named)),
        )


def _range(path: str, value: object, generations: GenerationTableRef, newest: int) -> Range:
    common, fields = PEER.range(
        path, value, _RANGE, generations.num_slots, {"on_device", "regions"}
    )
    on_device = PEER.flag(f"{path}.on_device", fields["on_device"])
    regions = []
    at, end = common["address"], common["address"] + common["nbytes"]
    for i, given in enumerate(PEER.elements(f"{path}.regions", fields["regions"])):
        where = f"{path}.regions[{i}]"
        region = RegionRef(**PEER.record(where, given, _REGION))
        if region.number > newest:
            raise PEER.bad(f"{where}.number is {region.number}; the newest region is {newest}")
        if not region.address <= at < region.address + region.nbytes:
            raise PEER.bad(
                f"{where} at {region.address}, nbytes {region.nbytes}, does not have byte {at}"
            )
        at = min(end, region.address + region.nbytes)
        regions.append(region)
    if at < end:
        raise PEER.bad(f"{path}.regions end at {at}; the range ends at {end}")
    return Range(**common, on_device=on_device, regions=tuple(regions))
