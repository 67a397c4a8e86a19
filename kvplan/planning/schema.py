"""Plans as JSON values and files. Everything that is read is checked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, BinaryIO, Final, cast, get_args

import numpy as np

from kvplan.layout import CacheLayout, Interleaved, Layers, Shard
from kvplan.planning.blocks import check_distinct, check_indices
from kvplan.planning.invariants import check_invariants
from kvplan.planning.part import Kind, Operation, Part
from kvplan.planning.plan import SCHEMA_VERSION, Plan
from kvplan.planning.segments import Coalesce, Segments
from kvplan.planning.side import Side
from kvplan.planning.tokens import BlockTables
from kvplan.status import LLMException, invalid, within
from kvplan.types import CacheDesc, DataType, Placement
from kvplan.validation import INT64_MAX, check_type, check_width, open_regular, shown, write_file

MAX_NBYTES: Final = 128 << 20
"""Maximum size of a plan's file in bytes: three million segments that cannot be merged."""


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write `plan` to a file for `load_plan`."""
    write_file(path, json.dumps(plan.to_dict()) + "\n")


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan that `plan.save` wrote.

    Raises:
        OSError: the file cannot be read.
        LLMException: LLM_PARAM_INVALID: not a regular file, not a plan, or a plan of another schema
            version; the message names the file and the field.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return read_plan(file, os.fspath(path))


def read_plan(file: BinaryIO, name: str) -> Plan:
    """Return the plan in an open file, which error messages call `name`."""
    blob = file.read(MAX_NBYTES + 1)
    if len(blob) > MAX_NBYTES:
        raise invalid(f"{name} has more than {MAX_NBYTES >> 20} MiB, the maximum for a plan")
    try:
        document = json.loads(blob)
        if not isinstance(document, dict):
            raise invalid(
                f"document is not a plan: it is {shown(document)}, and a plan is an object with "
                "schema_version"
            )
        return Plan.from_dict(document)
    except RecursionError:
        raise invalid(f"{name} is not a plan: it is nested too deeply") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise invalid(f"{name} is not a plan: it is not JSON: {error}") from None
    except LLMException as error:
        raise within(name, error) from None


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return `plan` as values for `json.dumps`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "parts": [part_to_dict(part) for part in plan.parts],
    }


def part_to_dict(part: Part) -> dict[str, Any]:
    """Return a part as one of the `parts` of `to_dict`."""
    tables, segments = part.tables, part.segments
    return {
        "name": part.name,
        "source": part.source,
        "operation": part.operation,
        "kind": part.kind,
        "src": _side_to_dict(part.src),
        "dst": _side_to_dict(part.dst),
        "src_tensors": [part.src_tensors.start, part.src_tensors.stop],
        "dst_tensors": [part.dst_tensors.start, part.dst_tensors.stop],
        "tensors_per_layer": part.tensors_per_layer,
        "segments": {
            **{name: getattr(segments, name).tolist() for name in Segments.columns()},
            "repeats": [
                [repeat.counts.tolist(), repeat.src_stride, repeat.dst_stride]
                for repeat in segments.repeats
            ],
        },
        "num_slices": part.num_slices,
        "coalesce": part.coalesce.value,
        "split": [*part.split],
        "reinterpret": part.reinterpret,
        "tables": None
        if tables is None
        else {**tables._asdict(), "src": tables.src.tolist(), "dst": tables.dst.tolist()},
    }


def from_dict(document: dict[str, Any]) -> Plan:
    """Return the plan that `to_dict` wrote."""
    if not isinstance(document, dict):
        raise invalid(f"document is not a plan: document={shown(document)} must be dict")
    _check_version(document)  # first: another version may have other fields
    listed = document.get("parts")
    if document.keys() != {"schema_version", "parts"} or not isinstance(listed, list):
        raise invalid(
            "document is not a plan: a plan has schema_version and a list of parts; this has "
            f"{shown(sorted(map(str, document)))}"
        )
    parts = []
    for index, part in enumerate(listed):
        try:
            parts.append(_checked(part, f"parts[{index}]"))
        except (LLMException, TypeError, ValueError) as error:
            raise invalid(f"document is not a plan: parts[{index}]: {error.args[0]}") from None
    return Plan(parts)


def part_from_dict(document: dict[str, Any]) -> Part:
    """Return the part that `part_to_dict` wrote; the document also has `schema_version`."""
    _check_version(document)
    part = {name: value for name, value in document.items() if name != "schema_version"}
    try:
        return _checked(part, "part")
    except (TypeError, ValueError) as error:
        raise invalid(f"document is not a part of a plan: {error}") from None


def _check_version(document: dict[str, Any]) -> None:
    version = document.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise invalid(
            f"document is not a plan: schema_version={shown(version)} must be {SCHEMA_VERSION}"
        )


def _checked(document: Any, place: str) -> Part:
    part = _parse(document, place)
    check_invariants(part)
    if part.tables is not None:
        check_indices("tables.src", part.tables.src, part.src)
        check_indices("tables.dst", part.tables.dst, part.dst)
        check_distinct("tables.dst", part.tables.dst, part.dst)
    return part


def _parse(document: Any, place: str) -> Part:
    _check_fields(place, document, {field.name for field in fields(Part)})
    columns = _check_fields("segments", document["segments"], {*Segments.columns(), "repeats"})
    repeats = check_type("repeats", columns["repeats"], list)
    for level, repeat in enumerate(repeats):
        if len(check_type(f"repeats[{level}]", repeat, list)) != 3:
            raise ValueError(
                f"repeats[{level}]={shown(repeat)} must be [counts, src_stride, dst_stride]"
            )
    name, source = document["name"], document["source"]
    src = side_from_dict("src", document["src"])
    return Part(
        operation=_one_of("operation", document["operation"], get_args(Operation)),
        kind=_one_of("kind", document["kind"], get_args(Kind)),
        src=src,
        dst=side_from_dict("dst", document["dst"]),
        src_tensors=_range("src_tensors", document["src_tensors"]),
        dst_tensors=_range("dst_tensors", document["dst_tensors"]),
        tensors_per_layer=_positive("tensors_per_layer", document["tensors_per_layer"]),
        segments=Segments(
            _integers("src_offsets", columns["src_offsets"]),
            _integers("dst_offsets", columns["dst_offsets"]),
            _integers("nbytes", columns["nbytes"]),
            [
                (_integers(f"repeats[{level}]", counts), src_stride, dst_stride)
                for level, (counts, src_stride, dst_stride) in enumerate(repeats)
            ],
        ),
        num_slices=check_width("num_slices", document["num_slices"], 0, INT64_MAX),
        coalesce=Coalesce(_one_of("coalesce", document["coalesce"], tuple(Coalesce))),
        split=_split(document["split"]),
        reinterpret=check_type("reinterpret", document["reinterpret"], bool),
        tables=_tables(document["tables"], src),
        name=check_type("name", name, str),
        source=None if source is None else check_width("source", source, 0, INT64_MAX),
    )


def _split(document: Any) -> tuple[str, ...]:
    axes = check_type("split", document, list)
    split = tuple(_one_of("split", axis, ("layer", "kv")) for axis in axes)
    if len(set(split)) < len(split):
        raise ValueError(f"split={shown(axes)} names an axis twice")
    return split


_SIDE_FIELDS = dict.fromkeys(
    field.name for field in fields(Side) if field.name not in ("way", "cache_id")
)


def _side_to_dict(side: Side) -> dict[str, Any]:
    values = {name: getattr(side, name) for name in _SIDE_FIELDS}
    shard = side.shard
    return values | {
        "placement": side.placement.name,
        "data_type": None if side.data_type is None else side.data_type.name,
        "shape": [*side.shape],
        "layout": None if side.layout is None else str(side.layout),
        "shard": None
        if shard is None
        else {
            "layers": None if shard.layers is None else _layers_to_json(shard.layers),
            "heads": None if shard.heads is None else [shard.heads.start, shard.heads.stop],
            "num_layers": shard.num_layers,
            "num_heads": shard.num_heads,
            "tokens": _tokens_to_json(shard.tokens),
        },
    }


def side_from_dict(name: str, document: Any) -> Side:
    """Read and check the side `name` of a part; a `Side` was read before."""
    if isinstance(document, Side):
        return document
    _check_fields(name, document, {*_SIDE_FIELDS})
    data_type, layout, label = (document[field] for field in ("data_type", "layout", "label"))
    shape = tuple(_integers(f"{name}.shape", document["shape"]))
    with _named(f"{name}.layout"):
        axes = None if layout is None else CacheLayout(layout)
    side = Side(
        num_tensors=_positive(f"{name}.num_tensors", document["num_tensors"]),
        count=_positive(f"{name}.count", document["count"]),
        stride=_positive(f"{name}.stride", document["stride"]),
        paged=check_type(f"{name}.paged", document["paged"], bool),
        placement=Placement[
            _one_of(f"{name}.placement", document["placement"], tuple(Placement.__members__))
        ],
        data_type=None
        if data_type is None
        else DataType[_one_of(f"{name}.data_type", data_type, tuple(DataType.__members__))],
        shape=shape,
        layout=axes,
        label=None if label is None else check_type(f"{name}.label", label, str),
        shard=_shard(f"{name}.shard", document["shard"]),
        name=check_type(f"{name}.name", document["name"], str),
    )
    _check_side(name, side)
    return side


def _check_side(name: str, side: Side) -> None:
    """Refuse a side that does not correspond to a CacheDesc."""
    if side.data_type is None:
        if side.shape or side.layout or side.label is not None or side.shard:
            raise ValueError(f"{name}: data_type=None needs shape=[], and None for the others")
        return
    with _named(name):
        desc = CacheDesc(
            side.num_tensors,
            side.shape,
            side.data_type,
            side.placement,
            kv_tensor_format=side.label if side.layout is None else str(side.layout),
            shard=side.shard,
            row_stride=side.stride,
        )
    if (desc.batch_size, desc.layout) != (side.count, side.layout):
        raise ValueError(
            f"{name}: count={side.count} must be {desc.batch_size}, as in shape={side.shape}"
        )


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Put the name of the field before the message of an error."""
    try:
        yield
    except (LLMException, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error.args[0]}") from None


def _layers_to_json(layers: Layers) -> list[int] | dict[str, list[int]]:
    if isinstance(layers, range):
        return [layers.start, layers.stop]
    return {"numbers": [*layers]}


def _layers(name: str, document: Any) -> Layers | None:
    if isinstance(document, dict):
        return tuple(_integers(name, _check_fields(name, document, {"numbers"})["numbers"]))
    return None if document is None else _range(name, document)


def _tokens_to_json(tokens: Interleaved | range | None) -> list[int] | dict[str, int] | None:
    if tokens is None:
        return None
    if isinstance(tokens, range):
        return [tokens.start, tokens.stop]
    return {"rank": tokens.rank, "ranks": tokens.ranks, "size": tokens.size}


def _tokens(name: str, document: Any) -> Interleaved | range | None:
    if isinstance(document, dict):
        names = {field.name for field in fields(Interleaved)}
        return Interleaved(**_check_fields(name, document, names))
    return None if document is None else _range(name, document)


def _shard(name: str, document: Any) -> Shard | None:
    if document is None:
        return None
    _check_fields(name, document, {field.name for field in fields(Shard)})
    layers = _layers(f"{name}.layers", document["layers"])
    heads = document["heads"]
    heads = None if heads is None else _range(f"{name}.heads", heads)
    with _named(name):
        tokens = _tokens("tokens", document["tokens"])
        return Shard(layers, heads, document["num_layers"], document["num_heads"], tokens)


def _tables(document: Any, source: Side) -> BlockTables | None:
    if document is None:
        return None
    _check_fields("tables", document, {*BlockTables._fields})
    src, dst = (
        np.array(
            [
                check_width(f"tables.{name}", row, 0, INT64_MAX)
                for row in check_type(f"tables.{name}", document[name], list)
            ],
            np.int64,
        )
        for name in ("src", "dst")
    )
    src_token, dst_token, num_tokens = (document[name] for name in BlockTables._fields[2:])
    least = 1 if len(dst) else 0
    if len(src) < least and source.has_all_tokens:
        raise ValueError("tables.src is empty, but tables.dst is not; both need rows, or neither")
    return BlockTables(
        src,
        dst,
        check_width("tables.src_token", src_token, 0, INT64_MAX),
        check_width("tables.dst_token", dst_token, 0, INT64_MAX),
        None
        if num_tokens is None
        else check_width("tables.num_tokens", num_tokens, least, INT64_MAX),
    )


def _check_fields(name: str, document: Any, expected: set[str]) -> dict[str, Any]:
    given = check_type(name, document, dict).keys()
    if given != expected:
        raise ValueError(
            f"{name}: missing fields {sorted(expected - given)}, unknown {shown(given - expected)}"
        )
    return cast(dict[str, Any], document)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={shown(value)} must be one of {[*map(str, allowed)]}")
    return value


def _positive(name: str, value: Any) -> int:
    return check_width(name, value, 1, INT64_MAX)


def _integers(name: str, values: Any) -> list[int]:
    if not set(map(type, check_type(name, values, list))) <= {int}:
        raise TypeError(f"{name}={shown(values)} must hold int only")
    return cast(list[int], values)


def _range(name: str, ends: Any) -> range:
    if len(_integers(name, ends)) != 2:
        raise ValueError(f"{name}={shown(ends)} must be [first, one past the last]")
    return range(*ends)
