"""Transfers between caches of one model with different layouts, over every transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    CacheIndex,
    CacheKey,
    ClusterInfo,
    DataType,
    LlmDataDist,
    Plan,
    Rows,
    Shard,
    Transfer,
)
from kvplan import Cache as LocalCache
from tests.datadist.conftest import MakeEngine, link
from tests.datadist.machine import Machine, on_host_only
from tests.datadist.peer import Peer
from tests.planning.unlike import Cache, Model, expected
from tests.support.places import PEER_LISTEN
from tests.support.refusals import refused

MODEL = Model(layers=2, kv=2, heads=4, dim=8, data_type=DataType.DT_FLOAT16)
ALL = range(2)
NHD, HND = ("token", "head", "dim"), ("head", "token", "dim")
NARROW = Cache(MODEL, ("block", "kv", *NHD), 7, 16, ALL, range(2, 4))  # a shard of the heads
WIDE = Cache(MODEL, ("block", *HND), 5, 32, ALL, range(4))
CROSSED = Cache(MODEL, ("block", "layer", "kv", *NHD), 7, 16, ALL, range(4))
BLOCKS = {16: [5, 0, 3, 6], 32: [4, 1]}  # of the request, by tokens of a block
PAIRS = {
    "shard to whole": (NARROW, WIDE),
    "whole to shard": (WIDE, NARROW),
    "layers together to apart": (CROSSED, WIDE),
    "layers apart to together": (WIDE, CROSSED),
}

Tensors = list[NDArray[np.uint16]]

OFFER = """
cache = offer(datadist, desc, tensors, registered)
result = cache.cache_id
"""
DEFINE_OFFER = """
def offer(datadist, desc, tensors, registered, key=None):
    if registered:
        arrays = [zeros(desc.shape, np.float16) for _ in tensors]
        cache = datadist.register_blocks_cache(desc, addresses(arrays), key)
        seen.append(arrays)
    else:
        cache = datadist.allocate_blocks_cache(desc, key)
        arrays = datadist.arrays(cache)
        seen.append(arrays)
    for array, tensor in zip(arrays, tensors):
        array[...] = tensor.view(np.float16)
    return cache
seen = []
"""


class Ends:
    """The ends of a transfer, each with an allocated or a registered cache."""

    def __init__(self, machine: Machine, user: LlmDataDist, peer: Peer) -> None:
        self.machine, self.user, self.peer = machine, user, peer
        peer.run(DEFINE_OFFER)

    def here(self, cache: Cache, tensors: Tensors, registered: bool) -> tuple[LocalCache, Any]:
        if registered:
            arrays = [self.machine.zeros(item.shape, np.float16) for item in tensors]
            addresses = self.machine.addresses(arrays)
            local = self.user.register_blocks_cache(cache.desc, addresses)
        else:
            local = self.user.allocate_blocks_cache(cache.desc)
            arrays = self.user.arrays(local)
        for array, tensor in zip(arrays, tensors, strict=True):
            array[...] = tensor.view(np.float16)
        return local, arrays

    def there(self, cache: Cache, tensors: Tensors, registered: bool) -> CacheIndex:
        values = {"desc": cache.desc, "tensors": tensors, "registered": registered}
        return CacheIndex(1, self.peer.run(OFFER, **values))


@pytest.fixture
def ends(machine: Machine, user: LlmDataDist, peer: Peer) -> Ends:
    return Ends(machine, user, peer)


def bits(arrays: list[NDArray[Any]]) -> Tensors:
    return [np.array(array).view(np.uint16) for array in arrays]


def assert_same(arrays: list[NDArray[Any]], wanted: Tensors) -> None:
    for number, (array, tensor) in enumerate(zip(bits(arrays), wanted, strict=True)):
        np.testing.assert_array_equal(array, tensor, f"tensor {number}")


def pull(user: LlmDataDist, *arguments: Any, **tokens: int) -> None:
    user.pull_blocks(*arguments, **tokens)


def push(user: LlmDataDist, *arguments: Any, **tokens: int) -> None:
    user.push_blocks(*arguments, **tokens)


def push_by_layer(
    user: LlmDataDist, src: LocalCache, dst: CacheIndex, *blocks: Any, **tokens: int
) -> None:
    transfer = Transfer(
        Rows(src, blocks[0], first_token=tokens["src_token"]),
        Rows(dst, blocks[1], first_token=tokens["dst_token"]),
        num_tokens=tokens["num_tokens"],
    )
    task = user.layered(transfer)
    assert list(task.layers) == [*ALL]
    for layer in task.layers:
        task.ready(layer)
    task.wait(30_000)


MOVES = (pull, push, push_by_layer)


def assert_moves(ends: Ends, src: Cache, dst: Cache, move: Callable[..., None]) -> None:
    """Check that two blocks of 32 tokens arrive as four of 16, of which the last is partial."""
    tokens = {"src_token": 3, "dst_token": 5, "num_tokens": 56}
    blocks = BLOCKS[src.tokens], BLOCKS[dst.tokens]
    for registered in (False, True):
        sources, targets = src.tensors(1), dst.tensors(2)
        wanted = expected(src, dst, sources, targets, *blocks, **tokens)
        if move is pull:
            there = ends.there(src, sources, registered)
            here, arrays = ends.here(dst, targets, registered)
            move(ends.user, there, here, *blocks, **tokens)
        else:
            there = ends.there(dst, targets, registered)
            here, _ = ends.here(src, sources, registered)
            move(ends.user, here, there, *blocks, **tokens)
            arrays = ends.peer.run("result = [np.array(tensor) for tensor in seen[-1]]")
        assert_same(arrays, wanted)


@pytest.mark.over_tcp
@pytest.mark.parametrize(("src", "dst"), PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("move", MOVES)
def test_unlike_caches_are_moved_by_axes(
    ends: Ends, src: Cache, dst: Cache, move: Callable[..., None]
) -> None:
    assert_moves(ends, src, dst, move)


def test_tokens_are_skipped_in_block_tables_only(ends: Ends) -> None:
    flat = CacheDesc(4, (1, 16, 8), DataType.DT_FLOAT16, shard=Shard(num_layers=2))
    flat = replace(flat, kv_tensor_format="slot token dim")
    here = ends.user.allocate_cache(flat)
    there = CacheIndex(1, ends.peer.run("result = datadist.allocate_cache(d).cache_id", d=flat))
    with refused(
        "LLM_PARAM_INVALID", "src.first_token=3 and dst.first_token=0 skip tokens of block tables"
    ):
        ends.user.layered(Transfer(Rows(here, first_token=3), Rows(there)))
    task = ends.user.layered(Transfer(Rows(here), Rows(there), num_tokens=5))
    for layer in task.layers:
        task.ready(layer)
    task.wait(30_000)
    assert task.plan.nbytes == 4 * 5 * 8 * 2


@pytest.mark.over_tcp
def test_parts_are_gathered_from_two_engines(ends: Ends, make_engine: MakeEngine) -> None:
    """Heads 0 and 1 come from one engine, heads 2 and 3 from another."""
    third = make_engine(3, listen=True)
    link(ends.user, third)
    low = replace(NARROW, heads=range(2))
    tables, mine = [[5, 0, 3, 6], [1, 2, 6, 4]], [4, 1]
    tokens = {"src_token": 3, "dst_token": 5, "num_tokens": 56}
    theirs, targets = [low.tensors(1), NARROW.tensors(2)], WIDE.tensors(3)
    wanted = expected(low, WIDE, theirs[0], targets, tables[0], mine, **tokens)
    wanted = expected(NARROW, WIDE, theirs[1], wanted, tables[1], mine, **tokens)
    here, arrays = ends.here(WIDE, targets, registered=False)
    other = third.allocate_blocks_cache(NARROW.desc, BlocksCacheKey(3, 9))
    for array, tensor in zip(third.arrays(other), theirs[1], strict=True):
        array[...] = tensor.view(np.float16)
    sources = [ends.there(low, theirs[0], registered=False), BlocksCacheKey(3, 9)]

    def gather(keys: list[Any]) -> Transfer:
        rows = [Rows(key, table, first_token=3) for key, table in zip(keys, tables, strict=False)]
        return Transfer(rows, Rows(here, mine, first_token=5), num_tokens=56)

    with refused("LLM_PARAM_INVALID", r"no source has layers 0\.\.1, heads 2\.\.3"):
        ends.user.run(gather(sources[:1]))
    with refused("LLM_NOT_YET_LINK", "cluster 8"):
        ends.user.run(gather([sources[0], CacheIndex(8, 1)]))
    with pytest.raises(TypeError, match=r"src\[1\]=CacheKey"):
        ends.user.run(gather([sources[0], CacheKey(3, 9)]))
    assert_same(arrays, targets)
    assert [item.in_flight for item in ends.user.links()] == [0, 0]

    ends.user.run(gather(sources))
    assert_same(arrays, wanted)
    plan = ends.user.plan(gather(sources))
    assert isinstance(plan, Plan)
    pulled = [item.bytes_pulled for item in ends.user.links()]
    assert pulled == [item.nbytes for item in plan.by_part().values()]
    assert [item.bytes_pushed for item in ends.user.links()] == [0, 0]


@pytest.mark.usefixtures("ucx")
def test_unlike_caches_are_moved_over_ucx(machine: Machine, make_engine: MakeEngine) -> None:
    on_host_only(machine, "UCX without RDMA has shared memory of the host")
    options = {"kvplan.transport": "ucx", "kvplan.ucx_settings": '{"UCX_TLS": "shm"}'}
    peer = Peer("host")  # idle peers were started while UCX was hidden
    try:
        peer.address = peer.run(
            "datadist.finalize(); datadist.initialize(options); result = datadist.listen_address",
            options=options | {"llm.ListenIpInfo": PEER_LISTEN},
        )
        user = make_engine(2, **options)
        user.link_clusters([ClusterInfo(1, peer.address)], timeout_ms=20_000).raise_for_status()
        assert [item.transport for item in user.links()] == ["ucx"]
        for pair in PAIRS.values():
            for move in MOVES:
                assert_moves(Ends(machine, user, peer), *pair, move)
        peer.end()
    finally:
        peer.close()
