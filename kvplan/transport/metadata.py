"""What a process tells its peers about itself and its registered memory, as checked JSON.

Whoever holds it gets no rights by it: the system decides who may reach whose memory. It comes from
outside, though, so nothing in it is believed before it is checked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from reprlib import repr as show  # short, however long or deep the value is
from typing import Any, Final

from kvplan.status import LLMException, invalid
from kvplan.transport.identity import Identity

SCHEMA: Final = "kvplan.local"
SCHEMA_VERSION: Final = 1
MAX_NBYTES: Final = 32 << 20

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
    ranges: tuple[Range, ...]

    def to_bytes(self) -> bytes:
        """As JSON, UTF-8."""
        document = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "identity": _fields(self.identity),
            "board": _fields(self.board),
            "ranges": [
                {**_fields(it), "arena": None if it.arena is None else _fields(it.arena)}
                for it in self.ranges
            ],
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, blob: bytes) -> Metadata:
        """Check and read what `to_bytes` of a peer has written.

        Raises:
            LLMException: LLM_PARAM_INVALID, naming the field, its value and the allowed range.
            TypeError: `blob` is not bytes.
        """
        if not isinstance(blob, bytes | bytearray | memoryview):
            raise TypeError(f"metadata must be bytes, not {type(blob).__name__}")
        if len(blob) > MAX_NBYTES:
            raise _bad(f"is {len(blob)} bytes long; at most {MAX_NBYTES} are allowed")
        try:
            document = json.loads(bytes(blob))
        except (ValueError, RecursionError) as error:
            raise _bad(f"is no JSON: {error}") from None
        found = document if isinstance(document, dict) else {}
        schema, version = found.get("schema"), found.get("schema_version")
        if schema != SCHEMA or type(version) is not int or version != SCHEMA_VERSION:
            raise _bad(
                f"is of schema {show(schema)} version {show(version)}; this kvplan reads "
                f"{SCHEMA!r} version {SCHEMA_VERSION}"
            )
        fields = _object("", document, {"schema", "schema_version", "identity", "board", "ranges"})
        identity = _object("identity", fields["identity"], {"boot_id", *_IDENTITY})
        boot_id = identity["boot_id"]
        if not isinstance(boot_id, str) or len(boot_id) != _BOOT_ID_LENGTH:
            raise _bad(f"identity.boot_id is {show(boot_id)}; it must be a UUID of 36 characters")
        board = BoardRef(
            **_numbers("board", _object("board", fields["board"], set(_BOARD)), _BOARD)
        )
        if not isinstance(fields["ranges"], list):
            raise _bad(f"ranges is {show(fields['ranges'])}; it must be a list")
        return cls(
            Identity(boot_id=boot_id, **_numbers("identity", identity, _IDENTITY)),
            board,
            tuple(_range(f"ranges[{i}]", it, board) for i, it in enumerate(fields["ranges"])),
        )


def _fields(value: Identity | BoardRef | Range | ArenaRef) -> dict[str, Any]:
    # dataclasses.asdict copies deeply: ten times the time.
    return {name: getattr(value, name) for name in value.__slots__}


def _range(path: str, value: object, board: BoardRef) -> Range:
    fields = _object(path, value, {"writable", "arena", *_RANGE})
    numbers = _numbers(path, fields, _RANGE)
    if not isinstance(fields["writable"], bool):
        raise _bad(f"{path}.writable is {show(fields['writable'])}; it must be true or false")
    if numbers["address"] + numbers["nbytes"] > 2**64:
        raise _bad(
            f"{path} ends past 2**64: address {numbers['address']} + nbytes {numbers['nbytes']}"
        )
    if numbers["slot"] >= board.num_slots:
        raise _bad(f"{path}.slot is {numbers['slot']}; the board has {board.num_slots} slots")
    arena = None
    if fields["arena"] is not None:
        arena_path = f"{path}.arena"
        found = _object(arena_path, fields["arena"], set(_ARENA))
        arena = ArenaRef(**_numbers(arena_path, found, _ARENA))
        offset = numbers["address"] - arena.address
        if offset < 0 or offset + numbers["nbytes"] > arena.nbytes:
            raise _bad(
                f"{path} is not inside its arena: address {numbers['address']}, nbytes "
                f"{numbers['nbytes']}; arena at {arena.address}, nbytes {arena.nbytes}"
            )
    return Range(writable=fields["writable"], arena=arena, **numbers)


def _object(path: str, value: object, names: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != names:
        found = sorted(value) if isinstance(value, dict) else value
        raise _bad(
            f"{path or 'document'} is {show(found)}; it must be an object with just the fields "
            + ", ".join(sorted(names))
        )
    return value


def _numbers(
    path: str, fields: dict[str, Any], bounds: dict[str, tuple[int, int]]
) -> dict[str, int]:
    for name, (low, high) in bounds.items():
        value = fields[name]
        if type(value) is not int or not low <= value <= high:
            raise _bad(
                f"{path}.{name} is {show(value)}; it must be a whole number in [{low}, {high}]"
            )
    return {name: fields[name] for name in bounds}


def _bad(message: str) -> LLMException:
    return invalid(f"peer metadata: {message}")
