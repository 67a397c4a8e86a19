"""What a process publishes to its peers about itself and its registered memory, as checked JSON.

Whoever holds it gets no rights by it: the system decides who may reach whose memory. It comes from
outside, though, so nothing in it is believed before it is checked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from reprlib import repr as show  # short, however long or deep the value is
from typing import TYPE_CHECKING, Final

from kvplan.device.sharing import AllocationRef
from kvplan.transport import ranges
from kvplan.transport.base import PeerMetadata
from kvplan.transport.local.identity import Identity
from kvplan.transport.wire import (
    ADDRESS,
    PEER,
    SIZE,
    UINT64,
    fields_of,
    range_bounds,
    write_schema,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_SLOTS: Final = 2**24
"""Of a generation table: of registrations and leases."""

SCHEMA: Final = "kvplan.local"
SCHEMA_VERSION: Final = 6  # of 5 there was no time namespace

_DOCUMENT = {
    "schema",
    "schema_version",
    "identity",
    "board",
    "writers",
    "device",
    "allocations",
    "ranges",
}
_INT31 = (0, 2**31 - 1)
_BOOT_ID_LENGTH = 36

_IDENTITY = {
    "pid": (1, 2**22),
    "start_time": UINT64,
    "pid_namespace": UINT64,
    "time_namespace": UINT64,
    "user_namespace": UINT64,
}
_GENERATION_TABLE = {
    "fd": _INT31,
    "inode": UINT64,
    "num_slots": (1, MAX_SLOTS),
    "address": ADDRESS,
}
_WRITERS = {
    "fd": _INT31,
    "inode": UINT64,
    "num_entries": (1, 2**16),
    "address": ADDRESS,
}
_ALLOCATION = {"address": ADDRESS, "nbytes": SIZE, "number": UINT64, "fd": (-1, _INT31[1])}
_RANGE = range_bounds(_INT31, UINT64)
_ARENA = {"fd": _INT31, "inode": UINT64, "address": ADDRESS, "nbytes": SIZE}


@dataclass(frozen=True, slots=True)
class GenerationTableRef:
    """Where a process's generation table is found: its descriptor and inode, and its address.

    The address is always mapped there, so it shows whether this process's memory can be reached.
    """

    fd: int
    inode: int
    num_slots: int
    address: int


@dataclass(frozen=True, slots=True)
class WritersRef:
    """Where a process's writer table is found, and where it has mapped its entries."""

    fd: int
    inode: int
    num_entries: int
    address: int


@dataclass(frozen=True, slots=True)
class ArenaRef:
    """Where an arena is found, by descriptor and inode, and where its owner has mapped it."""

    fd: int
    inode: int
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Range(ranges.Range):
    """Registered memory [address, address + nbytes) of a process.

    Attributes:
        arena: of the host, what it is a part of; None: of none.
        allocation: of a device, what it is a part of; None: it is memory of the host, which
            without an arena is reached by process_vm_readv only.
    """

    arena: ArenaRef | None
    allocation: AllocationRef | None = None

    @property
    def is_preferred(self) -> bool:
        """An arena is, which is reached by a plain copy."""
        return self.arena is not None

    @property
    def is_mapped(self) -> bool:
        """Whether peers map it; what one has mapped cannot be taken from it."""
        return self.arena is not None or self.allocation is not None

    @property
    def announces_reads(self) -> bool:
        """Whether its owner must not free it while a peer reads it, and so waits for those too."""
        return self.allocation is not None and not self.allocation.is_kept_by_peers

    @property
    def is_announced(self) -> bool:
        """Whether peers announce any use of it, for which its owner waits before it goes."""
        return self.writable or self.announces_reads

    def __str__(self) -> str:
        kind = "arena" if self.arena is not None else "registered"
        if self.allocation is not None:
            kind = f"GPU {self.allocation.device}"
        access = "" if self.writable else ", read-only"
        return f"{self.address:#x}+{self.nbytes} ({kind}{access})"


@dataclass(frozen=True, slots=True)
class Metadata(PeerMetadata):
    """All that a peer needs to reach this process's memory.

    Attributes:
        identity, generations, writers: of the process.
        ranges: that are registered.
        device: UUID of the device whose memory it shares: 32 hexadecimal digits; empty: none.
    """

    identity: Identity
    generations: GenerationTableRef
    writers: WritersRef
    ranges: tuple[Range, ...]
    device: str = ""

    def __str__(self) -> str:
        return f"peer {self.identity.pid}"

    @property
    def owner(self) -> str:
        """See `PeerMetadata.owner`."""
        return f"process {self.identity.pid}, started at {self.identity.start_time}"

    def is_of_owner(self, other: Metadata) -> bool:
        """See `PeerMetadata.is_of_owner`."""
        return (self.identity, self.generations) == (other.identity, other.generations)

    def to_bytes(self) -> bytes:
        """As JSON, UTF-8."""
        # Ranges of one cache share them, and each has some 200 bytes.
        allocations = {it.allocation: 0 for it in self.ranges if it.allocation is not None}
        places = {it: place for place, it in enumerate(allocations)}
        fields = {
            "identity": fields_of(self.identity),
            "board": fields_of(self.generations),
            "writers": fields_of(self.writers),
            "device": self.device,
            "allocations": [fields_of(it) for it in allocations],
            "ranges": [
                {
                    **fields_of(it),
                    "arena": None if it.arena is None else fields_of(it.arena),
                    "allocation": None if it.allocation is None else places[it.allocation],
                }
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
        fields = PEER.fields("", document, _DOCUMENT)
        identity = PEER.fields("identity", fields["identity"], {"boot_id", *_IDENTITY})
        boot_id = identity["boot_id"]
        if not isinstance(boot_id, str) or len(boot_id) != _BOOT_ID_LENGTH:
            raise PEER.bad(
                f"identity.boot_id is {show(boot_id)}; it must be a UUID of 36 characters"
            )
        generations = GenerationTableRef(**PEER.record("board", fields["board"], _GENERATION_TABLE))
        writers = WritersRef(**PEER.record("writers", fields["writers"], _WRITERS))
        device = fields["device"]
        if device != "":
            device = PEER.text("device", device, _is_uuid, "empty, or 32 hexadecimal digits")
        known = PEER.elements("allocations", fields["allocations"])
        allocations = [_allocation(f"allocations[{i}]", it) for i, it in enumerate(known)]
        found = PEER.elements("ranges", fields["ranges"])
        return cls(
            Identity(boot_id=boot_id, **PEER.numbers("identity", identity, _IDENTITY)),
            generations,
            writers,
            tuple(
                _range(f"ranges[{i}]", it, generations, allocations) for i, it in enumerate(found)
            ),
            device,
        )


def _allocation(path: str, value: object) -> AllocationRef:
    fields = PEER.fields(path, value, {"device", "handle", "is_pool", *_ALLOCATION})
    numbers = PEER.numbers(path, fields, _ALLOCATION)
    if numbers["address"] + numbers["nbytes"] > 2**64:
        raise PEER.bad(
            f"{path} ends past 2**64: address {numbers['address']} + nbytes {numbers['nbytes']}"
        )
    device = PEER.text(f"{path}.device", fields["device"], _is_uuid, "32 hexadecimal digits")
    has_fd = numbers["fd"] >= 0
    handle = PEER.text(
        f"{path}.handle",
        fields["handle"],
        (lambda text: not text) if has_fd else _is_handle,
        "empty, as there is a descriptor" if has_fd else "128 hexadecimal digits",
    )
    is_pool = PEER.flag(f"{path}.is_pool", fields["is_pool"])
    return AllocationRef(device=device, handle=handle, is_pool=is_pool, **numbers)


def _range(
    path: str,
    value: object,
    generations: GenerationTableRef,
    allocations: Sequence[AllocationRef],
) -> Range:
    common, fields = PEER.range(path, value, _RANGE, generations.num_slots, {"arena", "allocation"})
    arena = allocation = None
    if fields["allocation"] is not None:
        if not allocations or fields["arena"] is not None:
            raise PEER.bad(
                f"{path}.allocation is {show(fields['allocation'])}; it must be null, as "
                + ("it has an arena" if allocations else "there are no allocations")
            )
        place = PEER.numbers(path, fields, {"allocation": (0, len(allocations) - 1)})
        allocation = allocations[place["allocation"]]
        _check_inside(path, common, "allocation", allocation)
    if fields["arena"] is not None:
        arena = ArenaRef(**PEER.record(f"{path}.arena", fields["arena"], _ARENA))
        _check_inside(path, common, "arena", arena)
    return Range(**common, arena=arena, allocation=allocation)


def _check_inside(
    path: str, part: Mapping[str, int], name: str, whole: ArenaRef | AllocationRef
) -> None:
    offset = part["address"] - whole.address
    if offset < 0 or offset + part["nbytes"] > whole.nbytes:
        raise PEER.bad(
            f"{path} is not inside its {name}: address {part['address']}, nbytes "
            f"{part['nbytes']}; {name} at {whole.address}, nbytes {whole.nbytes}"
        )


def _is_uuid(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{32}", text) is not None


def _is_handle(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{128}", text) is not None
