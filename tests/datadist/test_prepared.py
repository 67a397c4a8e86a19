"""Prepared transfers do what the plain calls do, and refuse what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    CacheKey,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    LLMException,
    LLMStatusCode,
)
from tests.datadist.peer import Peer
from tests.support.refusals import refused

pytestmark = pytest.mark.over_cuda

PAGED = CacheDesc(4, (8, 16), DataType.DT_INT32)
SLOTS = CacheDesc(4, (8, 16), DataType.DT_INT32)
ONE_LAYER = KvCacheExtParam(range(1, 2), range(1, 2), 2)
OFFER = """
desc = CacheDesc(4, (8, 16), DataType.DT_INT32)
paged = datadist.allocate_blocks_cache(desc, BlocksCacheKey(0, 5))
slots = datadist.allocate_cache(desc)
for cache in (paged, slots):
    for tensor, array in enumerate(datadist.arrays(cache)):
        array[:] = 100 * tensor + np.arange(8)[:, None]
result = paged.cache_id, slots.cache_id
"""


class There:
    """The peer's caches, by name."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        paged, slots = peer.run(OFFER)
        self.paged, self.slots = CacheIndex(1, paged), CacheIndex(1, slots)

    def rows(self, name: str) -> NDArray[Any]:
        """What each row of each tensor holds there: a number for each."""
        code = f"result = [datadist.arrays({name})[t][:, 0].tolist() for t in range(4)]"
        return np.array(self.peer.run(code))


@pytest.fixture
def there(peer: Peer) -> There:
    return There(peer)


def rows_of(user: LlmDataDist, cache: Cache) -> NDArray[Any]:
    return np.array([array[:, 0] for array in user.arrays(cache)])


def filled(user: LlmDataDist, cache: Cache) -> Cache:
    for tensor, array in enumerate(user.arrays(cache)):
        array[:] = 1000 + 100 * tensor + np.arange(8)[:, None]
    return cache


FIRST = np.arange(4)[:, None] * 100 + np.arange(8)


@pytest.mark.over_tcp
def test_blocks_are_pulled(user: LlmDataDist, there: There) -> None:
    cache = user.allocate_blocks_cache(PAGED)
    for src in (there.paged, BlocksCacheKey(1, 5)):
        prepared = user.prepare_pull_blocks(src, cache)
        for blocks in ([1, 6, 3], np.array([2]), (0, 5)):
            user.arrays(cache)[0][:] = 0
            prepared.run(blocks, [7, 4, 2][: len(blocks)])
            moved = rows_of(user, cache)[:, [7, 4, 2][: len(blocks)]]
            assert (moved == FIRST[:, list(blocks)]).all()
        prepared.submit([4], [0]).wait()
        assert (rows_of(user, cache)[:, 0] == FIRST[:, 4]).all()
        assert prepared.plan([1, 2], [3, 4]) == user.plan_pull_blocks(src, cache, [1, 2], [3, 4])
    layer = user.prepare_pull_blocks(there.paged, cache, ONE_LAYER)
    user.arrays(cache)[1][:] = -5
    layer.run([3], [1], timeout_ms=10_000, tag="request 7")
    assert rows_of(user, cache)[1:, 1].tolist() == [-5, 203, 303]


def test_slots_are_pulled_and_pushed(user: LlmDataDist, there: There) -> None:
    cache = user.allocate_cache(SLOTS)
    pull = user.prepare_pull_cache(there.slots, cache)
    pull.run(3, 1)
    pull.submit(5, 2).wait()
    assert (rows_of(user, cache)[:, [1, 2]] == FIRST[:, [3, 5]]).all()
    src = CacheIndex(1, there.slots.cache_id, 3)
    assert pull.plan(3, 1) == user.plan_pull_cache(src, cache, 1)
    push = user.prepare_push_cache(filled(user, cache), there.slots)
    push.run(4, 0)
    push.submit(6, 7).wait()
    assert (there.rows("slots")[:, [0, 7]] == 1000 + FIRST[:, [4, 6]]).all()
    assert push.plan(4, 3) == user.plan_push_cache(cache, src, 4)


def test_blocks_are_pushed_whole_and_by_layer(user: LlmDataDist, there: There) -> None:
    cache = filled(user, user.allocate_blocks_cache(PAGED))
    push = user.prepare_push_blocks(cache, there.paged)
    push.run([1, 2], [4, 0])
    push.submit([3], [5]).wait()
    assert (there.rows("paged")[:, [4, 0, 5]] == 1000 + FIRST[:, [1, 2, 3]]).all()
    assert push.plan([1], [2]) == user.plan_push_blocks(cache, there.paged, [1], [2])
    layers = user.prepare_push_layers(cache, BlocksCacheKey(1, 5), KvCacheExtParam(None, None, 2))
    task = layers.submit([6, 7], [1, 2])
    for layer in range(2):
        task.ready(layer)
    task.wait()
    assert (there.rows("paged")[:, [1, 2]] == 1000 + FIRST[:, [6, 7]]).all()
    planned = user.plan_push_layers(
        cache, BlocksCacheKey(1, 5), src_blocks=[6], dst_blocks=[1],
        ext_param=KvCacheExtParam(None, None, 2),
    )  # fmt: skip
    assert layers.plan([6], [1]) == planned


def test_blocks_are_copied(user: LlmDataDist) -> None:
    cache = filled(user, user.allocate_blocks_cache(PAGED))
    copy = user.prepare_copy_blocks(cache)
    copy.run({1: [4, 5], 2: [6]})
    copy.submit({3: [7]}).wait()
    assert (rows_of(user, cache)[:, 4:] == 1000 + FIRST[:, [1, 1, 2, 3]]).all()
    assert copy.plan({1: [4]}) == user.plan_copy_blocks(cache, {1: [4]})
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "both read and written"):
        copy.run({1: [2], 2: [3]})


def test_the_same_is_refused_in_the_same_words(user: LlmDataDist, there: There) -> None:
    cache = user.allocate_blocks_cache(PAGED)
    pull = user.prepare_pull_blocks(there.paged, cache)
    push = user.prepare_push_blocks(cache, there.paged)
    wrong: list[tuple[Any, Any]] = [
        ([1], [8]), ([8], [1]), ([1, 2], [3]), ([1, 2], [3, 3]), ([True], [1]), ("1", [1]),
        ([], [1]), ([1], []), ([1.0], [1]), (np.array([[1]]), [1]),
    ]  # fmt: skip
    for tables in wrong:
        assert said(pull.run, *tables) == said(user.pull_blocks, there.paged, cache, *tables)
        assert said(push.run, *tables) == said(user.push_blocks, cache, there.paged, *tables)


def said(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises((LLMException, TypeError)) as raised:
        call(*arguments)
    return str(raised.value)


def test_what_every_call_would_refuse_is_refused_at_once(user: LlmDataDist, there: There) -> None:
    cache = user.allocate_blocks_cache(PAGED)
    other = user.allocate_blocks_cache(CacheDesc(4, (8, 32), DataType.DT_INT32))
    with refused(LLMStatusCode.LLM_PARAM_INVALID):
        user.prepare_pull_blocks(there.paged, other)
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "needs a contiguous one"):
        user.prepare_pull_cache(there.paged, cache)
    with refused(LLMStatusCode.LLM_NOT_YET_LINK):
        user.prepare_push_blocks(cache, CacheIndex(9, 1))
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        user.prepare_pull_blocks(CacheIndex(1, 99), cache)
    key: Any = CacheKey(1, 7)
    for prepare in (
        lambda: user.prepare_pull_blocks(key, cache),
        lambda: user.prepare_pull_cache(key, cache),
        lambda: user.prepare_push_blocks(cache, key),
        lambda: user.prepare_push_cache(cache, key),
        lambda: user.prepare_push_layers(cache, key),
    ):
        with pytest.raises(TypeError, match="not CacheKey"):
            prepare()
