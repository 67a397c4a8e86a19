"""Documents of plans between unlike caches: restored whole, and refused if they are hostile."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, DataType, KvCacheExtParam, LLMException, Plan, Rows, Transfer
from kvplan.layout import Shard
from tests.planning.test_schema import DOCUMENT, PART, json_values, paths, refusal
from tests.planning.test_unlike import planned, transfers

FP16 = DataType.DT_FLOAT16
NHD = CacheDesc(
    4,
    (8, 16, 2, 4),
    FP16,
    kv_tensor_format="NHD",
    shard=Shard(range(2), range(2, 4), 2, 8),
)
HND = CacheDesc(
    4,
    (8, 4, 32, 4),
    FP16,
    kv_tensor_format="HND",
    shard=Shard(range(2), range(4), 2, 8),
)
CROSS = CacheDesc(1, (8, 3, 2, 16, 2, 4), FP16, kv_tensor_format="block layer kv token head dim")
RESHARD = kvplan.plan(Transfer(Rows(NHD, [5, 1, 6]), Rows(HND, [3, 1]), num_tokens=40), local="dst")
LAYERS = kvplan.plan(
    Transfer(
        Rows(CROSS, [5, 1]), Rows(CROSS, [3, 2]), layers=KvCacheExtParam(range(1, 3), range(2))
    ),
    local="dst",
)
TOP = 2**64 - 1


def written(plan: Plan) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(plan.to_dict()))
    return document


def changed(plan: Plan, path: str, value: Any) -> dict[str, Any]:
    """Return the document of a plan with one value replaced; a path may contain list indices."""
    document = copy.deepcopy(written(plan))
    *parents, last = path.split(".")
    at: Any = document["parts"][0]
    for name in parents:
        at = at[int(name)] if isinstance(at, list) else at[name]
    at[int(last) if isinstance(at, list) else last] = value
    return document


@pytest.mark.parametrize("plan", [RESHARD, LAYERS], ids=["repeats", "split"])
def test_a_plan_is_restored_whole(plan: Plan) -> None:
    assert bool(plan.part.segments.repeats) is (plan is RESHARD)
    assert bool(plan.part.split) is (plan is LAYERS)
    again = Plan.from_dict(written(plan))
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert again.to_dict() == plan.to_dict()
    assert again.explain() == plan.explain()
    assert again.part.src.shard == plan.part.src.shard
    assert again.part.tables is not None
    assert [str(again.origin(i)) for i in range(again.num_descriptors)] == [
        str(plan.origin(i)) for i in range(plan.num_descriptors)
    ]


@given(transfers(), st.booleans())
def test_any_plan_is_restored_whole(transfer: Any, coalesce: bool) -> None:
    plan = planned(transfer, coalesce)
    again = Plan.from_dict(written(plan))
    assert again == plan
    assert again.to_dict() == plan.to_dict()


HOSTILE: list[tuple[Plan, str, Any, list[str]]] = [
    (RESHARD, "segments.repeats", {}, ["repeats={}"]),
    (RESHARD, "segments.repeats.0", [[1, 1, 1]], ["repeats[0]"]),
    (RESHARD, "segments.repeats.0.0", [16, 16], ["columns", "one length"]),
    (RESHARD, "segments.repeats.0.0.1", 0, ["repeats[", "at least 1"]),
    (RESHARD, "segments.repeats.0.0.1", 2**63, ["segment 1", "outside"]),
    (RESHARD, "segments.repeats.0.0.1", 2**64, ["repeats[0]", str(2**64)]),
    (RESHARD, "segments.repeats.0.0.1", -1, ["repeats[0]", "-1"]),
    (RESHARD, "segments.repeats.0.0.1", True, ["repeats[0]"]),
    (RESHARD, "segments.repeats.0.1", TOP, ["segment 0", "outside"]),
    (RESHARD, "segments.repeats.0.2", TOP, ["segment 0", "outside"]),
    (RESHARD, "segments.repeats.0.1", 2**64, ["repeats[0]", str(2**64)]),
    (RESHARD, "segments.repeats.0.1", 1.0, ["repeats[0]"]),
    (RESHARD, "segments.repeats.0.2", 0, ["same destination"]),
    (RESHARD, "segments.repeats", [[[1] * 3, 0, 0]] * 3, ["repeats", "at most 2"]),
    (RESHARD, "num_slices", 1, ["num_slices=1", "runs"]),
    (RESHARD, "split", ["token"], ["split='token'"]),
    (RESHARD, "split", "layer", ["split='layer'"]),
    (RESHARD, "reinterpret", 1, ["reinterpret=1"]),
    (RESHARD, "src.layout", "block token", ["src", "names 2 axes"]),
    (RESHARD, "src.layout", "block token head head", ["src.layout", "names an axis twice"]),
    (RESHARD, "src.layout", 7, ["src.layout", "7"]),
    (RESHARD, "src.layout", "block head token dim", ["src", "shard has 2 heads"]),
    (RESHARD, "src.layout", None, ["src"]),
    (RESHARD, "src.data_type", "DT_STRING", ["src", "DT_STRING"]),
    (RESHARD, "src.data_type", "DT_FLOAT", ["src", "stride=256"]),
    (RESHARD, "src.data_type", "fp16", ["src.data_type='fp16'"]),
    (RESHARD, "src.shape", [8, 16, 2, 8], ["src", "shape=(8, 16, 2, 8)"]),
    (RESHARD, "src.shape", [8, 16, 2], ["src", "names 4 axes; the shape has 3"]),
    (RESHARD, "src.shape", [2**63, 16, 2, 4], ["src", "shape[0]"]),
    (RESHARD, "src.shape", [2**62, 16, 2, 4], ["src", "out of range"]),
    (RESHARD, "src.shape", [-8, 16, 2, 4], ["src", "shape[0]=-8"]),
    (RESHARD, "src.shape", [1] * 100_000, ["src", "dimensions"]),
    (RESHARD, "src.stride", 128, ["src", "stride=128"]),
    (RESHARD, "src.count", 9, ["src", "count=9"]),
    (RESHARD, "src.shard", [], ["src.shard=[]"]),
    (RESHARD, "src.shard.heads", [2, 9], ["src.shard", "heads=range(2, 9)"]),
    (RESHARD, "src.shard.heads", [2, 5], ["src", "shard has 3 heads"]),
    (RESHARD, "src.shard.heads", [0, 10**30], ["src.shard", "heads"]),
    (RESHARD, "src.shard.num_heads", None, ["src.shard", "num_heads"]),
    (RESHARD, "src.shard.num_heads", "8", ["src.shard", "num_heads='8'"]),
    (RESHARD, "src.shard.num_layers", 0, ["src.shard", "num_layers=0"]),
    (RESHARD, "src.shard.num_layers", 2**63, ["src.shard", "num_layers"]),
    (RESHARD, "tables", [], ["tables=[]"]),
    (RESHARD, "tables.src", [], ["tables.src is empty"]),
    (RESHARD, "tables.src.0", 2**63, ["tables.src", str(2**63)]),
    (RESHARD, "tables.dst.0", -1, ["tables.dst", "-1"]),
    (RESHARD, "tables.dst.0", None, ["tables.dst"]),
    (RESHARD, "tables.src.0", RESHARD.part.src.count, ["tables.src", "out of range"]),
    (RESHARD, "tables.dst.0", RESHARD.part.dst.count, ["tables.dst", "out of range"]),
    (RESHARD, "tables.dst.1", int(RESHARD.part.tables.dst[0]), ["tables.dst[1]", "already"]),
    (RESHARD, "tables.src_token", -1, ["tables.src_token=-1"]),
    (RESHARD, "tables.num_tokens", 0, ["tables.num_tokens=0"]),
    # Blocks of 3 KiB are K, V, K, V, K, V of 256 bytes, twice; 1 KiB of them is the first layer.
    (LAYERS, "segments.dst_offsets.0", 2048, ["dst", "leave the layer"]),
    (LAYERS, "segments.src_offsets.0", 5, ["src", "leave the layer"]),
    (LAYERS, "segments.nbytes.0", 513, ["leave the layer"]),
    (LAYERS, "segments.dst_offsets.0", 8 * 1536, ["segment 0", "dst", "outside"]),
    (LAYERS, "split", [], ["src_tensors=range(1, 3)", "[0, 1)"]),
    (LAYERS, "split", ["layer", "layer"], ["split"]),
    (LAYERS, "split", ["kv", "layer"], ["tensors_per_layer=1", "split="]),
    (LAYERS, "src_tensors", [0, 4], ["src_tensors=range(0, 4)", "[0, 3)"]),
]


@pytest.mark.parametrize(("plan", "path", "value", "parts"), HOSTILE)
def test_a_hostile_document_is_refused(plan: Plan, path: str, value: Any, parts: list[str]) -> None:
    message = refusal(changed(plan, path, value))
    for part in parts:
        assert part in message
    assert len(message) < 1000


def test_layers_that_need_missing_tensors_are_refused() -> None:
    """Three views per layer, of a tensor whose three layers have one view each."""
    document = written(LAYERS)
    document["parts"][0] |= {"tensors_per_layer": 3}
    document["parts"][0] |= {"src_tensors": [0, 3], "dst_tensors": [0, 3]}
    assert "tensors_per_layer=3 must group 3 views" in refusal(document)


def test_too_many_runs_are_refused() -> None:
    """A few bytes declare 2**62 runs, all of them in bounds."""
    side = PART["src"] | {
        "data_type": None,
        "shape": [],
        "count": 1,
        "stride": 2**62,
    }
    document = copy.deepcopy(DOCUMENT)
    (part,) = document["parts"]
    part |= {"src": side, "dst": side, "num_slices": 2**62}
    columns = {"src_offsets": [0], "dst_offsets": [0], "nbytes": [1]}
    for repeats in (
        [[[2**62], 1, 1]],
        [[[2**31], 2**31, 2**31], [[2**31], 1, 1]],
        [[[2**63], 0, 0], [[2], 0, 0]],
    ):
        part["segments"] = columns | {"repeats": repeats}
        assert "runs exceed" in refusal(document)


@given(transfers(), st.data())
def test_a_damaged_document_is_refused_or_is_a_sound_plan(
    transfer: Any, data: st.DataObject
) -> None:
    document = written(planned(transfer, True))
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, last = data.draw(st.sampled_from(paths(document["parts"][0]))).split(".")
        at: Any = document["parts"][0]
        for name in parents:
            at = at[name]
        numbers = st.integers(0, 40)
        at[last] = data.draw(
            json_values
            | numbers
            | st.lists(numbers, min_size=1, max_size=3)
            | st.lists(
                st.tuples(st.lists(numbers, min_size=1, max_size=3), numbers, numbers).map(list),
                max_size=3,
            )
            | st.sampled_from([["layer"], ["kv"], ["kv", "layer"], "block token dim"])
        )
    try:
        plan = Plan.from_dict(document)
    except LLMException:
        refusal(document)
        return
    assert plan.to_dict() == document
    assert plan.explain() != plan.explain("table")
    assert "layer " in str(plan.origin(plan.num_descriptors - 1))
    assert plan.diff(plan).endswith("identical")
    part = plan.parts[0]
    wholes: list[set[int]] = []
    for pair in range(part.num_tensor_pairs):
        (_, src_start), (_, dst_start) = part.pair(pair)
        bytes_written: list[int] = []
        for src, dst, nbytes in part.segments.expanded():
            assert 0 < nbytes <= part.src.tensor_nbytes - src_start - src
            assert nbytes <= part.dst.tensor_nbytes - dst_start - dst
            bytes_written += range(dst_start + dst, dst_start + dst + nbytes)
        assert len(set(bytes_written)) == len(bytes_written)
        wholes.append({part.pair(pair)[1][0] * 2**40 + item for item in bytes_written})
    assert len(set().union(*wholes)) == sum(map(len, wholes))
