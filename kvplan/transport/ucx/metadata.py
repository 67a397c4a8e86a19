"""What a process tells its peers about its UCX and the memory it has registered, as checked JSON.

Checked as strictly as the local transport's: it comes from outside.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Final

from kvplan.transport.documents import Document, fields_of, write_schema

SCHEMA: Final = "kvplan.ucx"
SCHEMA_VERSION: Final = 3
MAX_NBYTES: Final = 32 << 20
MAX_SLOTS: Final = 1 << 16

_PEER: Final = Document("peer metadata", MAX_NBYTES)
_MAX_BLOB: Final = 65536
_ADDRESS = (1, 2**64 - 1)
_SIZE = (1, 2**63 - 1)
_NUMBER = (0, 2**63 - 1)
_RANGE = {"address": _ADDRESS, "nbytes": _SIZE, "slot": (0, MAX_SLOTS - 1), "generation": _NUMBER}
_REGION = {"number": _NUMBER, "address": _ADDRESS, "nbytes": _SIZE}
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
class Range:
    """Registered memory [address, address + nbytes) of a process.

    `slot` and `generation` say whether it is still registered; `region` is the number of what UCX
    knows it as.
    """

    address: int
    nbytes: int
    slot: int
    generation: int
    writable: bool
    region: int

    @property
    def arena(self) -> None:
        """None: nothing of it is mapped anywhere."""

    def __str__(self) -> str:
        return f"{self.address:#x}+{self.nbytes}{'' if self.writable else ' (read-only)'}"


@dataclass(frozen=True, slots=True)
class Metadata:
    """All that a peer needs to reach this process.

    Attributes:
        instance: 32 hexadecimal digits, which no other transport has.
        host, pid: what people call the process by.
        version: of UCX, such as "1.22.0".
        over: what UCX may use, such as "rc_mlx5/mlx5_0:1 cma/memory".
        address: of UCX's worker.
        ranges: that it names.
        regions: that those lie in.
        board: of registrations, a word of 8 bytes for each slot.
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
    board: RegionRef
    tickets: RegionRef

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host}"

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
            "board": _fields_of_region(self.board),
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
        document = _PEER.read_schema(blob, SCHEMA, SCHEMA_VERSION)
        fields = _PEER.fields("", document, {"schema", "schema_version", *_TOP, *_PROCESS})
        found = _PEER.elements("regions", fields["regions"])
        regions = tuple(_region(f"regions[{i}]", it) for i, it in enumerate(found))
        by_number = {it.number: it for it in regions}
        ranges = _PEER.elements("ranges", fields["ranges"])
        return cls(
            _PEER.text("instance", fields["instance"], _is_instance, "32 hexadecimal digits"),
            _PEER.text("host", fields["host"], _is_name, "1 to 64 printable characters"),
            _PEER.numbers("document", fields, _PROCESS)["pid"],
            _PEER.text("ucx", fields["ucx"], _is_version, 'a version such as "1.22.0"'),
            _PEER.text("over", fields["over"], _is_line, "at most 4096 printable characters"),
            _blob("address", fields["address"]),
            tuple(_range(f"ranges[{i}]", it, by_number) for i, it in enumerate(ranges)),
            regions,
            _region("board", fields["board"]),
            _region("tickets", fields["tickets"]),
        )


def _fields_of_region(it: RegionRef) -> dict[str, object]:
    return {**fields_of(it), "key": _text_of(it.key)}


def _range(path: str, value: object, regions: dict[int, RegionRef]) -> Range:
    fields = _PEER.fields(path, value, {"writable", "region", *_RANGE})
    numbers = _PEER.numbers(path, fields, {**_RANGE, "region": _NUMBER})
    writable = _PEER.flag(f"{path}.writable", fields["writable"])
    _PEER.check_range(path, numbers, MAX_SLOTS)
    if (region := regions.get(numbers["region"])) is None:
        raise _PEER.bad(f"{path}.region is {numbers['region']}; there is no region of that number")
    offset = numbers["address"] - region.address
    if offset < 0 or offset + numbers["nbytes"] > region.nbytes:
        raise _PEER.bad(
            f"{path} is not inside its region: address {numbers['address']}, nbytes "
            f"{numbers['nbytes']}; region at {region.address}, nbytes {region.nbytes}"
        )
    return Range(writable=writable, **numbers)


def _region(path: str, value: object) -> RegionRef:
    fields = _PEER.fields(path, value, {"key", *_REGION})
    numbers = _PEER.numbers(path, fields, _REGION)
    if numbers["address"] + numbers["nbytes"] > 2**64:
        raise _PEER.bad(
            f"{path} ends past 2**64: address {numbers['address']} + nbytes {numbers['nbytes']}"
        )
    return RegionRef(key=_blob(f"{path}.key", fields["key"]), **numbers)


def _text_of(blob: bytes) -> str:
    return base64.b64encode(blob).decode()


def _blob(path: str, value: object) -> bytes:
    must_be = f"base64 of 1 to {_MAX_BLOB} bytes"
    text = _PEER.text(path, value, lambda text: 0 < len(text) <= 4 * -(-_MAX_BLOB // 3), must_be)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _PEER.bad(f"{path} is {text[:40]!r}; it must be {must_be}") from None


def _is_instance(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{32}", text) is not None


def _is_name(text: str) -> bool:
    return 0 < len(text) <= 64 and text.isprintable()


def _is_line(text: str) -> bool:
    return len(text) <= 4096 and text.isprintable()


def _is_version(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4}){1,2}", text) is not None
