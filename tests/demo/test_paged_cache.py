"""Tests of the example's paged cache and its block pool."""

import numpy as np
import pytest

from examples.disaggregated.paged_cache import BlockPool, blocks_for
from tests.demo.tiny_llama import empty_cache


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (476, 30)]
)
def test_the_number_of_blocks_is_rounded_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_a_pool_never_hands_out_a_block_twice() -> None:
    pool = BlockPool(40)
    pool.serve_others(seed=1)
    first, second = pool.allocate(15), pool.allocate(25)
    assert sorted([*first, *second]) == list(range(40))
    with pytest.raises(MemoryError, match="count=1 blocks are wanted, 0 are free"):
        pool.allocate(1)
    pool.release(first)
    assert set(pool.allocate(15)) == set(first)


def test_blocks_are_scattered_after_serving_others() -> None:
    pool = BlockPool(200)
    pool.serve_others(seed=1)
    steps = np.diff(pool.allocate(200))
    # Some blocks are adjacent and others are not, so one copy cannot move them all.
    assert 20 < (steps == 1).sum() < 180


def test_different_seeds_scatter_differently() -> None:
    tables = []
    for seed in (1, 2):
        pool = BlockPool(60)
        pool.serve_others(seed)
        tables.append(pool.allocate(30).tolist())
    assert tables[0] != tables[1]


def test_written_rows_are_gathered_in_order() -> None:
    cache, table = empty_cache(8), np.array([6, 1, 5])
    rows = np.random.default_rng(0).normal(size=(10, *cache.tensors[0].shape[2:]))
    rows = rows.astype(np.float32)
    cache.write(3, table, 0, rows[:3])
    cache.write(3, table, 3, rows[3:])
    for length in (1, 4, 9, 10):
        np.testing.assert_array_equal(cache.gather(3, table, length), rows[:length])
    np.testing.assert_array_equal(cache.tensors[3][1, 1], rows[5])
    assert np.isnan(cache.tensors[2]).all()
