"""The file format of recordings: rows of MessagePack, each after its length.

A file begins with `MAGIC`. Rows follow: four bytes with the length (little-endian; the highest bit
means that zlib has compressed the row), and an array whose first element is the kind of the row.
The first row of a file is a `Header`. A file may end in the middle of a row.

A `TemplateRow` has the sides and options that plans of many transfers share. Each transfer adds its
block tables, and segments if the tables do not determine them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from kvplan.planning.part import Part
from kvplan.planning.plan import SCHEMA_VERSION, Plan
from kvplan.planning.schema import part_from_dict, part_to_dict, side_from_dict
from kvplan.planning.segments import Segments
from kvplan.planning.side import Side
from kvplan.status import invalid

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAGIC: Final = b"kvplan-recording 1\n"
LENGTH: Final = Struct("<I")
COMPRESSED: Final = 1 << 31
_COMPRESS_FROM: Final = 1024  # bytes of a row; shorter ones gain little
MAX_ROW: Final = 256 << 20
"""Maximum bytes of a decoded row."""

MAX_RATIO: Final = 32
"""Maximum bytes of rows for each byte of a file, for the writer too. zlib could reach 1000."""

SPARE_ROOM: Final = 1 << 20
"""Bytes of rows that a file may have beyond `MAX_RATIO`: short rows may compress better."""

HEADER, TEMPLATE, TRANSFER, EVENT, DROPPED, END = range(6)


class Header(msgspec.Struct, frozen=True, array_like=True, tag=HEADER):
    """The origin of a recording.

    Attributes:
        recording: 16 hexadecimal digits, the same in all files of a recording.
        file: the number of the file in the recording, from 0.
        version: the version of kvplan that wrote it.
        host, pid: the process.
        cluster_id, role: the engine.
        started: the beginning of this file, in seconds since the epoch.
        clock: the same moment on the clock of the rows (CLOCK_MONOTONIC), in seconds.
    """

    recording: str
    file: int
    version: str
    host: str
    pid: int
    cluster_id: int
    role: str
    started: float
    clock: float


class TemplateRow(msgspec.Struct, frozen=True, array_like=True, dict=True, tag=TEMPLATE):
    """A part without its block tables and segments; rows of transfers refer to it by `number`."""

    number: int
    # As in `Plan.to_dict`, with the version of its schema, without segments, num_slices, tables.
    plan: dict[str, Any]
    ways: tuple[str, str]  # of src and dst; `plan` has none
    cache_ids: tuple[int, int]

    @cached_property
    def sides(self) -> tuple[Side, Side]:
        """Source and destination, read once for all rows that refer to the template."""
        src, dst = (
            replace(side_from_dict(name, self.plan[name]), way=way, cache_id=cache_id)
            for name, way, cache_id in zip(("src", "dst"), self.ways, self.cache_ids, strict=True)
        )
        return src, dst


class SegmentsRow(msgspec.Struct, frozen=True, array_like=True):
    """Segments and other values that the block tables do not determine.

    Columns are little-endian, 8 bytes an entry. A single segment may have numbers instead.
    """

    num_slices: int
    src_offsets: bytes | int
    dst_offsets: bytes | int
    nbytes: bytes | int
    repeats: tuple[tuple[bytes, int, int], ...] = ()
    has_tables: bool = False
    src_token: int = 0
    dst_token: int = 0
    num_tokens: int | None = None


class PartRow(msgspec.Struct, frozen=True, array_like=True):
    """A part of a plan, without the values that its template has."""

    name: str  # with `source`, identifies the part in its plan
    source: int | None
    template: int
    src: bytes  # block tables, little-endian, 8 bytes each
    dst: bytes
    # None: row i of `src` moves to row i of `dst` (B2B), or a slot is cut into rows of dst (C2B).
    segments: SegmentsRow | None


class TransferRow(msgspec.Struct, frozen=True, array_like=True, tag=TRANSFER):
    """A transfer or notification that has ended. Times are on the clock of the rows, in seconds."""

    started: float
    seconds: float
    operation: str
    status: int
    error: str
    tag: str
    peer: int | None
    cache_id: int
    leases: tuple[int, ...]
    nbytes: int
    parts: tuple[PartRow, ...]


Field = str | int | float | bool | list[int | str] | None
"""A value in the fields of an event."""


class EventRow(msgspec.Struct, frozen=True, array_like=True, tag=EVENT):
    """An event other than a transfer, such as of a link, a lease or a cache."""

    started: float
    seconds: float
    operation: str
    status: int
    error: str
    fields: dict[str, Field]


class DroppedRow(msgspec.Struct, frozen=True, array_like=True, tag=DROPPED):
    """A gap: `count` rows came faster than they could be written, and are lost."""

    at: float
    count: int


class EndRow(msgspec.Struct, frozen=True, array_like=True, tag=END):
    """The end of a recording that was closed."""

    at: float


AnyRow = Header | TemplateRow | TransferRow | EventRow | DroppedRow | EndRow

encode: Final = msgspec.msgpack.Encoder(enc_hook=repr).encode
decode: Final = msgspec.msgpack.Decoder(AnyRow).decode


def framed(rows: Iterable[bytes], *, compress: bool = True) -> Iterator[bytes]:
    """Yield each encoded row after its length; compress long rows, up to `MAX_RATIO`."""
    pack = LENGTH.pack
    for row in rows:
        if compress and len(row) >= _COMPRESS_FROM:
            short = zlib.compress(row, 1)  # releases the GIL
            if len(short) * MAX_RATIO >= len(row):
                yield pack(len(short) | COMPRESSED) + short
                continue
        yield pack(len(row)) + row


class FoundRow(NamedTuple):
    """A row of a file."""

    row: AnyRow
    end: int  # offset of the next row
    nbytes: int  # of the decoded row


def row_in(data: bytes | memoryview, offset: int, room: int = SPARE_ROOM) -> FoundRow | None:
    """Return the row at `offset`; None: the row is not complete yet; ValueError: not a row.

    The decoded row may have `MAX_RATIO` bytes for each byte in the file, plus `room`.
    """
    begin = offset + LENGTH.size
    if begin > len(data):
        return None
    (length,) = LENGTH.unpack_from(data, offset)
    end = begin + (length & ~COMPRESSED)
    if end - begin > MAX_ROW:
        raise ValueError(f"a row of {end - begin} bytes")
    if end > len(data):
        return None
    row: bytes | memoryview = data[begin:end]
    try:
        if length & COMPRESSED:
            opened = zlib.decompressobj()
            most = min(room + MAX_RATIO * (end - begin), MAX_ROW)
            row = opened.decompress(row, most)
            if not opened.eof:
                raise ValueError(f"a compressed row of {end - begin} bytes has more than {most}")
        return FoundRow(decode(row), end, len(row))
    except (msgspec.MsgspecError, RecursionError, TypeError, zlib.error) as error:
        raise ValueError(str(error)) from None  # TypeError: an unhashable key, in msgspec 0.19


def template_of(part: Part) -> dict[str, Any]:
    """Return the `plan` of the `TemplateRow` of a part."""
    bare = replace(part, segments=Segments.single(0, 0, 1), tables=None, name="", source=None)
    document = {"schema_version": SCHEMA_VERSION, **part_to_dict(bare)}
    for name in ("segments", "num_slices", "tables"):
        del document[name]
    return document


def segments_of(part: Part) -> tuple[object, ...]:
    """Return the fields of the `SegmentsRow` of a part."""
    segments, tables = part.segments, part.tables
    if tables is None and len(segments.nbytes) == 1 and not segments.repeats:
        src, dst, nbytes = segments.src_offsets, segments.dst_offsets, segments.nbytes
        return part.num_slices, src.item(), dst.item(), nbytes.item()
    columns = [getattr(segments, column).tobytes() for column in Segments.columns()]
    repeats = [
        (repeat.counts.tobytes(), repeat.src_stride, repeat.dst_stride)
        for repeat in segments.repeats
    ]
    rest = (False, 0, 0, None) if tables is None else (True, *tables[2:])
    return (part.num_slices, *columns, repeats, *rest)


def plan_of(templates: dict[int, TemplateRow], rows: Iterable[PartRow]) -> Plan | None:
    """Return the plan of a transfer, or None if it had none.

    Damaged rows raise LLMException or errors such as KeyError, also for a missing template.
    """
    parts = [_part(templates[row.template], row) for row in rows]
    return Plan(parts) if parts else None


def _part(template: TemplateRow, row: PartRow) -> Part:
    found = row.segments
    tables: dict[str, Any] = {
        "src": rows_of(row.src).tolist(),
        "dst": rows_of(row.dst).tolist(),
        "src_token": 0,
        "dst_token": 0,
        "num_tokens": None,
    }
    if found is None:
        num_slices, columns, repeats = len(rows_of(row.dst)), _by_rows(template, row), []
    else:
        num_slices = found.num_slices
        columns = [
            _column(column) for column in (found.src_offsets, found.dst_offsets, found.nbytes)
        ]
        repeats = [[_column(repeat[0]).tolist(), *repeat[1:]] for repeat in found.repeats]
        tables |= {
            field: getattr(found, field) for field in ("src_token", "dst_token", "num_tokens")
        }
    named = zip(Segments.columns(), (column.tolist() for column in columns), strict=True)
    src, dst = template.sides
    return part_from_dict(
        template.plan
        | {
            "src": src,
            "dst": dst,
            "name": row.name,
            "source": row.source,
            "segments": dict(named) | {"repeats": repeats},
            "num_slices": num_slices,
            "tables": tables if found is None or found.has_tables else None,
        }
    )


@np.errstate(all="ignore")  # the plan of a damaged row is refused later
def _by_rows(template: TemplateRow, row: PartRow) -> list[NDArray[np.uint64]]:
    """Return the segments of a part that moves whole rows, merged by the part's `coalesce`."""
    src, dst = rows_of(row.src), rows_of(row.dst)
    source, target = template.sides
    how = template.plan["coalesce"]
    if template.plan["kind"] == "B2B":
        if how == "sorted":
            order = np.lexsort((dst, src))
            src, dst = src[order], dst[order]
        src_offsets, nbytes = src * source.stride, np.full(len(dst), target.row_nbytes)
    else:  # a slot, cut into rows of dst
        starts = np.arange(len(dst), dtype=np.int64) * target.row_nbytes
        src_offsets, nbytes = (
            starts + src[0] * source.stride,
            np.minimum(source.row_nbytes - starts, target.row_nbytes),
        )
    dst_offsets = dst * target.stride
    merged = Segments.adopt(
        src_offsets.astype(np.uint64),
        dst_offsets.astype(np.uint64),
        nbytes.astype(np.uint64),
        merged=how != "none",
    )
    return [getattr(merged, column) for column in Segments.columns()]


def rows_of(table: bytes) -> NDArray[np.int64]:
    """Return the rows of a recorded block table."""
    _check(table)
    return np.frombuffer(table, "<i8").astype(np.int64)


def _column(data: bytes | int) -> NDArray[np.uint64]:
    if isinstance(data, int):
        if not 0 <= data < 2**64:  # NumPy 1 would wrap around
            raise invalid(f"the value {data} of a column is out of range [0, 2**64)")
        return np.array([data], np.uint64)
    _check(data)
    return np.frombuffer(data, "<u8").astype(np.uint64)


def _check(data: bytes) -> None:
    if len(data) % 8:
        raise invalid(f"a column has {len(data)} bytes, which must be a multiple of 8")
