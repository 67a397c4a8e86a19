"""The JSON schema of plans, kvplan/planning/plan.schema.json, agrees with `load_plan`."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import fields
from doctest import DocTestParser
from importlib import resources
from typing import Any, get_args

import numpy as np
import pytest

import kvplan
from kvplan import (
    CacheDesc,
    DataType,
    LLMException,
    Placement,
    Plan,
    Rows,
    Shard,
    Transfer,
    reference,
)
from kvplan.layout import Interleaved
from kvplan.planning.part import Kind, Operation, Part
from kvplan.planning.plan import SCHEMA_VERSION
from kvplan.planning.segments import Coalesce, Segments
from kvplan.planning.side import Side
from kvplan.planning.tokens import BlockTables
from tests.support.zygote import ROOT

SCHEMA = json.loads(resources.files("kvplan.planning").joinpath("plan.schema.json").read_text())
DEFS = SCHEMA["$defs"]
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}


def problems(value: Any, schema: dict[str, Any], place: str = "$") -> Iterator[str]:
    """Yield the errors in a value, by the keywords of JSON Schema that the schema uses."""
    unknown = schema.keys() - KEYWORDS
    assert not unknown, unknown
    if "$ref" in schema:
        yield from problems(value, DEFS[schema["$ref"].removeprefix("#/$defs/")], place)
    if "anyOf" in schema and all([*problems(value, one, place)] for one in schema["anyOf"]):
        yield f"{place}: {value!r} is none of them"
    if "const" in schema and value != schema["const"]:
        yield f"{place}: {value!r} is not {schema['const']}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value!r} is not one of {schema['enum']}"
    kind = schema.get("type")
    if kind == "null":
        if value is not None:
            yield f"{place}: {value!r} is not null"
        return
    if kind is not None and type(value) is not TYPES[kind]:
        yield f"{place}: {value!r} is no {kind}"
        return
    if kind == "integer" and not schema["minimum"] <= value <= schema["maximum"]:
        yield f"{place}: {value} is out of range"
    if kind == "string" and len(value) > schema.get("maxLength", len(value)):
        yield f"{place}: too long"
    if kind == "array":
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{place}: {len(value)} items"
        if schema.get("uniqueItems") and len({*map(repr, value)}) < len(value):
            yield f"{place}: an item twice"
        first = schema.get("prefixItems", [])
        for index, item in enumerate(value):
            its = first[index] if index < len(first) else schema.get("items", {})
            yield from problems(item, its, f"{place}[{index}]")
    if kind == "object" and "properties" in schema:
        for name in schema["required"]:
            if name not in value:
                yield f"{place}.{name} is missing"
        for name, item in value.items():
            if name not in schema["properties"]:
                yield f"{place}.{name} is unknown"
            else:
                yield from problems(item, schema["properties"][name], f"{place}.{name}")


KEYWORDS = {
    *("$schema", "$id", "$defs", "$ref", "title", "description", "type", "anyOf", "const", "enum"),
    *("minimum", "maximum", "maxLength", "minItems", "maxItems", "uniqueItems", "items"),
    *("prefixItems", "properties", "required", "additionalProperties"),
}


def plans() -> Iterator[Plan]:
    """Return plans that use every part of the format."""
    fp16, nhd = DataType.DT_FLOAT16, "block token head dim"
    plain = CacheDesc(2, (8, 16, 2, 8), fp16, kv_tensor_format=nhd)
    yield kvplan.plan(Transfer(Rows(plain, [1, 2, 5]), Rows(plain, [3, 4, 0])), local="dst")
    half = CacheDesc(
        2, (8, 16, 1, 8), fp16, kv_tensor_format=nhd,
        shard=Shard(heads=range(1, 2), num_heads=2, layers=[0, 4], num_layers=6),
    )  # fmt: skip
    whole = CacheDesc(
        1, (4, 32, 2, 2, 8), fp16, Placement.HOST, kv_tensor_format="block token layer head dim",
        shard=Shard(layers=[0, 4], num_layers=6, heads=range(2), num_heads=2),
    )  # fmt: skip
    yield kvplan.plan(Transfer(Rows(half, [1, 2]), Rows(whole, [3]), num_tokens=20), local="src")
    ranks = [
        CacheDesc(
            2, (8, 16, 2, 8), fp16, kv_tensor_format=nhd, shard=Shard(tokens=Interleaved(r, 2))
        )
        for r in range(2)
    ]
    gather = Transfer([Rows(its, [0]) for its in ranks], Rows(plain, [1]), num_tokens=16)
    yield kvplan.plan({"latent": gather}, local="dst")
    slots = CacheDesc(1, (2, 64), DataType.DT_INT8, kv_tensor_format="opaque mine")
    moved = Transfer(Rows(slots, slot=0), Rows(slots, slot=1), nbytes=40)
    yield kvplan.plan({"state": moved}, local="src")


DOCUMENTS = [json.loads(json.dumps(plan.to_dict())) for plan in plans()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=range(len(DOCUMENTS)))
def test_every_plan_conforms_to_the_schema(document: dict[str, Any]) -> None:
    assert [*problems(document, SCHEMA)] == []
    assert Plan.from_dict(document).to_dict() == document


def test_the_schema_has_the_fields_and_the_values_of_the_code() -> None:
    def names(name: str) -> set[str]:
        assert DEFS[name]["required"] == [*DEFS[name]["properties"]]
        assert DEFS[name]["additionalProperties"] is False
        return {*DEFS[name]["properties"]}

    def values(name: str, field: str) -> set[str]:
        found = DEFS[name]["properties"][field]
        return {*found.get("enum", found.get("anyOf", [{}])[0].get("enum", []))}

    assert SCHEMA["properties"]["schema_version"] == {"const": SCHEMA_VERSION}
    assert f":{SCHEMA_VERSION}" in SCHEMA["$id"]
    assert names("part") == {field.name for field in fields(Part)}
    assert names("side") == {field.name for field in fields(Side)} - {"way", "cache_id"}
    assert names("shard") == {field.name for field in fields(Shard)}
    assert names("tables") == {*BlockTables._fields}
    assert names("segments") == {*Segments.columns(), "repeats"}
    assert values("part", "operation") == {*get_args(Operation)}
    assert values("part", "kind") == {*get_args(Kind)}
    assert values("part", "coalesce") == {its.value for its in Coalesce}
    assert values("side", "placement") == {*Placement.__members__}
    assert values("side", "data_type") == {*DataType.__members__}


def test_the_executor_of_the_document_agrees_with_the_reference() -> None:
    page = (ROOT / "docs/reference/plan-format.md").read_text()
    source = page[page.index(">>> from math import prod") : page.index(">>> prefill, decode =")]
    names: dict[str, Any] = {}
    exec("".join(its.source for its in DocTestParser().get_examples(source)), names)
    numbers = np.random.default_rng(1)
    for plan, document in zip(plans(), DOCUMENTS, strict=True):
        src, dst, expected = [], [], []
        for part in plan.parts:
            for side, arrays in ((part.src, src), (part.dst, dst)):
                nbytes = side.num_tensors, side.tensor_nbytes
                arrays += list(numbers.integers(0, 256, nbytes, np.uint8))
        expected = [its.copy() for its in dst]
        reference.execute(plan, src, expected)
        found = [bytearray(its) for its in dst]
        names["execute"](document, [bytearray(its) for its in src], found)
        assert found == [its.tobytes() for its in expected]


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of all values in a document; of lists, only those in the first element."""
    yield path
    items = value.items() if isinstance(value, dict) else []
    items = enumerate(value[:1]) if isinstance(value, list) else items
    for name, item in items:
        yield from places(item, (*path, name))


def changed(document: dict[str, Any], path: tuple[str | int, ...], value: object) -> Any:
    made = copy.deepcopy(document)
    at: Any = made
    for step in path[:-1]:
        at = at[step]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return made


WRONG = (None, -1, 1.5, 2**64, "wrong", True, [], {}, {"surplus": 1}, [[]], KeyError)


@pytest.mark.parametrize("document", DOCUMENTS, ids=range(len(DOCUMENTS)))
def test_documents_that_the_schema_refuses_are_not_loaded(document: dict[str, Any]) -> None:
    refused = 0
    for path in places(document):
        for value in WRONG if path else ():
            made = changed(document, path, value)
            if not [*problems(made, SCHEMA)]:
                continue
            refused += 1
            with pytest.raises(LLMException, match="LLM_PARAM_INVALID"):
                Plan.from_dict(made)
    assert refused > 200
