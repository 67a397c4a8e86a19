"""Metadata of the transport `ucx`."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from kvplan.transport import metadata
from kvplan.transport.metadata import (
    Extent,
    Number,
    ProcessMetadata,
    check_inside,
    check_printable,
    check_slots,
)
from kvplan.validation import resolved

MAX_SLOTS: Final = 1 << 16  # registrations of one transport

Blob = Annotated[bytes, Meta(min_length=1, max_length=65536)]


class RegionRef(Extent, frozen=True):
    """Memory [address, address + nbytes) that is registered with UCX, and its packed rkey."""

    number: Number
    key: Blob


class Range(metadata.Range, frozen=True):
    """Registered memory [address, address + nbytes) of a process.

    Attributes:
        region: The number of the region that holds it.
    """

    region: Number


@resolved
class Metadata(ProcessMetadata, frozen=True, tag="kvplan.ucx 4"):
    """Everything that a peer needs to reach this process.

    Attributes:
        version: The version of UCX, such as "1.22.0".
        over: The resources that UCX may use, such as "rc_mlx5/mlx5_0:1 cma/memory".
        address: The address of the UCX worker.
        ranges: The registered memory.
        regions: The regions that hold the ranges.
        generations: The generation table: a word of 8 bytes per slot.
        tickets: The writes in flight to memory of peers; see `kvnative._ucx`.
    """

    version: Annotated[str, Meta(pattern=r"^[0-9]{1,4}(\.[0-9]{1,4}){1,2}\Z")]
    over: Annotated[str, Meta(max_length=4096)]
    address: Blob
    ranges: tuple[Range, ...]
    regions: tuple[RegionRef, ...]
    generations: RegionRef
    tickets: RegionRef

    def __post_init__(self) -> None:
        check_printable(host=self.host, over=self.over)
        check_slots(self.ranges, MAX_SLOTS)
        regions = {region.number: region for region in self.regions}
        for i, item in enumerate(self.ranges):
            if (region := regions.get(item.region)) is None:
                raise ValueError(
                    f"ranges[{i}].region is {item.region}; it must be the number of one of "
                    f"{len(regions)} regions"
                )
            check_inside(f"ranges[{i}]", item, "region", region)
