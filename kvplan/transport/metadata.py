"""What a process tells its peers about itself and its registered memory, as checked JSON.

Whoever holds it gets no rights by it: the system decides who may reach whose memory. It comes from
outside, though, so nothing in it is believed before it is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import repr as show  # short, however long or deep the value is
from typing import Final

from kvplan.transport.documents import Document, fields_of, write_schema
from kvplan.transport.identity import Identity

SCHEMA: Final = "kvplan.local"
SCHEMA_VERSION: Final = 2  # of 1 writers did not announce what they write
MAX_NBYTES: Final = 32 << 20

_PEER: Final = Document("peer metadata", MAX_NBYTES)

_UINT64 = (0, 2**64 - 1)
_INT31 = (0, 2**31 - 1)
_SIZE = (1, 2**63 - 1)
_BOOT_ID_LENGTH = 36

_IDENTITY = {
    "pid": (1, 2**22),
    "start_time": _UINT64,
    "pid_namespace": _UINT64,
    "user_namespace": _UINT64,
}
_BOARD = {
    "fd": _INT31,
    "inode": _UINT64,
    "num_slots": (1, 2**24),
    "address": (1, 2**64 - 1),
}
_WRITERS = {
    "fd": _INT31,
    "inode": _UINT64,
    "num_entries": (1, 2**16),
    "address": (1, 2**64 - 1),
}
_RANGE = {"address": (1, 2**64 - 1), "nbytes": _SIZE, "slot": _INT31, "generation": _UINT64}
_ARENA = {"fd": _INT31, "inode": _UINT64, "address": (1, 2**64 - 1), "nbytes": _SIZE}


@dataclass(frozen=True, slots=True)
class BoardRef:
    """Where a process's registration board is found: its descriptor and inode, and its address.

    The address is always mapped there, so it tells whether this process's memory can be reached.
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
class Range:
    """Registered memory [address, address + nbytes) of a process, in bytes.

    `slot` and `generation` say on the board whether it is still registered; `arena` is what it is
    a part of, None for memory that is reached by process_vm_readv only.
    """

    address: int
    nbytes: int
    slot: int
    generation: int
    writable: bool
    arena: ArenaRef | None

    def __str__(self) -> str:
        kind = "registered" if self.arena is None else "arena"
        access = "" if self.writable else ", read-only"
        return f"{self.address:#x}+{self.nbytes} ({kind}{access})"


@dataclass(frozen=True, slots=True)
class Metadata:
    """All that a peer needs to reach this process's memory."""

    identity: Identity
    board: BoardRef
    writers: WritersRef
    ranges: tuple[Range, ...]

    def to_bytes(self) -> bytes:
        """As JSON, UTF-8."""
        fields = {
            "identity": fields_of(self.identity),
            "board": fields_of(self.board),
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
        document = _PEER.read_schema(blob, SCHEMA, SCHEMA_VERSION)
        names = {"schema", "schema_version", "identity", "board", "writers", "ranges"}
        fields = _PEER.fields("", document, names)
        identity = _PEER.fields("identity", fields["identity"], {"boot_id", *_IDENTITY})
        boot_id = identity["boot_id"]
        if not isinstance(boot_id, str) or len(boot_id) != _BOOT_ID_LENGTH:
            raise _PEER.bad(
                f"identity.boot_id is {show(boot_id)}; it must be a UUID of 36 characters"
            )
        board = BoardRef(
            **_PEER.numbers("board", _PEER.fields("board", fields["board"], set(_BOARD)), _BOARD)
        )
        writers = _PEER.fields("writers", fields["writers"], set(_WRITERS))
        ranges = _PEER.elements("ranges", fields["ranges"])
        return cls(
            Identity(boot_id=boot_id, **_PEER.numbers("identity", identity, _IDENTITY)),
            board,
            WritersRef(**_PEER.numbers("writers", writers, _WRITERS)),
            tuple(_range(f"ranges[{i}]", it, board) for i, it in enumerate(ranges)),
        )


def _range(path: str, value: object, board: BoardRef) -> Range:
    fields = _PEER.fields(path, value, {"writable", "arena", *_RANGE})
    numbers = _PEER.numbers(path, fields, _RANGE)
    writable = _PEER.flag(f"{path}.writable", fields["writable"])
    _PEER.check_range(path, numbers, board.num_slots)
    arena = None
    if fields["arena"] is not None:
        arena_path = f"{path}.arena"
        found = _PEER.fields(arena_path, fields["arena"], set(_ARENA))
        arena = ArenaRef(**_PEER.numbers(arena_path, found, _ARENA))
        offset = numbers["address"] - arena.address
        if offset < 0 or offset + numbers["nbytes"] > arena.nbytes:
            raise _PEER.bad(
                f"{path} is not inside its arena: address {numbers['address']}, nbytes "
                f"{numbers['nbytes']}; arena at {arena.address}, nbytes {arena.nbytes}"
            )
    return Range(writable=writable, arena=arena, **numbers)
