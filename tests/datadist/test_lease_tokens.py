"""A lease has the number of the request's tokens in its blocks: later tokens do not move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvplan import (
    BlockLease,
    Cache,
    CacheDesc,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    Rows,
    Transfer,
)
from tests.datadist.peer import Peer
from tests.support.refusals import refused

OFFER = """
desc = CacheDesc(2, (4, 16, 2, 8), DataType.DT_INT32, kv_tensor_format="block token head dim")
cache = datadist.allocate_blocks_cache(desc)
arrays = datadist.arrays(cache)
for array in arrays:
    array[:] = 7
lease = datadist.lease_blocks(cache, [2, 0], tag="cmpl-3", tokens=tokens)
result = lease.to_bytes()
"""
DESC = CacheDesc(2, (4, 16, 2, 8), DataType.DT_INT32, kv_tensor_format="block token head dim")
NUM_TOKENS = 20
LIMIT = r"more than the 20 tokens of lease \d+ of cmpl-3"


def pull(
    lease: BlockLease, to: Cache, src_token: int = 0, dst_token: int = 0, **tokens: Any
) -> Transfer:
    return Transfer(Rows(lease, None, None, src_token), Rows(to, [1, 3], None, dst_token), **tokens)


def gather(
    lease: BlockLease, to: Cache, src_token: int = 0, dst_token: int = 0, **tokens: Any
) -> Transfer:
    rows = Rows(lease, None, None, src_token)
    return Transfer([rows], Rows(to, [1, 3], None, dst_token), **tokens)


def push(
    of: Cache, lease: BlockLease, src_token: int = 0, dst_token: int = 0, **tokens: Any
) -> Transfer:
    return Transfer(Rows(of, [1, 3], None, src_token), Rows(lease, None, None, dst_token), **tokens)


Pull = Callable[[LlmDataDist, BlockLease, Cache, dict[str, Any]], None]
PULLS: dict[str, Pull] = {
    "call": lambda user, value, to, more: user.pull_blocks(value, to, None, [1, 3], **more),
    "task": lambda user, value, to, more: user.submit(pull(value, to, **more)).wait(),
    "gather": lambda user, value, to, more: user.run(gather(value, to, **more)),
    "groups": lambda user, value, to, more: user.run({"all": pull(value, to, **more)}),
    "gathered groups": lambda user, value, to, more: user.run({"all": gather(value, to, **more)}),
}


def push_layers(user: LlmDataDist, lease: BlockLease, src: Cache, more: dict[str, Any]) -> None:
    param = KvCacheExtParam(tensor_num_per_layer=2)
    task = user.layered(push(src, lease, layers=param, **more))
    for layer in task.layers:
        task.ready(layer)
    task.wait()


PUSHES: dict[str, Pull] = {
    "call": lambda user, value, of, more: user.push_blocks(of, value, [1, 3], **more),
    "groups": lambda user, value, of, more: user.run({"all": push(of, value, **more)}),
    "layers": push_layers,
}


def leased(peer: Peer, tokens: int | None = NUM_TOKENS) -> BlockLease:
    return BlockLease.from_bytes(peer.run(OFFER, tokens=tokens))


def moved(arrays: list[Any], *blocks: int) -> list[int]:
    """Return how many tokens of each block are 7, and check that all later ones are 0."""
    counts = []
    for block in blocks:
        found = {int((array[block] == 7).all((1, 2)).sum()) for array in arrays}
        (count,) = found
        assert all((array[block, :count] == 7).all() for array in arrays)
        assert not any(array[block, count:].any() for array in arrays)
        counts.append(count)
    return counts


@pytest.mark.parametrize("how", PULLS)
def test_a_pull_moves_the_tokens_of_the_request(user: LlmDataDist, peer: Peer, how: str) -> None:
    lease, cache = leased(peer), user.allocate_blocks_cache(DESC)
    arrays = user.arrays(cache)
    PULLS[how](user, lease, cache, {})
    assert moved(arrays, 0, 1, 2, 3) == [0, 16, 0, 4]
    for more, there in (
        ({"num_tokens": 17}, [16, 1]),
        ({"src_token": 3}, [16, 1]),
        ({"src_token": 3, "num_tokens": 17}, [16, 1]),
        ({"src_token": 19, "dst_token": 2, "num_tokens": 1}, None),
    ):
        for array in arrays:
            array[:] = 0
        PULLS[how](user, lease, cache, more)
        if there is None:
            assert all((array[1, 2] == 7).all() and array.sum() == 7 * 16 for array in arrays)
        else:
            assert moved(arrays, 1, 3) == there
    for array in arrays:
        array[:] = 0
    for wrong in ({"num_tokens": 21}, {"src_token": 20}, {"src_token": 4, "num_tokens": 17}):
        with refused("LLM_PARAM_INVALID", LIMIT):
            PULLS[how](user, lease, cache, wrong)
    assert not any(array.any() for array in arrays)


@pytest.mark.parametrize("how", PUSHES)
def test_a_push_fills_the_tokens_of_the_request(user: LlmDataDist, peer: Peer, how: str) -> None:
    lease, cache = leased(peer), user.allocate_blocks_cache(DESC)
    for array in user.arrays(cache):
        array[:] = 5
    PUSHES[how](user, lease, cache, {})
    there = np.array(peer.run("result = [array[:, :, 0, 0].tolist() for array in arrays]"))
    assert (there[:, 2] == 5).all()
    assert (there[:, 0] == [5] * 4 + [7] * 12).all()
    assert (there[:, [1, 3]] == 7).all()
    for wrong in ({"num_tokens": 21}, {"dst_token": 20}, {"dst_token": 4, "num_tokens": 17}):
        with refused("LLM_PARAM_INVALID", LIMIT):
            PUSHES[how](user, lease, cache, wrong)


def test_named_blocks_are_moved_whole(user: LlmDataDist, peer: Peer) -> None:
    lease, cache = leased(peer), user.allocate_blocks_cache(DESC)
    user.pull_blocks(lease, cache, [0], [1])
    assert moved(user.arrays(cache), 0, 1, 2, 3) == [0, 16, 0, 0]


def test_the_error_names_the_side_with_too_few_blocks(user: LlmDataDist, peer: Peer) -> None:
    lease, cache = leased(peer), user.allocate_blocks_cache(DESC)
    few = r"num_tokens=20 is out of range \[1, 16\], the room in the"
    with refused("LLM_PARAM_INVALID", f"{few} dst rows"):
        user.pull_blocks(lease, cache, None, [1])
    with refused("LLM_PARAM_INVALID", f"{few} src rows"):
        user.push_blocks(cache, lease, [1], None)


def test_sources_of_a_gather_have_one_request(user: LlmDataDist, peer: Peer) -> None:
    one, other = leased(peer), leased(peer, 19)
    cache = user.allocate_blocks_cache(DESC)
    with refused("LLM_PARAM_INVALID", r"leases are of requests of \[19, 20\] tokens"):
        user.run(Transfer([Rows(one), Rows(other)], Rows(cache, [1, 3])))


@pytest.mark.parametrize("tokens", [0, -1, 33, 2**64])
def test_more_tokens_than_the_blocks_hold_are_refused(user: LlmDataDist, tokens: int) -> None:
    cache = user.allocate_blocks_cache(DESC)
    with refused("LLM_PARAM_INVALID", rf"tokens={tokens} .*32"):
        user.lease_blocks(cache, [2, 0], tokens=tokens)
    assert user.leases() == []


def test_tokens_need_a_layout(user: LlmDataDist) -> None:
    cache = user.allocate_blocks_cache(CacheDesc(2, (4, 64), DataType.DT_INT8))
    with refused("LLM_PARAM_INVALID", "tokens=3 needs a cache whose layout has an axis of tokens"):
        user.lease_blocks(cache, [2, 0], tokens=3)


def test_a_serialized_lease_has_its_tokens(user: LlmDataDist) -> None:
    cache = user.allocate_blocks_cache(DESC)
    lease = user.lease_blocks(cache, [2, 0], tokens=17)
    assert BlockLease.from_bytes(lease.to_bytes()) == lease
    assert lease.tokens == 17
    with pytest.raises(TypeError, match="tokens="):
        user.lease_blocks(cache, [2, 0], tokens="3")  # type: ignore[arg-type]
