"""Plans that were made before: they move exactly if both caches match them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import (
    BlockLease,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    CacheKey,
    DataType,
    LlmDataDist,
    Plan,
    PlanEvent,
    Planned,
    Rows,
    Transfer,
)
from kvplan.planning.segments import Segments
from tests.datadist.peer import Peer
from tests.support.refusals import refused

INVALID = "LLM_PARAM_INVALID"
DESC = CacheDesc(4, (8, 16), DataType.DT_INT32)
KEY, SLOTS = BlocksCacheKey(1, 5), CacheIndex(1, 2, 3)
OFFER = """
cache = datadist.allocate_blocks_cache(desc, BlocksCacheKey(1, 5))
slots = datadist.allocate_cache(desc, [CacheKey(1, 70 + slot) for slot in range(8)])
for held in (cache, slots):
    datadist.write_cache(held, source)
lease = datadist.lease_blocks(cache, [6, 1, 4])
result = lease.to_bytes()
"""
SOURCE = [np.arange(128, dtype=np.int32).reshape(8, 16) + 1000 * number for number in range(4)]


@pytest.fixture(autouse=True)
def lease(peer: Peer) -> BlockLease:
    return BlockLease.from_bytes(peer.run(OFFER, desc=DESC, source=SOURCE))


@pytest.fixture
def mine(user: LlmDataDist) -> Cache:
    return user.allocate_blocks_cache(DESC)


def golden(tmp_path: Path, local: Any = "dst", desc: CacheDesc = DESC, **how: Any) -> Plan:
    """Save a plan that is made from descriptions, before any engine exists, and return its file."""
    path = tmp_path / "golden.json"
    tables = ([6, 1], [2, 3]) if local == "dst" else ([2, 3], [6, 1])
    src, dst = (Rows(desc, table) for table in tables)
    kvplan.plan(Transfer(src, dst), local=local, **how).save(path)
    plan = kvplan.load_plan(path)
    assert isinstance(plan, Plan)
    return plan


def assert_pulled(arrays: list[np.ndarray]) -> None:
    for array, source in zip(arrays, SOURCE, strict=True):
        assert (array[[2, 3]] == source[[6, 1]]).all()
        assert not array[[0, 1, 4, 5, 6, 7]].any()


@pytest.mark.over_tcp
@pytest.mark.parametrize(
    ("verb", "by"),
    [("run", "key"), ("submit", "index"), ("mapping", "lease"), ("layered", "lease")],
)
def test_a_golden_plan_is_executed(
    user: LlmDataDist,
    peer: Peer,
    mine: Cache,
    lease: BlockLease,
    tmp_path: Path,
    verb: str,
    by: str,
) -> None:
    plan = golden(tmp_path, by_layer=verb == "layered")
    src: Any = {"key": KEY, "index": CacheIndex(1, 1), "lease": lease}[by]
    planned, seen = Planned(plan, src, mine), list[PlanEvent]()
    remove = user.on_plan(seen.append)
    if verb == "run":
        user.run(planned, notify=b"arrived", timeout_ms=5000)
        assert peer.run("result = [note.data for note in datadist.notifications()]") == [b"arrived"]
    elif verb == "submit":
        user.submit(planned, tag="request").wait()
    elif verb == "mapping":
        user.run({"all": planned})
    else:
        task = user.layered(planned)
        task.ready(1)
        task.ready(0)
        task.wait()
    remove()
    assert_pulled(user.arrays(mine, copy=True))
    (event,) = seen
    assert event.plan.parts == plan.parts
    assert user.plan(planned) == plan


def test_a_plan_is_pushed_and_copied(
    user: LlmDataDist, peer: Peer, mine: Cache, tmp_path: Path
) -> None:
    user.write_cache(mine, [np.full((8, 16), number + 7, np.int32) for number in range(4)])
    user.run(Planned(golden(tmp_path, "src"), mine, KEY))
    there = peer.run("result = datadist.arrays(cache, copy=True)")
    for number, (array, source) in enumerate(zip(there, SOURCE, strict=True)):
        assert (array[[6, 1]] == number + 7).all()
        assert (array[[0, 2, 3, 4, 5, 7]] == source[[0, 2, 3, 4, 5, 7]]).all()
    other = user.allocate_blocks_cache(DESC)
    user.run(Planned(golden(tmp_path, "both"), mine, other))
    assert (user.arrays(other, copy=True)[3][[6, 1]] == 10).all()
    overlapping = kvplan.plan(Transfer(Rows(DESC, [0, 1]), Rows(replace(DESC), [1, 2])))
    with refused(INVALID, "the result would depend on the order"):
        user.run(Planned(overlapping, mine, mine))  # one cache, unknown to the plan


@pytest.mark.parametrize("src", [SLOTS, CacheKey(1, 73)], ids=["index", "key"])
def test_a_plan_of_a_slot_moves_the_named_slot(user: LlmDataDist, peer: Peer, src: Any) -> None:
    mine = user.allocate_cache(DESC)
    plans = [
        kvplan.plan(Transfer(Rows(DESC, slot=number), Rows(DESC, slot=1)), local="dst")
        for number in (3, 4)
    ]
    with refused(INVALID, r"names slot 3, but the plan moves slot 4"):
        user.run(Planned(plans[1], src, mine))
    user.run(Planned(plans[0], src, mine))
    assert (user.arrays(mine, copy=True)[2][1] == SOURCE[2][3]).all()
    if isinstance(src, CacheKey):  # the key was consumed
        with refused("LLM_KV_CACHE_NOT_EXIST"):
            user.run(Planned(plans[0], src, mine))


def test_caches_that_are_not_as_planned_are_refused_with_the_difference(
    user: LlmDataDist, mine: Cache, lease: BlockLease, tmp_path: Path
) -> None:
    wider = golden(tmp_path, desc=CacheDesc(2, (9, 16), DataType.DT_FLOAT))
    with refused(
        INVALID,
        r"src=.* is not as planned: src.data_type: DT_FLOAT -> DT_INT32; "
        r"src.shape: \(9, 16\) -> \(8, 16\); src.num_tensors: 2 -> 4; plan again",
    ):
        user.run(Planned(wider, KEY, mine))
    plan = golden(tmp_path)
    with refused(INVALID, "dst=.* is a contiguous cache; pull_blocks needs a paged one"):
        user.submit(Planned(plan, KEY, user.allocate_cache(DESC)))
    with refused(INVALID, "make a push, but the plan is a pull_blocks"):
        user.run(Planned(plan, mine, KEY))
    with refused(INVALID, "outside the tensor's"):
        beyond_it = Plan([replace(plan.part, segments=beyond(plan))])
        user.run(Planned(beyond_it, KEY, mine))
    assert not user.arrays(mine, copy=True)[0].any()
    assert user.metrics()["in_flight"] == 0


@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_plan_with_blocks_outside_of_the_lease_is_refused(
    user: LlmDataDist, peer: Peer, mine: Cache, lease: BlockLease, side: str
) -> None:
    """The lease has blocks 6, 1 and 4. The plans move a block that it has, and one it lacks."""
    tables, caches = ([1, 2], [0, 1]), (lease, mine)
    if side == "dst":
        tables, caches = tables[::-1], caches[::-1]
    local: Any = "src" if side == "dst" else "dst"
    plan = kvplan.plan(Transfer(*(Rows(DESC, table) for table in tables)), local=local)
    with refused(INVALID, rf"plan {side} blocks\[1\]=2 is not a block of lease"):
        user.run(Planned(plan, *caches))
    assert not user.arrays(mine, copy=True)[0].any()
    for array, source in zip(peer.run("result = datadist.arrays(cache)"), SOURCE, strict=True):
        assert (array == source).all()


def beyond(plan: Plan) -> Segments:
    """Return the segments of a plan, shifted out of the cache."""
    segments = plan.part.segments
    return Segments(segments.src_offsets, segments.dst_offsets + 512, segments.nbytes)


def test_a_group_plan_moves_by_its_parts(user: LlmDataDist, mine: Cache, lease: BlockLease) -> None:
    parts = {
        name: Transfer(Rows(DESC, [row]), Rows(DESC, [to]))
        for name, row, to in (("a", 6, 2), ("b", 1, 3))
    }
    plan = kvplan.plan(parts, local="dst")
    with refused(INVALID, "a mapping of names to Planned"):
        user.run(Planned(plan, KEY, mine))
    sources: dict[str, Any] = {"a": KEY, "b": lease}
    planned = {name: Planned(part, sources[name], mine) for name, part in plan.by_part().items()}
    assert user.plan(planned) == plan
    user.run(planned)
    assert_pulled(user.arrays(mine, copy=True))


def test_layers_inside_of_a_tensor_move_one_by_one_only_as_planned(
    user: LlmDataDist, peer: Peer
) -> None:
    desc = CacheDesc(1, (4, 2, 4, 8), DataType.DT_INT32, kv_tensor_format="block layer token dim")
    peer.run("datadist.allocate_blocks_cache(desc, BlocksCacheKey(1, 6))", desc=desc)
    mine = user.allocate_blocks_cache(desc)
    transfer = Transfer(Rows(desc, [1]), Rows(desc, [2]))
    plans = [kvplan.plan(transfer, local="dst", by_layer=number) for number in (False, True)]
    with refused(INVALID, "by_layer=True"):
        user.layered(Planned(plans[0], BlocksCacheKey(1, 6), mine))
    task = user.layered(Planned(plans[1], BlocksCacheKey(1, 6), mine))
    task.ready(0)
    task.ready(1)
    task.wait()
