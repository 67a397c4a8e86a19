"""The file format of recordings: rows of MessagePack, each behind its length.

A file begins with `MAGIC`. Then comes row after row: four bytes with its length (little-endian; the
highest bit: the row is compressed by zlib), and an array whose first element says which kind it is.
The first row of a file is a `HeaderRow`. A file may end in the middle of a row.

What many transfers share, the sides and options of their plans, is a `TemplateRow`; each transfer
then has block tables, or segments where the tables do not say them all.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from kvplan.planning.part import Part
from kvplan.planning.plan import SCHEMA_VERSION, Plan
from kvplan.planning.schema import from_label, part_from_dict, part_to_dict
from kvplan.planning.segments import Segments
from kvplan.status import invalid

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAGIC: Final = b"kvplan-recording 1\n"
LENGTH: Final = Struct("<I")
COMPRESSED: Final = 1 << 31
_COMPRESS_FROM: Final = 1024  # bytes of a row; shorter ones gain little
MAX_ROW: Final = 256 << 20
"""Bytes of a row, as it is decoded."""

MAX_RATIO: Final = 32
"""Bytes of rows for each byte of a file. The writer reaches 15; zlib could reach 1000."""

SPARE_ROOM: Final = 1 << 20
"""Bytes of rows that a file may have besides, as few and short rows may repeat themselves."""

HEADER, TEMPLATE, TRANSFER, EVENT, DROPPED, END = range(6)


class HeaderRow(msgspec.Struct, frozen=True, array_like=True, tag=HEADER):
    """Whose recording it is, and what its clock is.

    Attributes:
        recording: 8 bytes in hex, which the files of one recording share.
        file: counts the files of the recording from 0.
        wall, clock: seconds since the epoch, and of the clock of the rows (CLOCK_MONOTONIC), at one
            moment.
    """

    recording: str
    file: int
    version: str
    host: str
    pid: int
    cluster_id: int
    role: str
    wall: float
    clock: float


class TemplateRow(msgspec.Struct, frozen=True, array_like=True, tag=TEMPLATE):
    """What a part has besides block tables and segments; transfers name it by its number.

    Attributes:
        plan: the part as in `Plan.to_dict`, with the version of that schema, without segments,
            num_slices and tables.
        ways, cache_ids: of src and dst, which that does not have.
    """

    number: int
    plan: dict[str, Any]
    ways: tuple[str, str]
    cache_ids: tuple[int, int]


class SegmentsRow(msgspec.Struct, frozen=True, array_like=True):
    """Segments, and what else the tables do not say.

    Columns are little-endian, 8 bytes each; of a single segment numbers.
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
    """A part of a plan; its label is empty where it is the only one.

    Attributes:
        src, dst: block tables, little-endian, 8 bytes each.
        segments: None: whole rows are moved, each of `src` to that of `dst`; if `src` is a slot,
            that is cut into rows of `dst`.
    """

    label: str
    template: int
    src: bytes
    dst: bytes
    segments: SegmentsRow | None


class TransferRow(msgspec.Struct, frozen=True, array_like=True, tag=TRANSFER):
    """A transfer that has ended; times are of the clock, in seconds."""

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
"""What an event says of one thing."""


class EventRow(msgspec.Struct, frozen=True, array_like=True, tag=EVENT):
    """What else an engine does: links, leases, caches."""

    started: float
    seconds: float
    operation: str
    status: int
    error: str
    fields: dict[str, Field]


class DroppedRow(msgspec.Struct, frozen=True, array_like=True, tag=DROPPED):
    """So many rows are missing here: they came faster than they could be written."""

    at: float
    count: int


class EndRow(msgspec.Struct, frozen=True, array_like=True, tag=END):
    """The recording was ended here, and not cut off."""

    at: float


AnyRow = HeaderRow | TemplateRow | TransferRow | EventRow | DroppedRow | EndRow

encode: Final = msgspec.msgpack.Encoder(enc_hook=repr).encode
decode: Final = msgspec.msgpack.Decoder(AnyRow).decode


def framed(rows: Iterable[bytes], *, compress: bool = True) -> Iterator[bytes]:
    """Each encoded row behind its length; long ones compressed."""
    pack = LENGTH.pack
    for row in rows:
        if compress and len(row) >= _COMPRESS_FROM:
            short = zlib.compress(row, 1)  # lets other threads run meanwhile
            yield pack(len(short) | COMPRESSED) + short
        else:
            yield pack(len(row)) + row


class FoundRow(NamedTuple):
    """A row of a file.

    Attributes:
        row: the row.
        end: offset of the next one.
        nbytes: of the row as it was decoded.
    """

    row: AnyRow
    end: int
    nbytes: int


def row_in(data: bytes | memoryview, offset: int, room: int = SPARE_ROOM) -> FoundRow | None:
    """Return the row at `offset`; None: it is not whole (yet).

    Args:
        data: bytes of a file.
        offset: of the row.
        room: bytes that the row may have besides `MAX_RATIO` for each of its bytes in the file.

    Raises:
        ValueError: there is something else.
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
        raise ValueError(str(error)) from None  # TypeError: a key that none can be, of msgspec 0.19


def template_of(part: Part) -> dict[str, Any]:
    """What a `TemplateRow` has of a part."""
    bare = replace(part, segments=Segments.single(0, 0, 1), tables=None, name="", source=None)
    document = {"schema_version": SCHEMA_VERSION, **part_to_dict(bare)}
    for name in ("segments", "num_slices", "tables"):
        del document[name]
    return document


def segments_of(part: Part) -> tuple[object, ...]:
    """A `SegmentsRow` of a part, as it is encoded."""
    segments, tables = part.segments, part.tables
    if tables is None and len(segments.nbytes) == 1 and not segments.repeats:
        src, dst, nbytes = segments.src_offsets, segments.dst_offsets, segments.nbytes
        return part.num_slices, src.item(), dst.item(), nbytes.item()
    columns = [getattr(segments, it).tobytes() for it in Segments.columns()]
    repeats = [(it.counts.tobytes(), it.src_stride, it.dst_stride) for it in segments.repeats]
    rest = (False, 0, 0, None) if tables is None else (True, *tables[2:])
    return (part.num_slices, *columns, repeats, *rest)


def plan_of(templates: dict[int, TemplateRow], rows: Iterable[PartRow]) -> Plan | None:
    """The plan of a transfer; None: it had none.

    Raises:
        LLMException: LLM_PARAM_INVALID: what is recorded is no plan.
        KeyError: a template is missing.
    """
    parts = [_part(templates[it.template], it) for it in rows]
    return Plan(parts) if parts else None


def _part(template: TemplateRow, row: PartRow) -> Part:
    document = dict(template.plan)
    found = row.segments
    tables: dict[str, Any] | None = {
        "src": rows_of(row.src).tolist(),
        "dst": rows_of(row.dst).tolist(),
        "src_token": 0,
        "dst_token": 0,
        "num_tokens": None,
    }
    if found is None:
        segments = _by_rows(document, row)
        num_slices, columns, repeats = len(rows_of(row.dst)), segments, []
    else:
        num_slices = found.num_slices
        columns = [_column(it) for it in (found.src_offsets, found.dst_offsets, found.nbytes)]
        repeats = [[_column(it[0]).tolist(), *it[1:]] for it in found.repeats]
        if tables is not None and found.has_tables:
            tables |= {it: getattr(found, it) for it in ("src_token", "dst_token", "num_tokens")}
        else:
            tables = None
    named = zip(Segments.columns(), (it.tolist() for it in columns), strict=True)
    part = part_from_dict(
        document
        | {"segments": dict(named) | {"repeats": repeats}}
        | {"num_slices": num_slices, "tables": tables}
    )
    src, dst = (
        replace(it, way=way, cache_id=cache_id)
        for it, way, cache_id in zip(
            (part.src, part.dst), template.ways, template.cache_ids, strict=True
        )
    )
    name, source = from_label(row.label)
    return replace(part, src=src, dst=dst, name=name, source=source)


def _by_rows(document: dict[str, Any], row: PartRow) -> list[NDArray[np.uint64]]:
    """The segments of a plan that moves whole rows: each its own, then merged as the plan says."""
    with np.errstate(all="ignore"):  # of a damaged one; its plan is refused then
        return _row_segments(document, rows_of(row.src), rows_of(row.dst))


def _row_segments(
    document: dict[str, Any], src: NDArray[np.int64], dst: NDArray[np.int64]
) -> list[NDArray[np.uint64]]:
    src_stride, dst_stride = document["src"]["stride"], document["dst"]["stride"]
    how = document["coalesce"]
    if document["kind"] == "B2B":
        if how == "sorted":
            order = np.lexsort((dst, src))
            src, dst = src[order], dst[order]
        src_offsets, nbytes = src * src_stride, np.full(len(dst), dst_stride)
    else:  # a slot, cut into rows of dst
        starts = np.arange(len(dst), dtype=np.int64) * dst_stride
        src_offsets, nbytes = (
            starts + src[0] * src_stride,
            np.minimum(src_stride - starts, dst_stride),
        )
    dst_offsets = dst * dst_stride
    merged = Segments.adopt(
        src_offsets.astype(np.uint64),
        dst_offsets.astype(np.uint64),
        nbytes.astype(np.uint64),
        merged=how != "none",
    )
    return [getattr(merged, it) for it in Segments.columns()]


def rows_of(table: bytes) -> NDArray[np.int64]:
    """A block table as it was recorded."""
    _check(table)
    return np.frombuffer(table, "<i8").astype(np.int64)


def _column(data: bytes | int) -> NDArray[np.uint64]:
    if isinstance(data, int):
        if not 0 <= data < 2**64:  # NumPy 1 would take the rest of the division
            raise invalid(f"a column of {data}, which is not in [0, 2**64), is damaged")
        return np.array([data], np.uint64)
    _check(data)
    return np.frombuffer(data, "<u8").astype(np.uint64)


def _check(data: bytes) -> None:
    if len(data) % 8:
        raise invalid(f"a column of {len(data)} bytes, of 8 each, is damaged")
