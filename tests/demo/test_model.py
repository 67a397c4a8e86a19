"""Tests of the example's model: its paged attention, and the effect of wrong blocks."""

import numpy as np
import pytest

from tests.demo.tiny_llama import BLOCK_SIZE, VOCABULARY, TinyLlama, empty_cache

IDS = np.random.default_rng(7).integers(0, VOCABULARY, 22).tolist()
SCATTERED = np.array([9, 2, 3, 11, 0, 7])


@pytest.fixture(scope="module")
def tiny() -> TinyLlama:
    return TinyLlama(seed=3)


@pytest.mark.parametrize("chunks", [[22], [16, 6], [5, 9, 8], [1] * 22], ids=str)
def test_paged_attention_equals_dense_attention(tiny: TinyLlama, chunks: list[int]) -> None:
    cache = empty_cache(12)
    start = 0
    for size in chunks:
        ids = IDS[start : start + size]
        logits = tiny.model.forward(ids, start, cache, SCATTERED)
        start += size
        np.testing.assert_allclose(logits, tiny.dense_logits(IDS[:start]), rtol=1e-3, atol=1e-4)


def test_positions_of_blocks_change_no_bit(tiny: TinyLlama) -> None:
    in_order = tiny.model.forward(IDS, 0, empty_cache(6, np.float16), np.arange(6))
    scattered = tiny.model.forward(IDS, 0, empty_cache(12, np.float16), SCATTERED)
    assert in_order.tobytes() == scattered.tobytes()


def test_a_request_writes_only_to_its_own_blocks(tiny: TinyLlama) -> None:
    cache = empty_cache(12)
    tiny.model.forward(IDS, 0, cache, SCATTERED)
    for tensor in cache.tensors:
        written = ~np.isnan(tensor).any(axis=(1, 2, 3))
        # The last block is written in part: 22 tokens fill five blocks of 4, and half of a sixth.
        assert set(np.flatnonzero(written)) == set(SCATTERED[:-1])
        assert np.isfinite(tensor[SCATTERED[-1], : 22 % BLOCK_SIZE]).all()


def test_a_moved_cache_gives_the_same_logits(tiny: TinyLlama) -> None:
    here, there = empty_cache(12, np.float16), empty_cache(20, np.float16)
    elsewhere = np.array([19, 4, 12, 13, 1, 8])
    tiny.model.forward(IDS[:-1], 0, here, SCATTERED)
    for a, b in zip(here.tensors, there.tensors, strict=True):
        b[elsewhere] = a[SCATTERED]
    stayed = tiny.model.forward(IDS[-1:], len(IDS) - 1, here, SCATTERED)
    moved = tiny.model.forward(IDS[-1:], len(IDS) - 1, there, elsewhere)
    assert stayed.tobytes() == moved.tobytes()


def test_full_blocks_may_be_read_in_any_order(tiny: TinyLlama) -> None:
    """Keys contain their positions, so the demo must break a block in another way."""
    cache = empty_cache(12)
    tiny.model.forward(IDS[:-1], 0, cache, SCATTERED)
    right = tiny.model.forward(IDS[-1:], len(IDS) - 1, cache, SCATTERED)
    shuffled = SCATTERED[[4, 2, 0, 1, 3, 5]]
    other = tiny.model.forward(IDS[-1:], len(IDS) - 1, cache, shuffled)
    np.testing.assert_allclose(other, right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("entry", range(5))
def test_any_wrong_block_changes_the_logits(tiny: TinyLlama, entry: int) -> None:
    cache = empty_cache(12)
    tiny.model.forward(IDS[:-1], 0, cache, SCATTERED)
    right = tiny.model.forward(IDS[-1:], len(IDS) - 1, cache, SCATTERED)
    broken = SCATTERED.copy()
    broken[entry] = SCATTERED[(entry + 1) % 5]
    wrong = tiny.model.forward(IDS[-1:], len(IDS) - 1, cache, broken)
    assert np.isfinite(wrong).all()
    assert np.abs(wrong - right).max() > 1e-3
