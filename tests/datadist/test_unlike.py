"""Caches of one model that lie differently at the two ends: what arrives, over every transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvplan import BlocksCacheKey, CacheIndex, DataType, LlmDataDist, LLMStatusCode
from kvplan import Cache as LocalCache
from tests.datadist.conftest import MakeEngine, link
from tests.datadist.machine import Machine
from tests.datadist.peer import Peer
from tests.planning.unlike import Cache, Model, expected
from tests.support.refusals import refused

MODEL = Model(layers=2, kv=2, heads=4, dim=8, data_type=DataType.DT_FLOAT16)
ALL = range(2)
NHD, HND = ("token", "head", "dim"), ("head", "token", "dim")
NARROW = Cache(MODEL, ("block", "kv", *NHD), 7, 16, ALL, range(2, 4))  # a shard of the heads
WIDE = Cache(MODEL, ("block", *HND), 5, 32, ALL, range(4))
CROSSED = Cache(MODEL, ("block", "layer", "kv", *NHD), 7, 16, ALL, range(4))
BLOCKS = {16: [5, 0, 3, 6], 32: [4, 1]}  # of the request, by tokens of a block
PAIRS = pytest.mark.parametrize(
    ("src", "dst"),
    [(NARROW, WIDE), (WIDE, NARROW), (CROSSED, WIDE), (WIDE, CROSSED)],
    ids=[
        "shard to whole",
        "whole to shard",
        "layers together to apart",
        "layers apart to together",
    ],
)

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
    """Both ends of a transfer; each has a cache that was allocated, or that was registered."""

    def __init__(self, machine: Machine, user: LlmDataDist, peer: Peer) -> None:
        self.machine, self.user, self.peer = machine, user, peer
        peer.run(DEFINE_OFFER)

    def here(self, cache: Cache, tensors: Tensors, registered: bool) -> tuple[LocalCache, Any]:
        if registered:
            arrays = [self.machine.zeros(it.shape, np.float16) for it in tensors]
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
    return [np.array(it).view(np.uint16) for it in arrays]


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
    task = user.push_layers(src, dst, src_blocks=blocks[0], dst_blocks=blocks[1], **tokens)
    assert list(task.layers) == [*ALL]
    for layer in task.layers:
        task.ready(layer)
    task.wait(30_000)


@pytest.mark.over_tcp
@PAIRS
@pytest.mark.parametrize("move", [pull, push, push_by_layer])
def test_unlike_caches(ends: Ends, src: Cache, dst: Cache, move: Callable[..., None]) -> None:
    """Two blocks of 32 are four of 16, the last of them in part."""
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
            arrays = ends.peer.run("result = [np.array(it) for it in seen[-1]]")
        assert_same(arrays, wanted)
