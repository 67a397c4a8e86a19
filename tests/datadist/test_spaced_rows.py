"""Blocks of layers that share pages, moved between processes without touching other bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvplan import (
    BlockLease,
    BlocksCacheKey,
    CacheDesc,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    Rows,
    Transfer,
)
from tests.datadist.machine import Machine
from tests.datadist.pages import moved, pages_of, register
from tests.datadist.peer import Peer
from tests.support.refusals import refused

SRC, DST, NUM_TOKENS = [5, 0, 2], [1, 7, 4], 10
OFFER = """
from tests.datadist.pages import pages_of, register
pages = pages_of(7)
caches = register(datadist, pages, 1)
result = [
    datadist.lease_blocks(cache, blocks, tokens=tokens).to_bytes() for cache in caches
]
"""


@pytest.fixture
def offered(machine: Machine, peer: Peer, user: LlmDataDist) -> list[BlockLease]:
    """Leases of both groups, from an engine of another process."""
    if machine.name == "ascend":
        pytest.skip("HCCL over HCCS reaches memory of devices only, and these pages are the host's")
    made = peer.run(OFFER, blocks=SRC, tokens=NUM_TOKENS)
    return [BlockLease.from_bytes(item) for item in made]


@pytest.mark.over_tcp
def test_groups_that_share_pages_are_moved(
    user: LlmDataDist, peer: Peer, offered: list[BlockLease]
) -> None:
    """Their registrations overlap, so each is checked, whichever bytes move."""
    pages = pages_of(8)
    here = register(user, pages)
    transfers = {
        name: Transfer(Rows(theirs), Rows(ours, DST), num_tokens=NUM_TOKENS)
        for name, theirs, ours in zip(("wide", "narrow"), offered, here, strict=True)
    }
    wanted = moved(pages_of(7), pages, SRC, DST, NUM_TOKENS)
    user.run(transfers, verify=True)
    np.testing.assert_array_equal(pages, wanted)

    pages[...] = pages_of(8)
    layered = msgspec.structs.replace(
        transfers["wide"], layers=KvCacheExtParam(tensor_num_per_layer=1)
    )
    task = user.layered(layered)
    for layer in range(3):
        task.ready(layer)
    task.wait(30_000)
    user.run(transfers["narrow"])
    np.testing.assert_array_equal(pages, wanted)

    # Back to other blocks.
    back = moved(pages, pages_of(7), DST, [3, 6, 1], 12)
    pushes = {
        str(number): Transfer(Rows(ours, DST), Rows(BlocksCacheKey(1, number), [3, 6, 1]))
        for number, ours in enumerate(here)
    }
    user.run(pushes)
    np.testing.assert_array_equal(peer.run("result = pages"), back)


def test_groups_move_between_pages_and_separate_tensors(
    user: LlmDataDist, offered: list[BlockLease]
) -> None:
    """The destination's blocks are adjacent, and have another number of tokens."""
    dense = user.allocate_blocks_cache(
        CacheDesc(3, (6, 2, 2, 8), DataType.DT_UINT16, kv_tensor_format="block token head dim")
    )
    user.run(Transfer(Rows(offered[0]), Rows(dense, [5, 0, 4, 1, 2]), num_tokens=NUM_TOKENS))
    source = pages_of(7)[:, : 3 * 64].reshape(8, 3, 4, 2, 8)
    for layer, array in enumerate(user.arrays(dense)):
        found = array[[5, 0, 4, 1, 2]].reshape(10, 2, 8)
        np.testing.assert_array_equal(found, source[SRC, layer].reshape(12, 2, 8)[:NUM_TOKENS])


def test_spaced_rows_are_copied_within_one_engine(engine: LlmDataDist) -> None:
    pages = pages_of(8)
    (wide, narrow) = register(engine, pages)
    wanted = moved(pages.copy(), pages, SRC, DST, 12)
    for cache in (wide, narrow):
        engine.copy_blocks(cache, dict(zip(SRC, DST, strict=True)))
    np.testing.assert_array_equal(pages, wanted)


def test_spaced_rows_of_any_memory_are_moved(pair: tuple[LlmDataDist, LlmDataDist]) -> None:
    """Engines read and write such caches that they allocate, on the host or on the device."""
    owner, user = pair
    desc = CacheDesc(2, (6, 3, 5), DataType.DT_INT16, row_stride=50)
    values = np.arange(2 * 6 * 15, dtype=np.int16).reshape(2, 6, 3, 5)
    theirs = owner.allocate_blocks_cache(desc, BlocksCacheKey(1))
    ours = user.allocate_blocks_cache(desc)
    owner.write_cache(theirs, [*values])
    user.write_cache(ours, [*np.zeros_like(values)])
    user.run(Transfer(Rows(BlocksCacheKey(1), [4, 5]), Rows(ours, [0, 3])))
    wanted = np.zeros_like(values)
    wanted[:, [0, 3]] = values[:, [4, 5]]
    for array, tensor in zip(user.arrays(ours, copy=True), wanted, strict=True):
        np.testing.assert_array_equal(array, tensor)


def test_the_registration_matches_the_description(engine: LlmDataDist) -> None:
    pages = pages_of(8)
    tensors: Any = [pages[:, :64].reshape(8, 4, 2, 8)]
    right = CacheDesc.from_tensors(tensors, "block token head dim")
    dense = replace(right, row_stride=None)
    with refused("LLM_PARAM_INVALID", "rows lie 470 bytes apart, which CacheDesc.from_tensors"):
        engine.register_blocks_cache(dense, tensors)
    with refused("LLM_PARAM_INVALID", "of rows 470 bytes apart; its rows lie 128 bytes apart"):
        engine.register_blocks_cache(right, [np.zeros((8, 4, 2, 8), np.uint16)])
    with refused("LLM_PARAM_INVALID", r"tensors\[1\] .* shares memory with tensors\[0\]"):
        both = replace(right, num_tensors=2)
        engine.register_blocks_cache(both, [tensors[0], pages[:, 63:127].reshape(8, 4, 2, 8)])
