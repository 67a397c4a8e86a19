"""Every refusal has its exception and code, and names the argument, its value and its range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    CacheKey,
    CacheKeyByIdAndIndex,
    Coalesce,
    DataType,
    KvCacheExtParam,
    LLMException,
    LLMStatusCode,
    Placement,
    RemoteCache,
    Rows,
    Transfer,
)
from kvplan.planning.side import Side
from tests.support.refusals import refused

SLOTS = CacheDesc(4, (3, 16), DataType.DT_INT8)
"""4 tensors of 3 slots of 16 bytes: 2 layers with 2 tensors each."""
BLOCKS = CacheDesc(4, (8, 4), DataType.DT_INT8)
"""4 tensors of 8 blocks of 4 bytes."""
HOST = CacheDesc(4, (5, 4), DataType.DT_INT8, Placement.HOST)
ONE, THREE, SIX = (CacheDesc(n, (8, 4), DataType.DT_INT8) for n in (1, 3, 6))

HUGE = 2**70


def slots(
    local: Any, src_slot: Any = 0, dst_slot: Any = 0, at: Any = 0, to: Any = 0, **more: Any
) -> object:
    src, dst = Rows(SLOTS, slot=src_slot, offset=at), Rows(SLOTS, slot=dst_slot, offset=to)
    return kvplan.plan(Transfer(src, dst, **more), local=local)


def pull_blocks(src_blocks: Any, dst_blocks: Any, **more: Any) -> object:
    transfer = Transfer(Rows(BLOCKS, src_blocks), Rows(BLOCKS, dst_blocks), **more)
    return kvplan.plan(transfer, local="dst")


def slot_to_blocks(dst_blocks: Any, slot: Any = None) -> object:
    return kvplan.plan(Transfer(Rows(SLOTS, slot=slot), Rows(BLOCKS, dst_blocks)), local="dst")


def copy_blocks(src_blocks: Any, dst_blocks: Any, src: Any = BLOCKS, dst: Any = BLOCKS) -> object:
    return kvplan.plan(Transfer(Rows(src, src_blocks), Rows(dst, dst_blocks)), local="both")


def layers(src: Any, dst: Any = None, per_layer: Any = 2, desc: CacheDesc = BLOCKS) -> object:
    ext_param = KvCacheExtParam(src, dst, per_layer)
    return kvplan.plan(Transfer(Rows(desc, [0]), Rows(desc, [1]), layers=ext_param), local="dst")


def remote(key: Any, desc: CacheDesc) -> RemoteCache:
    return RemoteCache(key, desc)


OWN = Cache(BLOCKS, 3)
INVALID: list[tuple[Callable[[], object], list[str]]] = [
    # Slots. In remote mode the reference does not check the source slot, and copies bytes behind
    # it.
    (lambda: slots("dst", src_slot=3), ["src.slot=3", "[0, 3)"]),
    (lambda: slots("dst", src_slot=-1), ["src.slot=-1", "[0, 3)"]),
    (lambda: slots("dst", src_slot=HUGE), [f"src.slot={HUGE}", "[0, 3)"]),
    (lambda: slots("dst", dst_slot=3), ["dst.slot=3", "[0, 3)"]),
    (lambda: slots("src", src_slot=3), ["src.slot=3", "[0, 3)"]),
    (lambda: slots("src", dst_slot=-5), ["dst.slot=-5", "[0, 3)"]),
    (lambda: slots("both", src_slot=3), ["src.slot=3", "[0, 3)"]),
    (lambda: slots("both", dst_slot=3), ["dst.slot=3", "[0, 3)"]),
    (lambda: slot_to_blocks([0], slot=3), ["src.slot=3", "[0, 3)"]),
    (
        lambda: kvplan.plan(Transfer(Rows(BLOCKS, [0], slot=1), Rows(BLOCKS, [1])), local="dst"),
        ["src.slot=1", "0"],
    ),
    (
        lambda: kvplan.plan(Transfer(Rows(BLOCKS, [0]), Rows(BLOCKS, [1], slot=1)), local="dst"),
        ["dst.slot=1", "0"],
    ),
    # Sizes and offsets.
    (lambda: slots("dst", nbytes=0), ["nbytes=0: 0 bytes", "[1, 16]"]),
    (lambda: slots("both", nbytes=-2), ["nbytes=-2: -2 bytes", "[1, 16]"]),
    (lambda: slots("dst", nbytes=17), ["nbytes=17", "src.offset=0", "[1, 16]", "row of 16 bytes"]),
    (lambda: slots("dst", nbytes=HUGE), [f"nbytes={HUGE}", "[1, 16]"]),
    (lambda: slots("dst", nbytes=8, at=9), ["nbytes=8", "src.offset=9", "[1, 7]"]),
    (lambda: slots("src", nbytes=8, to=9), ["nbytes=8", "dst.offset=9", "[1, 7]"]),
    (lambda: slots("dst", at=1), ["16 bytes", "src.offset=1", "[1, 15]"]),
    (lambda: slots("src", to=1), ["16 bytes", "dst.offset=1", "[1, 15]"]),
    (lambda: slots("dst", at=16), ["src.offset=16", "[0, 16)"]),
    (lambda: slots("dst", to=-1), ["dst.offset=-1", "[0, 16)"]),
    (lambda: slots("both", at=-1, to=-1), ["src.offset=-1", "[0, 16)"]),
    (lambda: slots("both", at=16, to=16), ["src.offset=16", "[0, 16)"]),
    (lambda: slots("both", at=10, to=10, nbytes=7), ["nbytes=7", "src.offset=10", "[1, 6]"]),
    (
        lambda: kvplan.plan(Transfer(Rows(SLOTS), Rows(BLOCKS), reinterpret=True)),
        ["16 bytes", "[1, 4]", "dst row"],
    ),
    # Block tables.
    (lambda: pull_blocks([0, 8], [1, 2]), ["src.blocks[1]=8", "[0, 8)"]),
    (lambda: pull_blocks([0, -1], [1, 2]), ["src.blocks[1]=-1", "[0, 8)"]),
    (lambda: pull_blocks([0, 1], [1, 99]), ["dst.blocks[1]=99", "[0, 8)"]),
    (lambda: pull_blocks([0, HUGE], [1, 2]), [f"src.blocks[1]={HUGE}", "[0, 8)"]),
    (lambda: pull_blocks([2**63, -1], [1, 2]), [f"src.blocks[0]={2**63}", "[0, 8)"]),
    (lambda: pull_blocks([-HUGE], [1]), [f"src.blocks[0]={-HUGE}", "[0, 8)"]),
    (lambda: pull_blocks([0, 1], [5, 5]), ["dst.blocks[1]=5", "dst.blocks[0]", "once"]),
    (lambda: pull_blocks([0, 1], [1]), ["src.blocks has 2", "dst.blocks 1", "equal length"]),
    (lambda: pull_blocks([0], []), ["src.blocks has 1 block", "dst.blocks 0"]),
    (lambda: pull_blocks([0], np.empty(0, int)), ["src.blocks has 1 block", "dst.blocks 0"]),
    (
        lambda: kvplan.plan(
            Transfer(Rows(SLOTS, [0]), Rows(BLOCKS, [1]), reinterpret=True), local="dst"
        ),
        ["src block of 16 bytes", "dst block of 4 bytes", "equal"],
    ),
    # A slot of 16 bytes fills four blocks of 4 bytes.
    (lambda: slot_to_blocks(range(5)), ["dst.blocks has 5 blocks of 4 bytes", "at most 4"]),
    (lambda: slot_to_blocks([0, 8]), ["dst.blocks[1]=8", "[0, 8)"]),
    (lambda: slot_to_blocks([3, 2, 3]), ["dst.blocks[2]=3", "dst.blocks[0]"]),
    # Copies and swaps of blocks.
    (lambda: copy_blocks([0], [8]), ["dst.blocks[0]=8", "[0, 8)"]),
    (lambda: copy_blocks([8], [0]), ["src.blocks[0]=8", "[0, 8)"]),
    (lambda: copy_blocks([0, 2], [1, 1]), ["dst.blocks[1]=1", "once"]),
    (lambda: copy_blocks([0, 0], [1, 1]), ["dst.blocks[1]=1", "once"]),
    (lambda: copy_blocks([1, 2], [2, 1], OWN, OWN), ["block 1", "order"]),
    (
        lambda: copy_blocks([0, 1], [1, 2], Cache(BLOCKS, 3), Cache(BLOCKS, 3)),
        ["block 1", "order"],
    ),
    (
        lambda: copy_blocks(
            [0, 1],
            [1, 2],
            Cache(BLOCKS, tensor_addrs=(8, 16, 24, 32)),
            Cache(BLOCKS, tensor_addrs=(8, 16, 24, 32)),
        ),
        ["block 1", "order"],
    ),
    (lambda: copy_blocks([5], [0], HOST), ["src.blocks[0]=5", "[0, 5)"]),
    (lambda: copy_blocks([4], [8], HOST), ["dst.blocks[0]=8", "[0, 8)"]),
    (lambda: copy_blocks([0, 2], [1, 1], HOST), ["dst.blocks[1]=1", "once"]),
    (
        lambda: kvplan.plan(Transfer(Rows(HOST, [0]), Rows(ONE, [0]))),
        ["src num_tensors=4", "dst num_tensors=1", "equal"],
    ),
    (
        lambda: kvplan.plan(Transfer(Rows(HOST, [0]), Rows(SLOTS, [0]))),
        ["shape of a row", "DT_INT8 (5, 4)", "DT_INT8 (3, 16)", "reinterpret=True"],
    ),
    (
        lambda: kvplan.plan(Transfer(Rows(HOST, [0]), Rows(SLOTS, [0]), reinterpret=True)),
        ["src block of 4", "dst block of 16"],
    ),
    # Layers. A source layer beyond the cache crashes the reference.
    (lambda: layers(range(1, 3), range(2)), ["src_layer_range=range(1, 3)", "[0, 2)"]),
    (lambda: layers(range(2), range(1, 3)), ["dst_layer_range=range(1, 3)", "[0, 2)"]),
    (lambda: layers((1, 2), (0, 1)), ["src_layer_range=range(1, 3)", "[0, 2)"]),
    (lambda: layers(range(-1, 1)), ["src_layer_range=range(-1, 1)", "[0, 2)"]),
    (lambda: layers((-1, 0)), ["src_layer_range=range(-1, 1)", "[0, 2)"]),
    (lambda: layers((-2, -2)), ["src_layer_range=range(-2, -1)", "[0, 2)"]),
    (lambda: layers((1, 0)), ["src_layer_range=range(1, 1)", "empty", "[0, 2)"]),
    (lambda: layers((0, -1)), ["src_layer_range=range(0, 0)", "empty", "[0, 2)"]),
    (lambda: layers(range(1, 1)), ["src_layer_range=range(1, 1)", "empty", "[0, 2)"]),
    (lambda: layers(range(HUGE)), [f"src_layer_range=range(0, {HUGE})", "[0, 2)"]),
    (lambda: layers((0, HUGE)), ["src_layer_range=", "[0, 2)"]),
    (lambda: layers(range(0, 2, 2)), ["src_layer_range=range(0, 2, 2)", "step 2", "must be 1"]),
    (lambda: layers(range(1, -1, -1)), ["step -1", "must be 1"]),
    (
        lambda: layers(range(1), range(2)),
        ["src_layer_range=range(0, 1)", "dst_layer_range=range(0, 2)", "equal length"],
    ),
    (
        lambda: layers(range(1, 2)),
        ["src_layer_range=range(1, 2)", "dst_layer_range=range(0, 2)", "equal length"],
    ),
    (lambda: layers(None, None, 0), ["tensor_num_per_layer=0", "[1, 4]"]),
    (lambda: layers(None, None, -1), ["tensor_num_per_layer=-1", "[1, 4]"]),
    (lambda: layers(None, None, 5), ["tensor_num_per_layer=5", "[1, 4]"]),
    (lambda: layers(None, None, 3, ONE), ["tensor_num_per_layer=3", "[1, 1]"]),
    (lambda: layers(range(1), range(1), 3), ["tensor_num_per_layer=3", "divide", "4 tensors"]),
    (lambda: layers(range(1), range(1), 2, ONE), ["tensor_num_per_layer=2", "[1, 1]", "src cache"]),
    (lambda: layers((0, 0), (0, 0), 2, THREE), ["tensor_num_per_layer=2", "divide", "3 tensors"]),
    (
        lambda: kvplan.plan(
            Transfer(
                Rows(BLOCKS, [0]), Rows(THREE, [1]), layers=KvCacheExtParam(range(1), range(1), 2)
            ),
            local="dst",
        ),
        ["tensor_num_per_layer=2", "divide", "3 tensors of the dst cache"],
    ),
    (
        lambda: kvplan.plan(Transfer(Rows(BLOCKS, [0]), Rows(THREE, [1])), local="dst"),
        ["src num_tensors=4", "dst num_tensors=3", "equal"],
    ),
    (
        lambda: layers(range(1), range(1), None, THREE),
        ["tensor_num_per_layer=2 (the default)", "divide", "3 tensors of the src cache"],
    ),
    (
        lambda: kvplan.plan(
            Transfer(Rows(ONE, [0]), Rows(BLOCKS, [1]), layers=KvCacheExtParam(range(1), range(1))),
            local="dst",
        ),
        ["tensor_num_per_layer=2", "[1, 1]", "src cache"],
    ),
    (
        lambda: kvplan.plan(Transfer(Rows(BLOCKS, [0]), Rows(SIX, [1])), local="dst"),
        ["src num_tensors=4", "dst num_tensors=6", "equal"],
    ),
    (
        lambda: kvplan.plan(
            Transfer(
                Rows(CacheDesc(512, (2, 4), DataType.DT_INT8), [0]),
                Rows(CacheDesc(512, (2, 4), DataType.DT_INT8), [1]),
                layers=KvCacheExtParam(tensor_num_per_layer=256),
            ),
            local="dst",
        ),
        ["tensor_num_per_layer=256", "[1, 255]"],
    ),
    # Fields of the key of a remote cache.
    (
        lambda: kvplan.plan(
            Transfer(Rows(remote(BlocksCacheKey(1), BLOCKS), []), Rows(BLOCKS, [0])), local="dst"
        ),
        ["src=BlocksCacheKey(cluster_id=1, model_id=0)", "src.blocks must name"],
    ),
    (
        lambda: kvplan.plan(
            Transfer(Rows(remote(BlocksCacheKey(1), SLOTS)), Rows(SLOTS)), local="dst"
        ),
        ["src=BlocksCacheKey(cluster_id=1, model_id=0)", "paged"],
    ),
    (
        lambda: kvplan.plan(
            Transfer(Rows(SLOTS), Rows(remote(BlocksCacheKey(1), SLOTS))), local="src"
        ),
        ["dst=BlocksCacheKey(cluster_id=1, model_id=0)", "paged"],
    ),
    (
        lambda: kvplan.plan(
            Transfer(Rows(remote(CacheKey(1, 7), BLOCKS), [0]), Rows(BLOCKS, [0])), local="dst"
        ),
        ["src=CacheKey(cluster_id=1, req_id=7", "slot"],
    ),
    (
        lambda: kvplan.plan(
            Transfer(Rows(BLOCKS, [0]), Rows(remote(CacheIndex(1, 7, 3), BLOCKS), [0])), local="src"
        ),
        ["dst=CacheKeyByIdAndIndex(cluster_id=1, cache_id=7, batch_index=3)", "batch_index 0"],
    ),
    (
        lambda: kvplan.plan(
            Transfer(Rows(remote(CacheIndex(1, 7, 2), SLOTS), slot=1), Rows(SLOTS)), local="dst"
        ),
        ["src.slot=1", "None or 2", "batch_index=2"],
    ),
    (
        lambda: kvplan.plan(
            Transfer(Rows(remote(CacheIndex(1, 7, 3), SLOTS)), Rows(SLOTS)), local="dst"
        ),
        ["src.slot=3", "[0, 3)"],
    ),
]


@pytest.mark.parametrize(("call", "parts"), INVALID)
def test_an_invalid_value_is_refused(call: Callable[[], object], parts: list[str]) -> None:
    with refused(LLMStatusCode.LLM_PARAM_INVALID) as raised:
        call()
    for part in parts:
        assert part in f" {raised.value}"


TYPE_ERRORS: list[tuple[Callable[[], object], str]] = [
    (lambda: kvplan.plan(Transfer(Rows("x"), Rows(SLOTS)), local="dst"), "src='x'"),  # type: ignore[arg-type]
    (lambda: kvplan.plan(Transfer(Rows(SLOTS), Rows(None)), local="dst"), "dst=None"),  # type: ignore[arg-type]
    (lambda: kvplan.plan(Transfer(Rows((4, 3)), Rows(SLOTS)), local="dst"), "src=(4, 3)"),  # type: ignore[arg-type]
    (lambda: slots("dst", src_slot="1"), "src.slot='1'"),
    (lambda: slots("dst", src_slot=True), "src.slot=True"),
    (lambda: slots("dst", src_slot=1.0), "src.slot=1.0"),
    (lambda: slots("dst", dst_slot=[1]), "dst.slot=[1]"),
    (lambda: slots("both", dst_slot=1.5), "dst.slot=1.5"),
    (
        lambda: kvplan.plan(Transfer(Rows(BLOCKS, [0], slot=False), Rows(BLOCKS, [1]))),
        "src.slot=False",
    ),
    (
        lambda: kvplan.plan(Transfer(Rows(BLOCKS, [0]), Rows(BLOCKS, [1], slot="0"))),
        "dst.slot='0'",
    ),
    (lambda: slots("dst", nbytes=True), "nbytes=True"),
    (lambda: slots("dst", nbytes=1.0), "nbytes=1.0"),
    (lambda: slots("dst", at=None), "src.offset=None"),
    (lambda: slots("both", at="0", to="0"), "src.offset='0'"),
    (lambda: slots("dst", coalesce="sorted"), "coalesce='sorted'"),
    (lambda: slots("dst", coalesce=1), "coalesce=1"),
    (lambda: slots("dst", layers=None), "layers=None"),
    (lambda: slots("dst", layers={"src_layer_range": (0, 0)}), "layers={"),
    (lambda: slots("dst", layers=(range(1), range(1), 2)), "layers=("),
    (lambda: layers(1), "src_layer_range=1"),
    (lambda: layers("01"), "src_layer_range='01'"),
    (lambda: layers((1,)), "src_layer_range=(1,)"),
    (lambda: layers((0, 1, 1)), "src_layer_range=(0, 1, 1)"),
    (lambda: layers((0, 1.0)), "src_layer_range[1]=1.0"),
    (lambda: layers((-1.0, -1.0)), "src_layer_range[0]=-1.0"),
    (lambda: layers((False, True)), "src_layer_range[0]=False"),
    (lambda: layers(slice(0, 1)), "src_layer_range=slice"),
    (lambda: layers(None, np.array([0, 0])), "dst_layer_range=array"),
    (lambda: layers(None, None, "2"), "tensor_num_per_layer='2'"),
    (lambda: layers(None, None, 2.0), "tensor_num_per_layer=2.0"),
    (lambda: layers(None, None, True), "tensor_num_per_layer=True"),
    (lambda: copy_blocks(5, [1]), "src.blocks must be a sequence"),
    (lambda: copy_blocks([0], 1), "dst.blocks must be a sequence"),
    (lambda: copy_blocks([0], {1}), "dst.blocks must be a sequence"),
    (lambda: copy_blocks([0], "1"), "dst.blocks must be a sequence"),
    (lambda: copy_blocks([0], [1.5]), "dst.blocks must hold integers"),
    (lambda: copy_blocks(["0"], [1]), "src.blocks must hold integers"),
    (lambda: copy_blocks([True], [2]), "src.blocks must hold int, not bool"),
    (lambda: copy_blocks([0], [True]), "dst.blocks must hold int, not bool"),
    (lambda: copy_blocks([0], [[1]]), "dst.blocks"),
    (lambda: copy_blocks([0], [None]), "dst.blocks"),
    (lambda: slots("dst").for_layers((0, 1)), "layers=(0, 1)"),  # type: ignore[attr-defined]
    (lambda: slots("dst").origin("0"), "descriptor='0'"),  # type: ignore[attr-defined]
    (lambda: slots("dst").diff("0"), "other='0'"),  # type: ignore[attr-defined]
    (lambda: remote("key", BLOCKS), "key='key'"),
    (lambda: remote(BlocksCacheKey(1), None), "cache_desc=None"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "part"), TYPE_ERRORS)
def test_a_wrong_type_is_refused(call: Callable[[], object], part: str) -> None:
    with pytest.raises(TypeError) as raised:
        call()
    assert part in f" {raised.value}"


@pytest.mark.parametrize("side", ["src", "dst"])
def test_tokens_of_a_side_without_a_layout_are_refused(side: str) -> None:
    named = CacheDesc(4, (8, 4), DataType.DT_INT8, kv_tensor_format="block token")
    caches = {"src": named, "dst": named} | {side: BLOCKS}
    rows = (Rows(cache, [1]) for cache in caches.values())
    with refused(LLMStatusCode.LLM_PARAM_INVALID, f"^{side} has no layout.* give its CacheDesc"):
        kvplan.plan(Transfer(*rows, num_tokens=3), local="dst")


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("reinterpret", [False, True])
def test_rows_whose_values_lie_elsewhere_are_not_copied_as_bytes(
    side: str, reinterpret: bool
) -> None:
    """The keys of a block are as large as a row of the other side, whose content is unknown."""
    apart = CacheDesc(4, (2, 8, 4), DataType.DT_INT8, kv_tensor_format="kv block token")
    other = BLOCKS if reinterpret else Side(4, 8, 4, True, Placement.DEVICE)
    caches: dict[str, Any] = {"src": other, "dst": other, side: apart}
    rows = (Rows(cache, [1]) for cache in caches.values())
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "(src|dst) has no layout; tokens and unlike"):
        kvplan.plan(Transfer(*rows, reinterpret=reinterpret), local="dst")


@pytest.mark.parametrize("index", [-1, 4, HUGE])
def test_a_descriptor_out_of_range_is_refused(index: int) -> None:
    with pytest.raises(LLMException, match=r"descriptor=.* \[0, 4\)"):
        kvplan.plan(Transfer(Rows(SLOTS), Rows(SLOTS)), local="dst").origin(index)


@pytest.mark.parametrize(
    "part", [range(3), range(-1, 1), range(2, 3), range(0), range(0, 2, 2), range(HUGE)]
)
def test_for_layers_refuses_layers_outside_of_the_plan(part: range) -> None:
    with refused(LLMStatusCode.LLM_PARAM_INVALID, r"layers=range\(.*range\(0, 2\)"):
        kvplan.plan(Transfer(Rows(SLOTS), Rows(SLOTS)), local="dst").for_layers(part)


def test_a_long_value_does_not_fill_the_message() -> None:
    with pytest.raises(TypeError) as raised:
        slots("dst", nbytes=list(range(100_000)))
    assert len(str(raised.value)) < 300


def test_block_tables_distinguish_kinds_for_every_type_of_key() -> None:
    """The C++ interface addresses paged caches by CacheIndex, too."""
    plan = kvplan.plan(
        Transfer(Rows(remote(CacheIndex(1, 7), BLOCKS), [0]), Rows(BLOCKS, [1])), local="dst"
    )
    assert plan.kind == "B2B"
    assert CacheIndex is CacheKeyByIdAndIndex
    plan = kvplan.plan(
        Transfer(Rows(remote(CacheIndex(1, 7, 2), SLOTS)), Rows(BLOCKS, [1])), local="dst"
    )
    assert plan.part.rows(0)[0] == (2, 2)
    assert (
        kvplan.plan(Transfer(Rows(SLOTS), Rows(SLOTS), coalesce=Coalesce.NONE), local="dst").kind
        == "C2C"
    )


def test_equal_descriptions_are_different_caches() -> None:
    """A block may be read in one cache and written in another cache with an equal description."""
    plan = kvplan.plan(Transfer(Rows(BLOCKS, [1, 2]), Rows(BLOCKS, [2, 1])))
    assert plan.nbytes == 2 * BLOCKS.num_tensors * BLOCKS.stride
