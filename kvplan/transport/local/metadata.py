"""What a process publishes to its peers about itself and its registered memory, as checked JSON.

Whoever holds it gets no rights by it: the system decides who may reach whose memory. It comes from
outside, though, so nothing in it is believed before it is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import repr as show  # short, however long or deep the value is
from typing import Final

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

MAX_SLOTS: Final = 2**24
"""Of a generation table: of registrations and leases."""

SCHEMA: Final = "kvplan.local"
SCHEMA_VERSION: Final = 4  # of 3 the generation table did not say whether its owner lives

_INT31 = (0, 2**31 - 1)
_BOOT_ID_LENGTH = 36

_IDENTITY = {
    "pid": (1, 2**22),
    "start_time": UINT64,
    "pid_namespace": UINT64,
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
        arena: what it is a part of; None: memory that is reached by process_vm_readv only.
    """

    arena: ArenaRef | None

    @property
    def is_preferred(self) -> bool:
        """An arena is, which is reached by a plain copy."""
        return self.arena is not None

    def __str__(self) -> str:
        kind = "registered" if self.arena is None else "arena"
        access = "" if self.writable else ", read-only"
        return f"{self.address:#x}+{self.nbytes} ({kind}{access})"


@dataclass(frozen=True, slots=True)
class Metadata(PeerMetadata):
    """All that a peer needs to reach this process's memory."""

    identity: Identity
    generations: GenerationTableRef
    writers: WritersRef
    ranges: tuple[Range, ...]

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
        fields = {
            "identity": fields_of(self.identity),
            "board": fields_of(self.generations),
            "writers": fields_of(self.writers),
            "ranges": [
                {**fields_of(it), "arena": None if it.arena is None else fields_of(it.arena)}
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
        names = {"schema", "schema_version", "identity", "board", "writers", "ranges"}
        fields = PEER.fields("", document, names)
        identity = PEER.fields("identity", fields["identity"], {"boot_id", *_IDENTITY})
        boot_id = identity["boot_id"]
        if not isinstance(boot_id, str) or len(boot_id) != _BOOT_ID_LENGTH:
            raise PEER.bad(
                f"identity.boot_id is {show(boot_id)}; it must be a UUID of 36 characters"
            )
        generations = GenerationTableRef(**PEER.record("board", fields["board"], _GENERATION_TABLE))
        writers = WritersRef(**PEER.record("writers", fields["writers"], _WRITERS))
        found = PEER.elements("ranges", fields["ranges"])
        return cls(
            Identity(boot_id=boot_id, **PEER.numbers("identity", identity, _IDENTITY)),
            generations,
            writers,
            tuple(_range(f"ranges[{i}]", it, generations) for i, it in enumerate(found)),
        )


def _range(path: str, value: object, generations: GenerationTableRef) -> Range:
    common, fields = PEER.range(path, value, _RANGE, generations.num_slots, {"arena"})
    arena = None
    if fields["arena"] is not None:
        arena = ArenaRef(**PEER.record(f"{path}.arena", fields["arena"], _ARENA))
        offset = common["address"] - arena.address
        if offset < 0 or offset + common["nbytes"] > arena.nbytes:
            raise PEER.bad(
                f"{path} is not inside its arena: address {common['address']}, nbytes "
                f"{common['nbytes']}; arena at {arena.address}, nbytes {arena.nbytes}"
            )
    return Range(**common, arena=arena)
