"""Unit tests of a scheduler's block tables, with plans: no engine, no peer, no GPU, no cache.

    pytest test_block_tables.py

A wrong block table raises no error: it shows only in the generated text. Here a small scheduler
has requests in a pool of blocks, and decode fetches the tokens that it has not in its prefix cache.
The tests plan that transfer, execute the plan on arrays, and look where each token went. kvplan's
pytest plugin, which pytest loads by itself, brings the fixtures and the budget.
"""

from collections.abc import Callable

import pytest

import kvplan
from kvplan import CacheDesc, Plan, Rows, Transfer
from kvplan.testing import BlockTables, Executed

BLOCK_TOKENS = 16


class Pool:
    """The scheduler under test: gives blocks to requests, and takes them back."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))

    def allocate(self, num_tokens: int) -> list[int]:
        """Return the block table of a new request."""
        count = -(-num_tokens // BLOCK_TOKENS)
        blocks, self._free = self._free[:count], self._free[count:]
        if len(blocks) < count:
            raise MemoryError(f"{num_tokens} tokens need {count} blocks")
        return blocks

    def free(self, blocks: list[int]) -> None:
        """End a request: its last blocks are used again first."""
        self._free = blocks[::-1] + self._free


def plan_fetch(
    desc: CacheDesc, theirs: list[int], mine: list[int], num_tokens: int, num_cached: int
) -> Plan:
    """Plan what decode pulls: the tokens of the prompt that are not in its prefix cache."""
    fetch = Transfer(
        Rows(desc, theirs, first_token=num_cached),
        Rows(desc, mine, first_token=num_cached),
        num_tokens=num_tokens - num_cached,
    )
    return kvplan.plan(fetch, local="dst")


def check_tokens(
    moved: Executed, theirs: list[int], mine: list[int], num_tokens: int, num_cached: int
) -> None:
    """Check that each token is in its place, and nothing else was written (dst began as zeros)."""
    for src, dst in zip(moved.src, moved.dst, strict=True):
        for token in range(num_cached, num_tokens):
            block, at = divmod(token, BLOCK_TOKENS)
            assert (dst[mine[block], at] == src[theirs[block], at]).all(), f"token {token}"
        assert dst.any(axis=(2, 3)).sum() == num_tokens - num_cached


@pytest.mark.kvplan(max_descriptors=100)
def test_a_request_after_others_have_gone(
    kvplan_desc: Callable[..., CacheDesc], kvplan_reference: Callable[..., Executed]
) -> None:
    desc = kvplan_desc("NHD", blocks=64, tokens=BLOCK_TOKENS, layers=2)
    prefill, decode = Pool(64), Pool(64)
    for pool, lengths in ((prefill, [70, 40, 100]), (decode, [50, 120, 30])):
        others = [pool.allocate(length) for length in lengths]
        for blocks in others[::2]:
            pool.free(blocks)
    theirs, mine = prefill.allocate(150), decode.allocate(150)
    plan = plan_fetch(desc, theirs, mine, num_tokens=150, num_cached=32)
    check_tokens(kvplan_reference(plan), theirs, mine, num_tokens=150, num_cached=32)


@pytest.mark.parametrize("fragmentation", [0, 0.3, 1])
def test_any_request(
    fragmentation: float,
    kvplan_desc: Callable[..., CacheDesc],
    kvplan_block_tables: BlockTables,
    kvplan_reference: Callable[..., Executed],
) -> None:
    """Random tables, the same in each run; pytest prints them where a test fails."""
    desc = kvplan_desc("NHD", blocks=64, tokens=BLOCK_TOKENS, layers=2)
    theirs = kvplan_block_tables(desc, 12, fragmentation=fragmentation)
    mine = kvplan_block_tables(desc, 12, fragmentation=fragmentation)
    plan = plan_fetch(desc, theirs, mine, num_tokens=180, num_cached=48)
    check_tokens(kvplan_reference(plan), theirs, mine, num_tokens=180, num_cached=48)


def test_a_push_moves_the_same_bytes(kvplan_desc: Callable[..., CacheDesc]) -> None:
    desc = kvplan_desc("NHD", blocks=64, tokens=BLOCK_TOKENS, layers=2)
    pull = Transfer(Rows(desc, [4, 5, 9]), Rows(desc, [7, 8, 2]))
    push = Transfer(Rows(desc, [9, 4, 5]), Rows(desc, [2, 7, 8]))
    kvplan.plan(pull, local="dst").assert_equivalent(kvplan.plan(push, local="src"))


def test_a_wrong_table_is_seen(kvplan_desc: Callable[..., CacheDesc]) -> None:
    """Show what a failure says: which block, and how many bytes."""
    desc = kvplan_desc("NHD", blocks=64, tokens=BLOCK_TOKENS, layers=2)
    theirs = Rows(desc, [4, 5, 9])
    right = kvplan.plan(Transfer(theirs, Rows(desc, [7, 8, 2])), local="dst")
    wrong = kvplan.plan(Transfer(theirs, Rows(desc, [7, 8, 3])), local="dst")
    with pytest.raises(AssertionError, match=r"dst_blocks\[2\] is 3, and was 2"):
        right.assert_equivalent(wrong)
