"""What a process says to its peers of its memory over TCP, as checked JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvnative._backend import MAX_STRIPES
from kvplan.transport.documents import Document, fields_of, write_schema

SCHEMA: Final = "kvplan.tcp"
SCHEMA_VERSION: Final = 1
MAX_CONNECTIONS: Final = MAX_STRIPES  # of a link, for each direction in which requests go
MAX_SLOTS: Final = 1 << 16  # registrations that there can be at once

_PEER: Final = Document("peer metadata", max_nbytes=32 << 20)
_PROCESS = {"pid": (1, 2**31 - 1), "connections": (1, MAX_CONNECTIONS)}
_RANGE = {
    "address": (1, 2**64 - 1),
    "nbytes": (1, 2**63 - 1),
    "slot": (0, MAX_SLOTS - 1),
    "generation": (0, 2**63 - 1),
}


@dataclass(frozen=True, slots=True)
class Range:
    """Registered memory [address, address + nbytes) of a process.

    Attributes:
        address, nbytes: of the memory, in that process.
        slot, generation: by which its owner finds the registration, and sees that it has ended.
        writable: whether peers may write to it.
    """

    address: int
    nbytes: int
    slot: int
    generation: int
    writable: bool

    @property
    def arena(self) -> None:
        """None: all memory is reached in the same way."""

    def __str__(self) -> str:
        return f"{self.address:#x}+{self.nbytes}{'' if self.writable else ' (read-only)'}"


@dataclass(frozen=True, slots=True)
class Metadata:
    """All that a peer needs to reach this process, once it has connections to it.

    Attributes:
        instance: 32 hexadecimal digits, which no other transport has.
        host, pid: what people call the process by.
        connections: at most, for each direction in which requests go.
        encrypt: whether it demands that all data is encrypted.
        ranges: that it names.
    """

    instance: str
    host: str
    pid: int
    connections: int
    encrypt: bool
    ranges: tuple[Range, ...] = ()

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host}"

    def to_bytes(self) -> bytes:
        """As JSON, UTF-8."""
        fields = {**fields_of(self), "ranges": [fields_of(it) for it in self.ranges]}
        return write_schema(SCHEMA, SCHEMA_VERSION, fields)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Metadata:
        """Check and read what `to_bytes` of a peer has written.

        Raises:
            LLMException: LLM_PARAM_INVALID, naming the field, its value and the allowed range.
            TypeError: `blob` is not bytes.
        """
        document = _PEER.read_schema(blob, SCHEMA, SCHEMA_VERSION)
        fields = _PEER.fields("", document, {"schema", "schema_version", *cls.__dataclass_fields__})
        numbers = _PEER.numbers("document", fields, _PROCESS)
        ranges = _PEER.elements("ranges", fields["ranges"])
        return cls(
            _PEER.text("instance", fields["instance"], _is_instance, "32 hexadecimal digits"),
            _PEER.text("host", fields["host"], _is_name, "1 to 64 printable characters"),
            numbers["pid"],
            numbers["connections"],
            _PEER.flag("encrypt", fields["encrypt"]),
            tuple(_range(f"ranges[{i}]", it) for i, it in enumerate(ranges)),
        )


def _range(path: str, value: object) -> Range:
    fields = _PEER.fields(path, value, {"writable", *_RANGE})
    numbers = _PEER.numbers(path, fields, _RANGE)
    _PEER.check_range(path, numbers, MAX_SLOTS)
    return Range(writable=_PEER.flag(f"{path}.writable", fields["writable"]), **numbers)


def _is_instance(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{32}", text) is not None


def _is_name(text: str) -> bool:
    return 0 < len(text) <= 64 and text.isprintable()
