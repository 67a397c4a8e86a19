"""Official callers between caches that differ: calls succeed as officially, and warn."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from kvplan.llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LLMDataDist,
)
from kvplan.llm_datadist.conversion import desc_of
from tests.llm_datadist.contents import clear
from tests.llm_datadist.peer import Peer

Pair = tuple[Peer, LLMDataDist]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged warnings of caches that differ."""
    return [message for message in caplog.messages if "caches that differ" in message]


OFFER = """
from kvplan.llm_datadist import CacheDesc, DataType
paged = manager.allocate_blocks_cache(
    CacheDesc(%s, [4, 2, 2, 8], DataType.%s, kv_tensor_format=%r), BlocksCacheKey(1)
)
for number, array in enumerate(views(paged)):
    array[:] = number + 1
result = paged.cache_id
"""
"""Blocks of 64 bytes; all bytes of tensor t are t + 1."""


def first_bytes(arrays: list[Any], block: int) -> list[int]:
    return [int(array[block].min()) for array in arrays]


@pytest.mark.parametrize(
    ("kind", "text", "what"),
    [
        (DataType.DT_BF16, "NHD", "DT_FLOAT16"),
        (DataType.DT_FLOAT16, "HND", "block 4, head 2, token 2"),
        (DataType.DT_FLOAT16, "NZ", "DT_FLOAT16"),
    ],
    ids=["data type", "layout", "label"],
)
def test_a_mismatch_is_copied_as_bytes_with_one_warning(
    remote_pair: Pair, caplog: pytest.LogCaptureFixture, kind: DataType, text: str, what: str
) -> None:
    peer, datadist = remote_pair
    manager = datadist.cache_manager
    peer.run(OFFER % (4, "DT_FLOAT16", "ND" if text == "NZ" else "NHD"))
    mine = manager.allocate_blocks_cache(CacheDesc(4, [4, 2, 2, 8], kind, kv_tensor_format=text))
    arrays = clear(mine)
    with caplog.at_level(logging.WARNING, "kvplan"):
        manager.pull_blocks(BlocksCacheKey(1, 0), mine, [1, 2], [3, 0])
        (warning,) = warnings_of(caplog)
        assert what in warning
        manager.pull_blocks(BlocksCacheKey(1, 0), mine, [1], [2])
        manager.pull_blocks(BlocksCacheKey(1, 0), mine, [3], [1])
        manager.push_blocks(BlocksCacheKey(1, 0), mine, [1], [0])
        assert len(warnings_of(caplog)) == 1
    for block in range(4):
        assert first_bytes(arrays, block) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("number", "ours", "theirs"),
    [
        (3, None, None),  # without a layer range, two tensors a layer need not divide them
        (3, "NHD", "NHD"),
        (4, "ND", "ND"),
        (4, "LBHNC", "LBHNC"),
        (4, "NHD", None),
        (4, "LBHNC", "block first"),  # names and words that do not fit the shape
        (4, "block token head dim", "BLHNC"),
        (4, "block layer kv token", "kv block token dim"),
    ],
    ids=str,
)
def test_formats_and_odd_numbers_are_accepted_and_differences_warn_once(
    remote_pair: Pair,
    caplog: pytest.LogCaptureFixture,
    number: int,
    ours: str | None,
    theirs: str | None,
) -> None:
    peer, datadist = remote_pair
    manager = datadist.cache_manager
    peer.run(OFFER % (number, "DT_FLOAT16", theirs))
    mine = manager.allocate_blocks_cache(
        CacheDesc(number, [4, 2, 2, 8], DataType.DT_FLOAT16, kv_tensor_format=ours)
    )
    arrays = clear(mine)
    with caplog.at_level(logging.WARNING, "kvplan"):
        manager.pull_blocks(BlocksCacheKey(1, 0), mine, [1], [3])
        manager.push_blocks(BlocksCacheKey(1, 0), mine, [3], [2])
    assert first_bytes(arrays, 3) == list(range(1, number + 1))
    assert len(warnings_of(caplog)) == (ours != theirs)


def test_a_slot_and_blocks_of_it_are_not_a_mismatch(
    remote_pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    peer, datadist = remote_pair
    manager = datadist.cache_manager
    cache = peer.run(
        """
        cache = manager.allocate_cache(desc(4, 2, 64))
        fill(cache, 1)
        result = cache.cache_id
        """
    )
    mine = manager.allocate_blocks_cache(CacheDesc(4, [4, 32], DataType.DT_UINT8))
    arrays = clear(mine)
    with caplog.at_level(logging.WARNING, "kvplan"):
        manager.pull_blocks(CacheKeyByIdAndIndex(1, cache), mine, [], [3, 1])
    assert caplog.messages == []
    their_cache = peer.bytes_of("cache")
    for tensor, array in enumerate(arrays):
        assert (np.concatenate([array[3], array[1]]) == their_cache[tensor][0]).all()


@pytest.mark.parametrize("text", ["BLHNC", "block layer head token kv dim", "slot token kv x y z"])
def test_no_format_changes_what_a_row_is(text: str) -> None:
    desc = desc_of(CacheDesc(1, [4, 3, 2, 2, 2, 8], DataType.DT_FLOAT16, kv_tensor_format=text))
    assert (desc.layout, desc.batch_size, desc.stride) == (None, 4, 384)
