"""Requests whose tokens lie on several ranks (decode context parallelism), over every transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvplan import BlockLease, DataType, Interleaved, LlmDataDist, Plan, Rows, Transfer
from tests.datadist.conftest import MakeEngine, link
from tests.datadist.peer import Peer
from tests.planning.test_token_shards import moved, places
from tests.planning.unlike import Cache, Model
from tests.support.refusals import refused

MODEL = Model(layers=2, kv=2, heads=4, dim=8, data_type=DataType.DT_FLOAT16)
NHD, HND = ("block", "kv", "token", "head", "dim"), ("block", "head", "token", "dim")
RANKS = [Cache(MODEL, NHD, 7, 16, range(2), range(4), Interleaved(rank, 2, 8)) for rank in range(2)]
WHOLE = Cache(MODEL, HND, 5, 32, range(2), range(4))
TABLES = [[5, 0], [1, 4]]  # of 59 tokens 32 and 27
MINE = [4, 1]
NUM_TOKENS = 59
OFFER = """
cache = datadist.allocate_blocks_cache(desc)
for array, tensor in zip(datadist.arrays(cache), tensors):
    array[...] = tensor.view(np.float16)
result = datadist.lease_blocks(cache, table, tokens=tokens).to_bytes()
"""


def offered(peer: Peer, rank: int, tensors: list[Any]) -> BlockLease:
    values = {"desc": RANKS[rank].desc, "tensors": tensors, "table": TABLES[rank]}
    return BlockLease.from_bytes(peer.run(OFFER, tokens=NUM_TOKENS, **values))


def fill(user: LlmDataDist, cache: Cache, tensors: list[Any]) -> tuple[Any, list[Any]]:
    made = user.allocate_blocks_cache(cache.desc)
    arrays = user.arrays(made)
    for array, tensor in zip(arrays, tensors, strict=True):
        array[...] = tensor.view(np.float16)
    return made, arrays


def assert_same(arrays: list[NDArray[Any]], wanted: list[Any]) -> None:
    for array, tensor in zip(arrays, wanted, strict=True):
        np.testing.assert_array_equal(np.array(array).view(np.uint16), tensor)


@pytest.mark.over_tcp
def test_a_request_is_gathered_from_its_ranks(
    user: LlmDataDist, peer: Peer, make_engine: MakeEngine
) -> None:
    """Rank 0 is an engine in this process, rank 1 in another. Both lease their blocks."""
    first = make_engine(3, listen=True)
    link(user, first)
    theirs, targets = [rank.tensors(seed) for seed, rank in enumerate(RANKS)], WHOLE.tensors(3)
    wanted = targets
    there = places(WHOLE, MINE, 0, NUM_TOKENS)
    for cache, tensors, table in zip(RANKS, theirs, TABLES, strict=True):
        wanted = moved(cache, WHOLE, tensors, wanted, places(cache, table, 0, NUM_TOKENS), there)
    made, _ = fill(first, RANKS[0], theirs[0])
    with refused("LLM_PARAM_INVALID", r"tokens=81 must be in \[1, 64\]"):
        first.lease_blocks(made, TABLES[0], tokens=81)
    leases = [
        first.lease_blocks(made, TABLES[0], tokens=NUM_TOKENS), offered(peer, 1, theirs[1])
    ]  # fmt: skip
    here, arrays = fill(user, WHOLE, targets)
    transfer = Transfer([Rows(lease) for lease in leases], Rows(here, MINE))
    missing = Transfer([Rows(leases[1])], Rows(here, MINE))
    with refused("LLM_PARAM_INVALID", r"no source has tokens 0\.\.7, 16\.\.23, 32\.\.39, "):
        user.run(missing)
    assert_same(arrays, targets)

    plan = user.plan(transfer)
    assert isinstance(plan, Plan)
    user.run(transfer)
    assert_same(arrays, wanted)
    assert [item.bytes_pulled for item in user.links()] == [
        plan.by_part()[name].nbytes for name in ("source 1", "source 0")
    ]
    for array, tensor in zip(arrays, targets, strict=True):
        array[...] = tensor.view(np.float16)
    task = user.layered(transfer)
    for layer in range(2):
        task.ready(layer)
    task.wait(30_000)
    assert_same(arrays, wanted)


@pytest.mark.over_tcp
@pytest.mark.parametrize("num_tokens", [7, 40])
def test_a_rank_moves_only_its_own_tokens(user: LlmDataDist, peer: Peer, num_tokens: int) -> None:
    """Pulls and pushes of one pair of caches leave tokens of other ranks unchanged."""
    theirs, mine = RANKS[1].tensors(1), WHOLE.tensors(2)
    lease = offered(peer, 1, theirs)
    here, arrays = fill(user, WHOLE, mine)
    sides = places(RANKS[1], TABLES[1], 3, num_tokens), places(WHOLE, MINE, 5, num_tokens)
    wanted = moved(RANKS[1], WHOLE, theirs, mine, *sides)
    rows = Rows(lease, first_token=3), Rows(here, MINE, first_token=5)
    user.run(Transfer(*rows, num_tokens=num_tokens))
    assert_same(arrays, wanted)

    back = WHOLE.tensors(5)
    for array, tensor in zip(arrays, back, strict=True):
        array[...] = tensor.view(np.float16)
    transfer = Transfer(rows[1], rows[0], num_tokens=num_tokens)
    plan = user.plan(transfer)
    assert isinstance(plan, Plan)
    assert plan.nbytes == len(sides[0]) * 2 * 2 * 4 * 8 * 2
    user.submit(transfer).wait()
    wanted = moved(WHOLE, RANKS[1], back, theirs, sides[1], sides[0])
    assert_same(peer.run("result = [np.array(array) for array in datadist.arrays(cache)]"), wanted)
