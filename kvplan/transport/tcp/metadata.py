"""What a process says to its peers of its memory over TCP, as checked JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvnative._backend import MAX_STRIPES
from kvplan.transport.base import PeerMetadata
from kvplan.transport.ranges import Range
from kvplan.transport.wire import PEER, fields_of, range_bounds, write_schema

SCHEMA: Final = "kvplan.tcp"
SCHEMA_VERSION: Final = 1
MAX_CONNECTIONS: Final = MAX_STRIPES  # of a link, for each direction in which requests go
MAX_SLOTS: Final = 1 << 16  # registrations that there can be at once

_PROCESS = {"pid": (1, 2**31 - 1), "connections": (1, MAX_CONNECTIONS)}
_RANGE = range_bounds((0, MAX_SLOTS - 1))


@dataclass(frozen=True, slots=True)
class Metadata(PeerMetadata):
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

    @property
    def owner(self) -> str:
        """See `PeerMetadata.owner`."""
        return f"instance {self.instance}"

    def is_of_owner(self, other: Metadata) -> bool:
        """See `PeerMetadata.is_of_owner`."""
        return self.instance == other.instance

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
        document = PEER.read_schema(blob, SCHEMA, SCHEMA_VERSION)
        fields = PEER.fields("", document, {"schema", "schema_version", *cls.__dataclass_fields__})
        numbers = PEER.numbers("document", fields, _PROCESS)
        ranges = PEER.elements("ranges", fields["ranges"])
        return cls(
            PEER.instance(fields["instance"]),
            PEER.printable("host", fields["host"]),
            numbers["pid"],
            numbers["connections"],
            PEER.flag("encrypt", fields["encrypt"]),
            tuple(_range(f"ranges[{i}]", it) for i, it in enumerate(ranges)),
        )


def _range(path: str, value: object) -> Range:
    common, _ = PEER.range(path, value, _RANGE, MAX_SLOTS)
    return Range(**common)
