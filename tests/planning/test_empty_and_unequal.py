"""Block tables without blocks move nothing; tables of different requests are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import (
    CacheDesc,
    CacheIndex,
    DataType,
    Placement,
    Plan,
    RemoteCache,
    Rows,
    Transfer,
    execute,
)
from kvplan.planning import reference
from kvplan.planning.blocks import RequestBlocks
from kvplan.planning.gather import plan_gather
from tests.support.plans import joined
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
    "blocks": lambda: kvplan.plan(Transfer(Rows(NHD, []), Rows(NHD, [])), local="dst"),
    "no tokens": lambda: kvplan.plan(
        Transfer(Rows(NHD, []), Rows(NHD, []), num_tokens=0), local="dst"
    ),
    "no tokens of a lease": lambda: kvplan.plan(
        Transfer(Rows(NHD, RequestBlocks([3, 4])), Rows(NHD, []), num_tokens=0), local="dst"
    ),
    "arrays": lambda: kvplan.plan(
        Transfer(Rows(NHD, np.empty(0, int)), Rows(NHD, np.empty(0))), local="src"
    ),
    "opaque": lambda: kvplan.plan(Transfer(Rows(OPAQUE, ()), Rows(OPAQUE, ())), local="src"),
    "unlike": lambda: kvplan.plan(Transfer(Rows(NHD, []), Rows(HND, [])), local="dst"),
    "unlike, no tokens": lambda: kvplan.plan(
        Transfer(Rows(NHD, [], first_token=16), Rows(HND, []), num_tokens=0), local="dst"
    ),
    "states": lambda: kvplan.plan(Transfer(Rows(STATES, []), Rows(STATES, [])), local="dst"),
    "slot": lambda: kvplan.plan(Transfer(Rows(SLOTS), Rows(NHD, [])), local="dst"),
    "slot, unlike": lambda: kvplan.plan(
        Transfer(Rows(RemoteCache(CacheIndex(1, 1, 2), SLOTS), []), Rows(HND, [])), local="dst"
    ),
    "copy": lambda: kvplan.plan(Transfer(Rows(NHD, []), Rows(NHD, []))),
    "copy to none": lambda: kvplan.plan(Transfer(Rows(NHD, []), Rows(NHD, []))),
    "swap": lambda: kvplan.plan(Transfer(Rows(NHD, []), Rows(HOST, []))),
    "swap, unlike": lambda: kvplan.plan(Transfer(Rows(NHD, []), Rows(HND, []))),
}


def arrays(desc: CacheDesc) -> list[np.ndarray[Any, Any]]:
    return [np.zeros(desc.shape, np.float16) for _ in range(desc.num_tensors)]


@pytest.mark.parametrize("name", EMPTY)
def test_tables_without_blocks_are_a_plan_of_no_bytes(name: str) -> None:
    plan = EMPTY[name]()
    assert (plan.nbytes, plan.num_descriptors, plan.part.num_slices) == (0, 0, 0)
    assert plan.kind == ("C2B" if name.startswith("slot") else "B2B")
    again = Plan.from_dict(plan.to_dict())
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    other = kvplan.plan(Transfer(Rows(NHD, [1]), Rows(NHD, [2])), local="dst")
    for text in (plan.explain(), repr(plan), plan.diff(other), other.diff(plan), plan.to_svg()):
        assert text
    assert plan.to_html()


def test_a_group_may_have_nothing_to_move() -> None:
    one = kvplan.plan(Transfer(Rows(NHD, [1]), Rows(NHD, [2])), local="dst")
    assert joined({"none": EMPTY["unlike"](), "one": one}).nbytes == one.nbytes


def test_a_plan_without_blocks_is_executed() -> None:
    plan = EMPTY["unlike"]()
    source, target = arrays(NHD), arrays(HND)
    reference.execute(plan, source, target)
    execute(plan, source, target)
    assert not any(array.any() for array in target)


def test_a_gather_of_nothing_moves_nothing() -> None:
    plans = plan_gather(Transfer([Rows(NHD, []), Rows(NHD, [])], Rows(NHD, [])), [NHD, NHD], NHD)
    assert [plan.nbytes for plan in plans if plan is not None] == [0]


def test_incompatible_caches_are_refused_even_without_blocks() -> None:
    with refused("LLM_PARAM_INVALID", "axis dim"):
        kvplan.plan(Transfer(Rows(NHD, []), Rows(blocks(8, 16, 2, 8), [])), local="dst")


def planned(
    src: CacheDesc,
    dst: CacheDesc,
    src_blocks: int,
    dst_blocks: int,
    *,
    num_tokens: int | None = None,
    src_token: int = 0,
    dst_token: int = 0,
) -> Plan:
    """Plan a pull of the first blocks of a cache, or of its slot 0, into the first of another."""
    read = None if src is SLOTS else range(src_blocks)
    return kvplan.plan(
        Transfer(
            Rows(src, read, first_token=src_token),
            Rows(dst, range(dst_blocks), first_token=dst_token),
            num_tokens=num_tokens,
        ),
        local="dst",
    )


@pytest.mark.parametrize(
    ("src", "dst", "src_blocks", "dst_blocks", "more", "text"),
    [
        (NHD, NHD, 8, 2, {"num_tokens": 32}, "src.blocks has 8 blocks of 16 tokens and dst.blocks "
         "has 2 blocks of 16 tokens: .* needs the first 2 of src.blocks and 2 of dst.blocks"),
        (NHD, NHD, 2, 3, {"num_tokens": 32}, "needs the first 2 of src.blocks and 2 of dst.blocks"),
        (NHD, WIDE, 2, 2, {"num_tokens": 30}, "needs the first 2 of src.blocks and 1 of dst"),
        (NHD, NHD, 4, 5, {"num_tokens": 9, "src_token": 16}, "src.first_token=16 and dst"),
        (SLOTS, NHD, 0, 5, {"num_tokens": 9}, "the src slot has 64 tokens and dst.blocks has 5"),
        (NHD, NHD, 0, 0, {"num_tokens": 3}, r"num_tokens=3 is out of range \[1, 0\]"),
        (NHD, HND, 1, 0, {}, "src.blocks hold 16 tokens"),
    ],
)  # fmt: skip
def test_tables_of_different_requests_are_refused(
    src: CacheDesc, dst: CacheDesc, src_blocks: int, dst_blocks: int, more: Any, text: str
) -> None:
    with refused("LLM_PARAM_INVALID", text):
        planned(src, dst, src_blocks, dst_blocks, **more)


@pytest.mark.parametrize(
    ("src", "dst", "src_blocks", "dst_blocks", "more"),
    [
        (NHD, NHD, 2, 2, {"num_tokens": 17}),
        (NHD, NHD, 8, 8, {"num_tokens": 32}),  # tables of the whole request, part of which moves
        (NHD, NHD, 6, 2, {"num_tokens": 30, "src_token": 64}),
        (NHD, NHD, 2, 2, {"num_tokens": 8, "src_token": 8, "dst_token": 3}),
        (NHD, NHD, 3, 2, {"num_tokens": 8, "src_token": 20, "dst_token": 8}),
        (NHD, NHD, 2, 2, {"num_tokens": 1, "src_token": 19, "dst_token": 2}),
        (NHD, WIDE, 5, 2, {"num_tokens": 20}),
        (SLOTS, NHD, 0, 3, {"num_tokens": 20}),
    ],
)
def test_tables_of_one_request_are_accepted(
    src: CacheDesc, dst: CacheDesc, src_blocks: int, dst_blocks: int, more: Any
) -> None:
    plan = planned(src, dst, src_blocks, dst_blocks, **more)
    assert plan.nbytes == 4 * more["num_tokens"] * 2 * 4 * 2
