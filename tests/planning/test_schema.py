"""Documents from outside: a plan is restored whole, or LLM_PARAM_INVALID names the error."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, Coalesce, DataType, LLMException, LLMStatusCode, Plan, Rows, Transfer
from kvplan.planning import Segments
from kvplan.planning.plan import SCHEMA_VERSION
from kvplan.planning.schema import part_from_dict, part_to_dict
from tests.planning.transfers import Example, transfers
from tests.support.refusals import refused

DESC = CacheDesc(4, (8, 4), DataType.DT_INT8)
DOCUMENT = kvplan.plan(
    Transfer(Rows(DESC, [4, 5, 1]), Rows(DESC, [1, 2, 6])), local="dst"
).to_dict()
(PART,) = DOCUMENT["parts"]


def refusal(document: Any) -> str:
    with refused(LLMStatusCode.LLM_PARAM_INVALID) as raised:
        Plan.from_dict(document)
    return str(raised.value)


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return DOCUMENT with the value at a path such as "src.count" of its part replaced."""
    document = copy.deepcopy(DOCUMENT)
    *parents, last = path.split(".")
    at = document if last in DOCUMENT else document["parts"][0]
    for name in parents:
        at = at[name]
    at[last] = value
    return document


def opaque(**changes: Any) -> dict[str, Any]:
    """Return a side of DOCUMENT of which only rows are known."""
    unknown = dict.fromkeys(("data_type", "layout", "label", "shard"))
    return PART["src"] | unknown | {"shape": []} | changes


def test_the_document_is_valid() -> None:
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT
    assert Plan.from_dict(DOCUMENT).to_dict() == DOCUMENT
    assert DOCUMENT == {"schema_version": 3, "parts": [PART]}
    assert PART == {
        "name": "",
        "source": None,
        "operation": "pull_blocks",
        "kind": "B2B",
        "src": {
            "num_tensors": 4,
            "count": 8,
            "stride": 4,
            "paged": True,
            "placement": "DEVICE",
            "data_type": "DT_INT8",
            "shape": [8, 4],
            "layout": None,
            "label": None,
            "shard": None,
            "name": "",
        },
        "dst": {
            "num_tensors": 4,
            "count": 8,
            "stride": 4,
            "paged": True,
            "placement": "DEVICE",
            "data_type": "DT_INT8",
            "shape": [8, 4],
            "layout": None,
            "label": None,
            "shard": None,
            "name": "",
        },
        "src_tensors": [0, 4],
        "dst_tensors": [0, 4],
        "tensors_per_layer": 2,
        "segments": {
            "src_offsets": [4, 16],
            "dst_offsets": [24, 4],
            "nbytes": [4, 8],
            "repeats": [],
        },
        "num_slices": 3,
        "coalesce": "sorted",
        "split": [],
        "reinterpret": False,
        "tables": {
            "src": [4, 5, 1],
            "dst": [1, 2, 6],
            "src_token": 0,
            "dst_token": 0,
            "num_tokens": None,
        },
    }


WRONG: list[tuple[str, Any, list[str]]] = [
    ("schema_version", 2, ["schema_version=2 must be 3"]),
    ("schema_version", 4, ["schema_version=4 must be 3"]),
    ("parts", [], ["parts is empty"]),
    ("parts", {"": PART}, ["a list of parts"]),
    ("parts", [PART, PART], ["parts[1]", "label ''"]),
    ("parts", [PART, {**PART, "name": "b", "operation": "push_blocks"}], ["a pull", "a push"]),
    ("parts", [PART, {**PART, "name": "b", "kind": "C2B"}], ["parts[1]", "kind=C2B"]),
    ("name", None, ["name=None"]),
    ("name", "a\nb", ["1 to 64 printable"]),
    ("name", "x" * 65, ["1 to 64 printable"]),
    ("source", -1, ["source=-1"]),
    ("source", "0", ["source='0'"]),
    ("schema_version", True, ["schema_version=True"]),
    ("schema_version", 3.0, ["schema_version=3.0"]),
    ("schema_version", "3", ["schema_version='3'"]),
    ("operation", "pull", ["operation='pull'", "pull_blocks"]),
    ("operation", ["pull_blocks"], ["operation=['pull_blocks']"]),
    ("operation", "pull_cache", ["operation=pull_cache", "C2C"]),
    ("operation", "copy_cache", ["operation=copy_cache", "C2C"]),
    ("kind", "B2C", ["kind='B2C'", "B2B"]),
    ("kind", "C2B", ["kind=C2B", "B2B"]),
    ("src", None, ["src=None"]),
    ("src", [], ["src=[]"]),
    ("src", {}, ["src", "num_tensors"]),
    ("src.extra", 1, ["src", "extra"]),
    ("src.num_tensors", 0, ["src.num_tensors=0"]),
    ("src.num_tensors", 4.0, ["src.num_tensors=4.0"]),
    ("src.num_tensors", 2**32, ["src: num_tensors", str(2**32), str(2**32 - 1)]),
    ("src.num_tensors", 10**400, ["src.num_tensors=1"]),
    ("src.num_tensors", 3, ["src_tensors=range(0, 4)", "[0, 3)"]),
    ("src.count", -8, ["src.count=-8"]),
    ("src.count", 5, ["src", "count=5", "shape=(8, 4)"]),
    ("src.count", 2**62, ["src", "count=4", "shape=(8, 4)"]),
    ("src", opaque(count=5), ["segment 1", "src", "[16, 24)", "[0, 20)"]),
    ("src", opaque(count=2**62), ["src", str(2**64), str(2**63 - 1)]),
    ("src", opaque(stride=2**63), ["src.stride="]),
    ("src", opaque(shape=[8, 4]), ["src", "data_type=None"]),
    ("src", opaque(layout="block token"), ["src", "data_type=None"]),
    ("dst", opaque(count=6), ["segment 0", "dst", "[24, 28)", "[0, 24)"]),
    ("src.stride", None, ["src.stride=None"]),
    ("src.paged", False, ["kind=B2B", "slots", "C2B"]),
    ("src.paged", 1, ["src.paged=1"]),
    ("src.placement", "NPU", ["src.placement='NPU'", "DEVICE"]),
    ("src.placement", 1, ["src.placement=1"]),
    ("src.name", 7, ["src.name=7"]),
    ("dst.count", 6, ["dst", "count=6", "shape=(8, 4)"]),
    ("src_tensors", [0, 4, 1], ["src_tensors"]),
    ("src_tensors", [0, 5], ["src_tensors=range(0, 5)", "[0, 4)"]),
    ("src_tensors", [-2, 2], ["src_tensors=range(-2, 2)", "[0, 4)"]),
    ("src_tensors", [4, 0], ["src_tensors=range(4, 0)", "non-empty"]),
    ("src_tensors", [0, 10**30], ["src_tensors=range(0, 1", "[0, 4)"]),
    ("src_tensors", [1, 3], ["src_tensors=range(1, 3)", "whole layers of 2"]),
    ("src_tensors", [0, 3], ["src_tensors=range(0, 3)", "whole layers of 2"]),
    ("src_tensors", [2, 4], ["src_tensors=range(2, 4)", "range(0, 4)", "equal length"]),
    ("src_tensors", "04", ["src_tensors='04'"]),
    ("src_tensors", {"0": 1}, ["src_tensors={"]),
    ("tensors_per_layer", 0, ["tensors_per_layer=0"]),
    ("tensors_per_layer", True, ["tensors_per_layer=True"]),
    ("tensors_per_layer", 2**63, [f"tensors_per_layer={2**63}"]),
    ("segments", None, ["segments=None"]),
    ("segments", [[4, 24, 4]], ["segments=[[4, 24, 4]]"]),
    ("segments", {"src_offsets": [0]}, ["segments", "dst_offsets"]),
    ("segments.more", [], ["segments", "more"]),
    ("segments.nbytes", [4], ["columns", "one length"]),
    ("segments.nbytes", [4, 0], ["must be at least 1 for every segment"]),
    ("segments.nbytes", [4, -8], ["nbytes", "-8"]),
    ("segments.nbytes", [4, 8.0], ["nbytes=[4, 8.0]"]),
    ("segments.nbytes", [4, True], ["nbytes=[4, True]"]),
    ("segments.nbytes", [4, None], ["nbytes=[4, None]"]),
    ("segments.nbytes", [[4], [8]], ["nbytes=[[4], [8]]"]),
    ("segments.nbytes", 8, ["nbytes=8"]),
    ("segments.nbytes", [4, 2**64], ["nbytes", str(2**64), str(2**64 - 1)]),
    ("segments.nbytes", [4, 2**64 - 1], ["segment 1", "outside"]),
    ("segments.src_offsets", [4, 2**64 - 4], ["segment 1", "src", "outside"]),
    ("segments.dst_offsets", [24, 29], ["segment 1", "dst", "[29, 37)", "[0, 32)"]),
    ("segments.dst_offsets", [4, 4], ["segments 0 and 1", "same destination", "dst offset 4"]),
    ("segments.dst_offsets", [11, 4], ["segments 1 and 0", "same destination", "dst offset 11"]),
    ("num_slices", 0, ["num_slices=0"]),
    ("num_slices", 1, ["num_slices=1", "at least 2"]),
    ("num_slices", 2**63, [f"num_slices={2**63}"]),
    ("num_slices", "3", ["num_slices='3'"]),
    ("coalesce", "none", ["num_slices=3", "coalesce=none"]),
    ("coalesce", "SORTED", ["coalesce='SORTED'", "sorted"]),
    ("coalesce", [], ["coalesce=[]"]),
    ("more", 1, ["unknown", "more"]),
]


@pytest.mark.parametrize(("path", "value", "parts"), WRONG)
def test_a_wrong_field_is_named(path: str, value: Any, parts: list[str]) -> None:
    message = refusal(changed(path, value))
    for part in parts:
        assert part in message


def test_a_plan_without_segments_has_no_slices_of_each() -> None:
    assert "num_slices" in refusal(
        changed("segments", {"repeats": [], **{name: [] for name in Segments.columns()}})
    )


@pytest.mark.parametrize("name", PART)
def test_a_missing_field_is_named(name: str) -> None:
    part = {key: value for key, value in PART.items() if key != name}
    assert name in refusal(DOCUMENT | {"parts": [part]})


@pytest.mark.parametrize("document", [None, [], "plan", 1, {}, [DOCUMENT], {1: 2}])
def test_other_values_are_refused(document: Any) -> None:
    assert "document" in refusal(document)


def test_a_deep_or_long_value_is_not_in_the_message() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    for value in (deep, "x" * 10**6, list(range(10**4)), dict.fromkeys(map(str, range(10**4)))):
        for path in ("src", "operation", "src_tensors", "num_slices", "segments", "src.placement"):
            assert len(refusal(changed(path, value))) < 1000
    while deep:  # deallocates level by level, because recursion this deep crashes some Pythons
        deep = deep.pop()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 2**31, 2**32, 2**63, 2**64, 10**30, -1])
    | st.floats()
    | st.sampled_from(["B2B", "C2C", "sorted", "none", "DEVICE", "pull_blocks", ""])
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*DOCUMENT, *PART, *PART["src"]]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(json_values)
def test_any_other_json_is_refused(document: Any) -> None:
    refusal(document)


def paths(document: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in document.items():
        found.append(prefix + name)
        if isinstance(value, dict):
            found += paths(value, f"{prefix}{name}.")
    return found


@given(transfers(), st.data())
def test_a_damaged_document_is_refused_or_is_a_sound_plan(
    example: Example, data: st.DataObject
) -> None:
    document = json.loads(json.dumps(example.plan().to_dict()))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths(document["parts"][0])))
        *parents, last = path.split(".")
        at = document["parts"][0]
        for name in parents:
            at = at[name]
        numbers = st.integers(0, 40)
        at[last] = data.draw(
            json_values | numbers | st.lists(numbers, min_size=1, max_size=3), label=path
        )
    try:
        plan = Plan.from_dict(document)
    except LLMException:
        refusal(document)
        return
    # An accepted plan can be read, sliced and written like any other.
    assert plan.to_dict() == document
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.explain() != plan.explain("table")
    assert plan.for_layers(plan.part.src_layers) == plan
    assert "layer " in str(plan.origin(plan.num_descriptors - 1))
    assert plan.diff(plan).endswith("identical")
    for src, dst, nbytes in plan.part.segments:
        assert nbytes > 0
        assert src + nbytes <= plan.part.src.tensor_nbytes
        assert dst + nbytes <= plan.part.dst.tensor_nbytes


def test_names_and_ranges_are_restored() -> None:
    plan = kvplan.plan(
        Transfer(Rows(DESC, offset=1), Rows(DESC), nbytes=3, coalesce=Coalesce.CALLER_ORDER),
        local="dst",
    )
    again = Plan.from_dict(plan.to_dict())
    assert again.part.src_tensors == plan.part.src_tensors
    assert again.part.coalesce is Coalesce.CALLER_ORDER
    assert again.part.src.name == plan.part.src.name


def test_a_single_part_has_the_version_in_its_document() -> None:
    part = kvplan.plan(Transfer(Rows(DESC, [4, 1]), Rows(DESC, [1, 2])), local="dst").part
    document = part_to_dict(part)
    assert part_from_dict(document | {"schema_version": SCHEMA_VERSION}) == part
    for wrong in ({}, {"schema_version": SCHEMA_VERSION - 1}, {"schema_version": True}):
        with refused(LLMStatusCode.LLM_PARAM_INVALID, "schema_version"):
            part_from_dict(document | wrong)
    for name, value in (("kind", 5), ("num_slices", "2"), ("src_tensors", [0])):
        with refused(LLMStatusCode.LLM_PARAM_INVALID, f"is not a part of a plan: {name}="):
            part_from_dict(document | {"schema_version": SCHEMA_VERSION, name: value})
