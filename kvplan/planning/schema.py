"""Plans as plain JSON values, and back, exactly; what is read is checked in full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, cast, get_args

import numpy as np

from kvplan.layout import CacheLayout, Interleaved, Layers, Shard
from kvplan.planning.invariants import check_invariants
from kvplan.planning.part import Kind, Operation, Part, from_label
from kvplan.planning.plan import SCHEMA_VERSION, Plan, check_name
from kvplan.planning.segments import Coalesce, Segments
from kvplan.planning.side import Side
from kvplan.planning.tokens import BlockTables
from kvplan.status import LLMException, invalid
from kvplan.types import CacheDesc, DataType, Placement
from kvplan.validation import INT64_MAX, check_index, check_type, check_width, shown


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return `plan` as values that `json.dumps` takes."""
    return {"schema_version": SCHEMA_VERSION, "parts": [part_to_dict(it) for it in plan.parts]}


def part_to_dict(part: Part) -> dict[str, Any]:
    """Return one of the `parts` of `to_dict`."""
    tables = part.tables
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
            **{name: getattr(part.segments, name).tolist() for name in Segments.columns()},
            "repeats": [[it.counts.tolist(), *it[1:]] for it in part.segments.repeats],
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
    """Return the plan that `to_dict` wrote; a document from outside is checked in full.

    Version 2 had one part in place of `parts`, or `groups`: a document for each name. Version 1 did
    not know what the bytes of a row are.
    """
    # The version first: another one may have other fields.
    if not isinstance(document, dict):
        raise invalid(f"document is not a plan: document={shown(document)} must be dict")
    version = document.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise invalid(
            f"document is not a plan: schema_version={shown(version)} must be 1 to {SCHEMA_VERSION}"
        )
    if version == SCHEMA_VERSION:
        places = {f"parts[{i}]": it for i, it in enumerate(_list_of(document, "parts"))}
    elif version == 2 and "groups" in document:
        places = _groups(document)
    else:
        places = {"": document}
    parts = []
    for place, it in places.items():
        try:
            parts.append(_checked(it, version, place))
        except (LLMException, TypeError, ValueError) as error:
            said = f"{place}: {error.args[0]}" if place else error.args[0]
            raise invalid(f"document is not a plan: {said}") from None
    return Plan(parts)


def _list_of(document: dict[str, Any], field: str) -> list[Any]:
    if document.keys() != {"schema_version", field} or not isinstance(document[field], list):
        raise invalid(
            f"document is not a plan: version {SCHEMA_VERSION} has schema_version and a list of "
            f"{field}; this has {shown(sorted(map(str, document)))}"
        )
    return cast("list[Any]", document[field])


def _groups(document: dict[str, Any]) -> dict[str, Any]:
    """The parts of a document of version 2, by where they are."""
    groups = document["groups"]
    if document.keys() != {"schema_version", "groups"} or not isinstance(groups, dict):
        raise invalid(
            "document is not a plan: of several caches version 2 has schema_version and groups, a "
            f"plan for each name; this has {shown(sorted(map(str, document)))}"
        )
    places = {}
    for label, it in groups.items():
        place = f"groups[{shown(label)}]"
        check_name(label)
        name, source = from_label(label)
        if not isinstance(it, dict):
            raise invalid(f"document is not a plan: {place}={shown(it)} must be dict")
        its = it.get("schema_version")
        if its != 2:
            raise invalid(f"document is not a plan: {place}: schema_version={shown(its)} must be 2")
        places[place] = {"name": name, "source": source} | it
    return places


def part_from_dict(document: dict[str, Any]) -> Part:
    """Return the part that `part_to_dict` wrote, of the version that `document` says besides.

    Raises:
        LLMException: LLM_PARAM_INVALID: it is none.
    """
    fields = dict(document)
    version = fields["schema_version"] if fields.get("schema_version") in (1, 2) else SCHEMA_VERSION
    if version == SCHEMA_VERSION and fields.pop("schema_version", None) != SCHEMA_VERSION:
        raise invalid(f"schema_version={shown(document.get('schema_version'))} must be 1 to 3")
    try:
        return _checked(fields, version, "")
    except (TypeError, ValueError) as error:
        raise invalid(f"document is not a plan: {error}") from None


def _checked(document: Any, version: int, place: str) -> Part:
    part = _parse(document, version, place)
    check_invariants(part)
    if part.tables is not None:
        for name in ("src", "dst"):
            for row in getattr(part.tables, name).tolist():
                check_index(f"tables.{name}", row, getattr(part, name).count)
    return part


def _parse(given: Any, version: int, place: str) -> Part:
    document = check_type(place or "document", given, dict)
    if version < SCHEMA_VERSION:
        of_parts = {"name": "", "source": None}
        if not place and (unknown := document.keys() & of_parts):
            raise ValueError(f"schema_version={version} has no fields {sorted(unknown)}")
        document = of_parts | {
            name: it for name, it in document.items() if name != "schema_version"
        }
    if version == 1:
        document = _from_version_1(document)
    _check_fields(place or "document", document, {f.name for f in fields(Part)})
    columns = _check_fields("segments", document["segments"], {*Segments.columns(), "repeats"})
    repeats = check_type("repeats", columns["repeats"], list)
    for level, it in enumerate(repeats):
        if len(check_type(f"repeats[{level}]", it, list)) != 3:
            raise ValueError(
                f"repeats[{level}]={shown(it)} must be [counts, src_stride, dst_stride]"
            )
    name, source = document["name"], document["source"]
    return Part(
        operation=_one_of("operation", document["operation"], get_args(Operation)),
        kind=_one_of("kind", document["kind"], get_args(Kind)),
        src=_side_from_dict("src", document["src"]),
        dst=_side_from_dict("dst", document["dst"]),
        src_tensors=_range("src_tensors", document["src_tensors"]),
        dst_tensors=_range("dst_tensors", document["dst_tensors"]),
        tensors_per_layer=_positive("tensors_per_layer", document["tensors_per_layer"]),
        segments=Segments(
            _integers("src_offsets", columns["src_offsets"]),
            _integers("dst_offsets", columns["dst_offsets"]),
            _integers("nbytes", columns["nbytes"]),
            [(_integers(f"repeats[{i}]", it[0]), it[1], it[2]) for i, it in enumerate(repeats)],
        ),
        num_slices=check_width("num_slices", document["num_slices"], 0, INT64_MAX),
        coalesce=Coalesce(_one_of("coalesce", document["coalesce"], tuple(Coalesce))),
        split=_split(document["split"]),
        reinterpret=check_type("reinterpret", document["reinterpret"], bool),
        tables=_tables(document["tables"]),
        name=check_type("name", name, str),
        source=None if source is None else check_width("source", source, 0, INT64_MAX),
    )


def _split(axes: Any) -> tuple[str, ...]:
    split = tuple(_one_of("split", it, ("layer", "kv")) for it in check_type("split", axes, list))
    if len(set(split)) < len(split):
        raise ValueError(f"split={shown(axes)} names an axis twice")
    return split


def _from_version_1(document: dict[str, Any]) -> dict[str, Any]:
    """What version 1 did not know: rows were opaque, of tensors that lie in one piece."""
    more: dict[str, Any] = {"split": [], "reinterpret": False, "tables": None}
    if unknown := document.keys() & more:
        raise ValueError(f"schema_version=1 has no fields {sorted(unknown)}")
    document = more | document
    of_side: dict[str, Any] = dict.fromkeys(_MEANING) | {"shape": []}
    of_segments: dict[str, Any] = {"repeats": []}
    for name, more in (("segments", of_segments), ("src", of_side), ("dst", of_side)):
        if isinstance(document.get(name), dict):
            if unknown := document[name].keys() & more:
                raise ValueError(f"{name}: schema_version=1 has no fields {sorted(unknown)}")
            document[name] = document[name] | more
    return document


_MEANING = ("data_type", "shape", "layout", "label", "shard")
_SIDE_FIELDS = {it.name for it in fields(Side)} - {"way", "cache_id"}


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
            "layers": None if shard.layers is None else _layers_document(shard.layers),
            "heads": None if shard.heads is None else [shard.heads.start, shard.heads.stop],
            "num_layers": shard.num_layers,
            "num_heads": shard.num_heads,
            **_tokens_document(shard.tokens),
        },
    }


def _side_from_dict(name: str, document: Any) -> Side:
    _check_fields(name, document, _SIDE_FIELDS)
    data_type, layout, label = (document[it] for it in ("data_type", "layout", "label"))
    shape = tuple(_integers(f"{name}.shape", document["shape"]))
    with _named(f"{name}.layout"):
        made = None if layout is None else CacheLayout(layout)
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
        layout=made,
        label=None if label is None else check_type(f"{name}.label", label, str),
        shard=_shard(f"{name}.shard", document["shard"]),
        name=check_type(f"{name}.name", document["name"], str),
    )
    _check_side(name, side)
    return side


def _check_side(name: str, side: Side) -> None:
    """Refuse a side that no CacheDesc describes."""
    if side.data_type is None:
        if side.shape or side.layout or side.label is not None or side.shard:
            raise ValueError(f"{name}: data_type=None, and so shape must be [], the others None")
        return
    with _named(name):
        desc = CacheDesc(
            side.num_tensors,
            side.shape,
            side.data_type,
            side.placement,
            kv_tensor_format=side.label if side.layout is None else str(side.layout),
            shard=side.shard,
        )
    if (desc.batch_size, desc.stride, desc.layout) != (side.count, side.stride, side.layout):
        raise ValueError(
            f"{name}: count={side.count} and stride={side.stride} must be {desc.batch_size} and "
            f"{desc.stride}, those of shape={side.shape}"
        )


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Say of which field a description is refused."""
    try:
        yield
    except (LLMException, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error.args[0]}") from None


def _layers_document(layers: Layers) -> list[int] | dict[str, list[int]]:
    if isinstance(layers, range):
        return [layers.start, layers.stop]
    return {"numbers": [*layers]}


def _tokens_document(tokens: Interleaved | range | None) -> dict[str, Any]:
    """A field that a shard of all tokens does not have, as files that were written before."""
    if tokens is None:
        return {}
    if isinstance(tokens, range):
        return {"tokens": [tokens.start, tokens.stop]}
    return {"tokens": {"rank": tokens.rank, "ranks": tokens.ranks, "size": tokens.size}}


def _tokens(name: str, document: Any) -> Interleaved | range:
    if not isinstance(document, dict):
        return _range(name, document)
    _check_fields(name, document, {it.name for it in fields(Interleaved)})
    return Interleaved(**document)


def _shard(name: str, document: Any) -> Shard | None:
    if document is None:
        return None
    has_tokens = isinstance(document, dict) and "tokens" in document
    names = {it.name for it in fields(Shard)}
    _check_fields(name, document, names if has_tokens else names - {"tokens"})
    layers, heads = (
        None
        if document[it] is None
        else _integers(f"{name}.{it}", document[it]["numbers"])
        if it == "layers" and isinstance(document[it], dict) and [*document[it]] == ["numbers"]
        else _range(f"{name}.{it}", document[it])
        for it in ("layers", "heads")
    )
    with _named(name):
        tokens = _tokens("tokens", document["tokens"]) if has_tokens else None
        return Shard(layers, heads, document["num_layers"], document["num_heads"], tokens)


def _tables(document: Any) -> BlockTables | None:
    if document is None:
        return None
    _check_fields("tables", document, {*BlockTables._fields})
    src, dst = (
        np.array(
            [
                check_width(f"tables.{it}", row, 0, INT64_MAX)
                for row in check_type(f"tables.{it}", document[it], list)
            ],
            np.int64,
        )
        for it in ("src", "dst")
    )
    src_token, dst_token, num_tokens = (document[it] for it in BlockTables._fields[2:])
    least = 1 if len(dst) else 0
    if len(src) < least:
        raise ValueError("tables.src is empty; a request has a row on both sides, or none")
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
