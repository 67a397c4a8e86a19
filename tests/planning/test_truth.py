"""Caches with different meanings: refused unless requested, and their plans are never equal."""

from __future__ import annotations

from typing import Any

import pytest

import kvplan
from kvplan import CacheDesc, DataType, KvCacheExtParam, Plan, Rows, Transfer
from kvplan.layout import Shard
from kvplan.planning.side import side
from tests.support.refusals import refused

FP16, BF16 = DataType.DT_FLOAT16, DataType.DT_BF16
ROWS = (16, 8, 2, 16)


def cache(shape: tuple[int, ...] = ROWS, data_type: DataType = FP16, **more: Any) -> CacheDesc:
    return CacheDesc(4, shape, data_type, **more)


E4M3, E5M2 = (
    cache(data_type=value) for value in (DataType.DT_FLOAT8_E4M3FN, DataType.DT_FLOAT8_E5M2)
)

UNLIKE = {
    "fp16 to bf16": (cache(), cache(data_type=BF16), "data type"),
    "e4m3 to e5m2": (E4M3, E5M2, "data type"),
    "int16 to fp16": (cache(data_type=DataType.DT_INT16), cache(), "data type"),
    "tokens first to heads first": (cache(), cache((16, 2, 8, 16)), "shape of a row"),
    "8 heads of 16 tokens to 4 of 32": (
        cache((16, 16, 8, 16)),
        cache((16, 32, 4, 16)),
        "shape of a row",
    ),
    "a layout of its own name": (
        cache(kv_tensor_format="opaque ND"),
        cache(kv_tensor_format="opaque NZ"),
        "layout",
    ),
    "a layout against none": (cache(kv_tensor_format="HND"), cache((16, 8, 2, 16)), "layout"),
    "none against a layout": (cache((16, 8, 2, 16)), cache(kv_tensor_format="NHD"), "layout"),
    "a name of its own against none": (cache(), cache(kv_tensor_format="opaque ND"), "layout"),
    "NHD read as HND": (
        cache(kv_tensor_format="NHD"),
        cache(kv_tensor_format="HND"),
        "heads",
    ),
    "another head dimension": (
        cache((16, 8, 2, 16), kv_tensor_format="NHD"),
        cache((16, 16, 2, 8), kv_tensor_format="NHD"),
        "axis dim",
    ),
    "other heads of the model": (
        cache(kv_tensor_format="NHD", shard=Shard(heads=range(2), num_heads=4)),
        cache(kv_tensor_format="NHD", shard=Shard(heads=range(2, 4), num_heads=4)),
        "no head in common",
    ),
    "heads of a model that has more": (
        cache(kv_tensor_format="NHD", shard=Shard(heads=range(2), num_heads=4)),
        cache(kv_tensor_format="NHD", shard=Shard(heads=range(2), num_heads=8)),
        "axis head (4 and 8 KV heads in the model)",
    ),
    "a state to a token": (
        cache((16, 1, 256), kv_tensor_format="block state dim"),
        cache((16, 1, 256), kv_tensor_format="block token dim"),
        "axis state",
    ),
    "a token to a state": (
        cache((16, 1, 256), kv_tensor_format="block token dim"),
        cache((16, 1, 256), kv_tensor_format="block state dim"),
        "axis state",
    ),
    "dtype of equal layouts": (
        cache(kv_tensor_format="NHD"),
        cache(data_type=BF16, kv_tensor_format="NHD"),
        "data type",
    ),
}


@pytest.mark.parametrize(("src", "dst", "word"), UNLIKE.values(), ids=UNLIKE)
def test_unlike_blocks_are_refused_with_both_sides(
    src: CacheDesc, dst: CacheDesc, word: str
) -> None:
    with refused("LLM_PARAM_INVALID") as raised:
        kvplan.plan(Transfer(Rows(src, [3, 4]), Rows(dst, [5, 6])), local="dst")
    message = str(raised.value)
    assert word in message
    sides = [side("", desc, paged=True) for desc in (src, dst)]
    assert f"src is {sides[0]}; dst is {sides[1]}. reinterpret=True copies" in message


@pytest.mark.parametrize(("src", "dst", "word"), UNLIKE.values(), ids=UNLIKE)
def test_unlike_blocks_are_bytes_on_request_and_every_text_says_so(
    src: CacheDesc, dst: CacheDesc, word: str
) -> None:
    plan = kvplan.plan(
        Transfer(Rows(src, [3, 4]), Rows(dst, [5, 6]), reinterpret=True), local="dst"
    )
    assert list(plan.part.segments) == [(3 * src.stride, 5 * dst.stride, 2 * dst.stride)]
    assert plan.reinterpret
    assert "REINTERPRETED" in " ".join(plan.explain().splitlines()[1:4])
    assert Plan.from_dict(plan.to_dict()) == plan
    for alike in (src, dst):
        other = kvplan.plan(Transfer(Rows(alike, [3, 4]), Rows(alike, [5, 6])), local="dst")
        assert list(other.part.segments) == list(plan.part.segments)
        assert not other.reinterpret
        assert other != plan
        assert other.fingerprint != plan.fingerprint
        for a, b in ((plan, other), (other, plan)):
            assert "identical" not in a.diff(b)
            assert "reinterpret: " in a.diff(b)


def test_pairs_of_equal_sizes_have_different_plans() -> None:
    """The plans have only their bytes in common: rows of 512 bytes between the same blocks."""
    plans = [
        kvplan.plan(Transfer(Rows(value, [3]), Rows(value, [5])), local="dst")
        for value in (
            cache(),
            cache(data_type=BF16),
            cache((16, 2, 8, 16)),
            cache(kv_tensor_format="NHD"),
            cache(kv_tensor_format="HND"),
            cache(kv_tensor_format="opaque ND"),
            cache(kv_tensor_format="NHD", shard=Shard(heads=range(2), num_heads=4)),
            cache(kv_tensor_format="NHD", shard=Shard(heads=range(2, 4), num_heads=4)),
            cache(kv_tensor_format="NHD", shard=Shard(layers=range(2), num_layers=4)),
        )
    ]
    assert {tuple(plan.part.segments) for plan in plans} == {((1536, 2560, 512),)}
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    for i, one in enumerate(plans):
        for j, two in enumerate(plans):
            assert (one == two) is (i == j)
            assert one.diff(two).endswith("identical") is (i == j)


def test_slots_are_compared_too() -> None:
    with refused("LLM_PARAM_INVALID", "data type"):
        kvplan.plan(Transfer(Rows(cache()), Rows(cache(data_type=BF16))), local="dst")
    with refused("LLM_PARAM_INVALID", "shape of a row"):
        kvplan.plan(Transfer(Rows(cache((3, 16, 8, 16))), Rows(cache((3, 32, 4, 16)))), local="dst")
    assert kvplan.plan(
        Transfer(Rows(cache()), Rows(cache(data_type=BF16)), reinterpret=True), local="dst"
    ).reinterpret


def test_equal_caches_are_not_reinterpreted() -> None:
    plan = kvplan.plan(
        Transfer(Rows(cache(), [3]), Rows(cache(), [5]), reinterpret=True), local="dst"
    )
    assert plan == kvplan.plan(Transfer(Rows(cache(), [3]), Rows(cache(), [5])), local="dst")


@pytest.mark.parametrize(
    ("axes", "shape", "tensors", "per_layer"),
    [
        ("block token head dim", (8, 4, 2, 16), 6, 2),
        ("block kv token head dim", (8, 2, 4, 2, 16), 3, 1),
        ("kv block token head dim", (2, 8, 4, 2, 16), 3, 1),
        ("block token dim", (8, 4, 16), 3, 1),
        ("block state", (8, 16), 5, 1),
        ("block token group", (8, 4, 2), 5, 1),
        ("block layer kv token head dim", (8, 3, 2, 4, 2, 16), 1, 1),
    ],
)
def test_tensors_of_a_layer_follow_from_the_layout(
    axes: str, shape: tuple[int, ...], tensors: int, per_layer: int
) -> None:
    desc = CacheDesc(tensors, shape, FP16, kv_tensor_format=axes)
    assert (
        kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [2])), local="dst").part.tensors_per_layer
        == per_layer
    )
    if per_layer == 1:
        with refused("LLM_PARAM_INVALID", "tensor_num_per_layer=2 must be None or 1"):
            kvplan.plan(
                Transfer(
                    Rows(desc, [1]), Rows(desc, [2]), layers=KvCacheExtParam(tensor_num_per_layer=2)
                ),
                local="dst",
            )


def test_tensors_of_a_layer_follow_from_the_layers_of_a_shard() -> None:
    one = cache(kv_tensor_format="NHD", shard=Shard(layers=range(4), num_layers=4))
    assert (
        kvplan.plan(Transfer(Rows(one, [1]), Rows(one, [2])), local="dst").part.tensors_per_layer
        == 1
    )


def test_only_a_given_number_must_divide_the_tensors() -> None:
    desc = CacheDesc(5, ROWS, FP16)
    assert (
        kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [2])), local="dst").num_tensor_pairs == 5
    )
    with refused("LLM_PARAM_INVALID", "tensor_num_per_layer=3 must divide the 5"):
        kvplan.plan(
            Transfer(
                Rows(desc, [1]), Rows(desc, [2]), layers=KvCacheExtParam(tensor_num_per_layer=3)
            ),
            local="dst",
        )
    one = KvCacheExtParam(tensor_num_per_layer=1)
    assert (
        len(
            kvplan.plan(
                Transfer(Rows(desc, [1]), Rows(desc, [2]), layers=one), local="dst"
            ).part.layers
        )
        == 5
    )


@pytest.mark.parametrize(
    ("reinterpret", "ranged", "accepted"),
    [(False, False, False), (False, True, False), (True, True, False), (True, False, True)],
)
def test_a_last_layer_may_be_short_only_if_all_tensors_are_paired_as_bytes(
    reinterpret: bool, ranged: bool, accepted: bool
) -> None:
    desc = CacheDesc(5, ROWS, FP16)
    layers = range(1) if ranged else None

    def plan() -> Plan:
        given = KvCacheExtParam(layers, layers, tensor_num_per_layer=2)
        return kvplan.plan(
            Transfer(Rows(desc, [1]), Rows(desc, [2]), layers=given, reinterpret=reinterpret),
            local="dst",
        )

    if not accepted:
        with refused("LLM_PARAM_INVALID", "tensor_num_per_layer=2 must divide the 5 tensors"):
            plan()
        return
    assert [len(layer.tensors) for layer in plan().part.layers] == [2, 2, 1]


def test_layers_of_another_type_are_refused_if_rows_hold_several() -> None:
    desc = CacheDesc(1, (8, 4, 16, 4), DataType.DT_BF16, kv_tensor_format="block layer token dim")
    for wrong in (5, None):
        with pytest.raises(TypeError, match="layers="):
            kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [2]), layers=wrong), local="dst")  # type: ignore[arg-type]
