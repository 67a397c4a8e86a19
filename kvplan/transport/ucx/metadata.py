"""What a process publishes to its peers about its UCX and its registered memory, as checked JSON.

Checked as strictly as the local transport's: it comes from outside.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Final

from kvplan.transport import ranges
from kvplan.transport.base import PeerMetadata
from kvplan.transport.wire import (
    ADDRESS,
    NUMBER,
    PEER,
    SIZE,
    fields_of,
    range_bounds,
    write_schema,
)

SCHEMA: Final = "kvplan.ucx"
SCHEMA_VERSION: Final = 3
MAX_SLOTS: Final = 1 << 16

_MAX_BLOB: Final = 65536
_RANGE = {**range_bounds((0, MAX_SLOTS - 1)), "region": NUMBER}
_REGION = {"number": NUMBER, "address": ADDRESS, "nbytes": SIZE}
_PROCESS = {"pid": (1, 2**31 - 1)}
_TOP = ("instance", "host", "ucx", "over", "address", "ranges", "regions", "board", "tickets")


@dataclass(frozen=True, slots=True)
class RegionRef:
    """Memory [address, address + nbytes) that UCX knows, and the key that opens it to a peer."""

    number: int
    address: int
    nbytes: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Range(ranges.Range):
    """Registered memory [address, address + nbytes) of a process.

    Attributes:
        region: the number of what UCX knows it as.
    """

    region: int


@dataclass(frozen=True, slots=True)
class Metadata(PeerMetadata):
    """All that a peer needs to reach this process.

    Attributes:
        instance: 32 hexadecimal digits, which no other transport has.
        host, pid: what people call the process by.
        version: of UCX, such as "1.22.0".
        over: what UCX may use, such as "rc_mlx5/mlx5_0:1 cma/memory".
        address: of UCX's worker.
        ranges: that it names.
        regions: that those lie in.
        generations: of registrations: a word of 8 bytes for each slot.
        tickets: what it is writing to memory of peers; see `kvnative._ucx`.
    """

    instance: str
    host: str
    pid: int
    version: str
    over: str
    address: bytes
    ranges: tuple[Range, ...]
    regions: tuple[RegionRef, ...]
    generations: RegionRef
    tickets: RegionRef

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
        fields = {
            "instance": self.instance,
            "host": self.host,
            "pid": self.pid,
            "ucx": self.version,
            "over": self.over,
            "address": _text_of(self.address),
            "ranges": [fields_of(it) for it in self.ranges],
            "regions": [_fields_of_region(it) for it in self.regions],
            "board": _fields_of_region(self.generations),
            "tickets": _fields_of_region(self.tickets),
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
        fields = PEER.fields("", document, {"schema", "schema_version", *_TOP, *_PROCESS})
        found = PEER.elements("regions", fields["regions"])
        regions = tuple(_region(f"regions[{i}]", it) for i, it in enumerate(found))
        by_number = {it.number: it for it in regions}
        named = PEER.elements("ranges", fields["ranges"])
        return cls(
            PEER.instance(fields["instance"]),
            PEER.printable("host", fields["host"]),
            PEER.numbers("document", fields, _PROCESS)["pid"],
            PEER.text("ucx", fields["ucx"], _is_version, 'a version such as "1.22.0"'),
            PEER.text("over", fields["over"], _is_line, "at most 4096 printable characters"),
            _blob("address", fields["address"]),
            tuple(_range(f"ranges[{i}]", it, by_number) for i, it in enumerate(named)),
            regions,
            _region("board", fields["board"]),
            _region("tickets", fields["tickets"]),
        )


def _fields_of_region(it: RegionRef) -> dict[str, object]:
    return {**fields_of(it), "key": _text_of(it.key)}


def _range(path: str, value: object, regions: dict[int, RegionRef]) -> Range:
    common, _ = PEER.range(path, value, _RANGE, MAX_SLOTS)
    if (region := regions.get(common["region"])) is None:
        raise PEER.bad(f"{path}.region is {common['region']}; there is no region of that number")
    offset = common["address"] - region.address
    if offset < 0 or offset + common["nbytes"] > region.nbytes:
        raise PEER.bad(
            f"{path} is not inside its region: address {common['address']}, nbytes "
            f"{common['nbytes']}; region at {region.address}, nbytes {region.nbytes}"
        )
    return Range(**common)


def _region(path: str, value: object) -> RegionRef:
    fields = PEER.fields(path, value, {"key", *_REGION})
    numbers = PEER.numbers(path, fields, _REGION)
    if numbers["address"] + numbers["nbytes"] > 2**64:
        raise PEER.bad(
            f"{path} ends past 2**64: address {numbers['address']} + nbytes {numbers['nbytes']}"
        )
    return RegionRef(key=_blob(f"{path}.key", fields["key"]), **numbers)


def _text_of(blob: bytes) -> str:
    return base64.b64encode(blob).decode()


def _blob(path: str, value: object) -> bytes:
    must_be = f"base64 of 1 to {_MAX_BLOB} bytes"
    text = PEER.text(path, value, lambda text: 0 < len(text) <= 4 * -(-_MAX_BLOB // 3), must_be)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise PEER.bad(f"{path} is {text[:40]!r}; it must be {must_be}") from None


def _is_line(text: str) -> bool:
    return len(text) <= 4096 and text.isprintable()


def _is_version(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4}){1,2}", text) is not None
