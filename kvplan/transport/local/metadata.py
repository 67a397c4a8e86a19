"""Metadata of the transport `local`.

The metadata grants no rights: the operating system decides which process may reach which memory.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from kvplan.device.sharing import AllocationRef
from kvplan.transport import metadata
from kvplan.transport.local.identity import Identity
from kvplan.transport.metadata import (
    Address,
    Descriptor,
    Extent,
    PeerMetadata,
    Record,
    Uint64,
    check_inside,
    check_slots,
)
from kvplan.validation import resolved

MAX_SLOTS: Final = 2**24
"""The maximum number of slots of a generation table, for registrations and leases."""


class GenerationTableRef(Record, frozen=True):
    """The generation table of a process: descriptor, inode and address.

    The table stays mapped at the address, so a read of it shows whether the system lets this
    process read the peer's memory.
    """

    fd: Descriptor
    inode: Uint64
    num_slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
    address: Address


class WritersRef(Record, frozen=True):
    """The writer table of a process: descriptor, inode, and the address of its entries."""

    fd: Descriptor
    inode: Uint64
    num_entries: Annotated[int, Meta(ge=1, le=2**16)]
    address: Address


class ArenaRef(Extent, frozen=True):
    """An arena: the address at which its owner has mapped it, its descriptor and its inode."""

    fd: Descriptor
    inode: Uint64


class Range(metadata.Range, frozen=True):
    """Registered memory [address, address + nbytes) of a process.

    Attributes:
        arena: The arena that holds host memory. Only system calls reach other host memory.
        allocation: The allocation that holds memory of a device; None: the memory is on the host.
    """

    arena: ArenaRef | None
    allocation: AllocationRef | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arena is not None and self.allocation is not None:
            raise ValueError("arena and allocation are both given; at most one is allowed")
        if self.arena is not None:
            check_inside("it", self, "arena", self.arena)
        if self.allocation is not None:
            check_inside("it", self, "allocation", self.allocation)

    @property
    def is_preferred(self) -> bool:
        """True for memory in an arena, which a plain copy reaches."""
        return self.arena is not None

    @property
    def is_mapped(self) -> bool:
        """See `Range.is_mapped`: an owner cannot take a mapping away from a peer."""
        return self.arena is not None or self.allocation is not None

    @property
    def announces_reads(self) -> bool:
        """True if peers announce reads too, because the owner must wait for them."""
        return self.allocation is not None and not self.allocation.is_kept_by_peers

    @property
    def is_announced(self) -> bool:
        """See `Range.is_announced`."""
        return self.writable or self.announces_reads

    def __str__(self) -> str:
        kind = "arena" if self.arena is not None else "registered"
        if self.allocation is not None:
            kind = f"GPU {self.allocation.device}"
        access = "" if self.writable else ", read-only"
        return f"{self.address:#x}+{self.nbytes} ({kind}{access})"


@resolved
class Metadata(PeerMetadata, frozen=True, tag="kvplan.local 9"):
    """Everything that a peer needs to reach the memory of this process.

    Attributes:
        identity: The process.
        generations: Its generation table.
        writers: Its writer table.
        ranges: The registered memory.
        device: UUID of the device whose memory is shared: 32 hexadecimal digits; empty: none.
        descriptors: Name of the abstract socket that sends descriptors of that memory.
    """

    identity: Identity
    generations: GenerationTableRef
    writers: WritersRef
    ranges: tuple[Range, ...]
    device: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""
    descriptors: Annotated[str, Meta(pattern=r"^(kvplan-descriptors-[0-9a-f]{32})?\Z")] = ""

    def __post_init__(self) -> None:
        check_slots(self.ranges, self.generations.num_slots)

    def __str__(self) -> str:
        return f"peer {self.identity.pid}"

    @property
    def owner(self) -> str:
        """See `PeerMetadata.owner`."""
        return f"process {self.identity.pid}, started at {self.identity.start_time}"

    def is_of_owner(self, other: Metadata) -> bool:
        """See `PeerMetadata.is_of_owner`."""
        return (self.identity, self.generations) == (other.identity, other.generations)
