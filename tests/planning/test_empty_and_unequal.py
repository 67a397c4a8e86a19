"""Block tables without blocks move nothing; tables that are not of one request are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvplan import (
    CacheDesc,
    CacheIndex,
    DataType,
    Placement,
    Plan,
    RemoteCache,
    execute,
    plan_copy_blocks,
    plan_gather,
    plan_groups,
    plan_pull_blocks,
    plan_push_blocks,
    plan_swap_blocks,
)
from kvplan.planning import reference
from tests.support.refusals import refused


def blocks(*shape: int, placement: Placement = Placement.DEVICE, axes: str = "NHD") -> CacheDesc:
    return CacheDesc(4, shape, DataType.DT_FLOAT16, placement, kv_tensor_format=axes)


NHD = blocks(8, 16, 2, 4)
WIDE = blocks(4, 64, 2, 4)
HND = blocks(8, 2, 16, 4, placement=Placement.HOST, axes="HND")
HOST = blocks(8, 16, 2, 4, placement=Placement.HOST)
SLOTS = blocks(3, 64, 2, 4, axes="slot token head dim")
STATES = blocks(8, 64, axes="block state")
OPAQUE = CacheDesc(4, (8, 64), DataType.DT_INT8)

EMPTY: dict[str, Callable[[], Plan]] = {
    "blocks": lambda: plan_pull_blocks(NHD, NHD, [], []),
    "no tokens": lambda: plan_pull_blocks(NHD, NHD, [], [], num_tokens=0),
    "arrays": lambda: plan_push_blocks(NHD, NHD, np.empty(0, int), np.empty(0)),
    "opaque": lambda: plan_push_blocks(OPAQUE, OPAQUE, (), ()),
    "unlike": lambda: plan_pull_blocks(NHD, HND, [], []),
    "unlike, no tokens": lambda: plan_pull_blocks(NHD, HND, [], [], num_tokens=0, src_token=16),
    "states": lambda: plan_pull_blocks(STATES, STATES, [], []),
    "slot": lambda: plan_pull_blocks(SLOTS, NHD, None, []),
    "slot, unlike": lambda: plan_pull_blocks(RemoteCache(CacheIndex(1, 1, 2), SLOTS), HND, [], []),
    "copy": lambda: plan_copy_blocks(NHD, {}),
    "copy to none": lambda: plan_copy_blocks(NHD, {1: []}),
    "swap": lambda: plan_swap_blocks(NHD, HOST, {}),
    "swap, unlike": lambda: plan_swap_blocks(NHD, HND, {}),
}


def arrays(desc: CacheDesc) -> list[np.ndarray[Any, Any]]:
    return [np.zeros(desc.shape, np.float16) for _ in range(desc.num_tensors)]


@pytest.mark.parametrize("name", EMPTY)
def test_no_blocks_are_a_plan_of_no_bytes(name: str) -> None:
    plan = EMPTY[name]()
    assert (plan.nbytes, plan.num_descriptors, plan.num_slices) == (0, 0, 0)
    again = Plan.from_dict(plan.to_dict())
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    other = plan_pull_blocks(NHD, NHD, [1], [2])
    for text in (plan.explain(), repr(plan), plan.diff(other), other.diff(plan), plan.to_svg()):
        assert text
    assert plan.to_html()


def test_a_group_may_have_nothing_to_move() -> None:
    one = plan_pull_blocks(NHD, NHD, [1], [2])
    assert plan_groups({"none": EMPTY["unlike"](), "one": one}).nbytes == one.nbytes


def test_no_blocks_are_executed() -> None:
    plan = EMPTY["unlike"]()
    source, target = arrays(NHD), arrays(HND)
    reference.execute(plan, source, target)
    execute(plan, source, target)
    assert not any(it.any() for it in target)


def test_a_gather_of_nothing_moves_nothing() -> None:
    plans = plan_gather([NHD, NHD], NHD, [[], []], [])
    assert [it.nbytes for it in plans if it is not None] == [0]


def test_what_cannot_match_is_refused_without_blocks_too() -> None:
    with refused("LLM_PARAM_INVALID", "axis dim"):
        plan_pull_blocks(NHD, blocks(8, 16, 2, 8), [], [])


@pytest.mark.parametrize(
    ("src", "dst", "src_blocks", "dst_blocks", "more", "text"),
    [
        (NHD, NHD, 8, 2, {"num_tokens": 32}, "src_blocks has 8 blocks of 16 tokens and dst_blocks "
         "has 2 blocks of 16 tokens: .* needs the first 2 of src_blocks and 2 of dst_blocks"),
        (NHD, NHD, 2, 3, {"num_tokens": 32}, "needs the first 2 of src_blocks and 2 of dst_blocks"),
        (NHD, WIDE, 2, 2, {"num_tokens": 30}, "needs the first 2 of src_blocks and 1 of dst_block"),
        (NHD, NHD, 4, 5, {"num_tokens": 9, "src_token": 16}, "src_token=16 and dst_token=0"),
        (SLOTS, NHD, 0, 5, {"num_tokens": 9}, "the src slot has 64 tokens and dst_blocks has 5"),
        (NHD, NHD, 0, 0, {"num_tokens": 3}, r"num_tokens=3 is out of range \[1, 0\]"),
        (NHD, HND, 1, 0, {}, "src_blocks hold 16 tokens"),
    ],
)  # fmt: skip
def test_tables_of_no_one_request_are_refused(
    src: CacheDesc, dst: CacheDesc, src_blocks: int, dst_blocks: int, more: Any, text: str
) -> None:
    read = None if src is SLOTS else range(src_blocks)
    with refused("LLM_PARAM_INVALID", text):
        plan_pull_blocks(src, dst, read, range(dst_blocks), **more)


@pytest.mark.parametrize(
    ("src", "dst", "src_blocks", "dst_blocks", "more"),
    [
        (NHD, NHD, 2, 2, {"num_tokens": 17}),
        (NHD, NHD, 8, 8, {"num_tokens": 32}),  # tables of the whole request, of which a part moves
        (NHD, NHD, 6, 2, {"num_tokens": 30, "src_token": 64}),
        (NHD, NHD, 2, 2, {"num_tokens": 8, "src_token": 8, "dst_token": 3}),
        (NHD, NHD, 3, 2, {"num_tokens": 8, "src_token": 20, "dst_token": 8}),
        (NHD, NHD, 2, 2, {"num_tokens": 1, "src_token": 19, "dst_token": 2}),
        (NHD, WIDE, 5, 2, {"num_tokens": 20}),
        (SLOTS, NHD, 0, 3, {"num_tokens": 20}),
    ],
)
def test_tables_of_one_request_are_taken(
    src: CacheDesc, dst: CacheDesc, src_blocks: int, dst_blocks: int, more: Any
) -> None:
    read = None if src is SLOTS else range(src_blocks)
    plan = plan_pull_blocks(src, dst, read, range(dst_blocks), **more)
    assert plan.nbytes == 4 * more["num_tokens"] * 2 * 4 * 2
