"""Leases of a registry over transports that refuse, fail or are delayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import current_thread

import numpy as np
import pytest

from kvplan import BlockLease, Cache, LeaseEnd, LLMException, LLMStatusCode
from kvplan.engine.leases import Leases
from kvplan.engine.registry import CacheRegistry
from tests.engine.caches import BLOCKS
from tests.support.refusals import refused

WAIT_S = 30  # for events that happen at once


class Words:
    """A transport of leases only, which fails on request; `standing` leases have not ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.standing: dict[int, int] = {}
        self.number = 0
        self.num_failures = 0  # calls of `end_leases` that fail
        self.refuses = False  # `renew_lease` fails
        self.calls: list[list[int]] = []  # arguments of `end_leases`
        self.meanwhile: Callable[[], object] = lambda: None  # called as if by another thread

    def begin_lease(self, deadline_ns: int = 0) -> tuple[int, int]:
        self.meanwhile()
        self.number += 1
        self.standing[self.number] = deadline_ns
        return self.number, 7

    def renew_lease(self, slot: int, generation: int, deadline_ns: int) -> None:
        if self.refuses:
            raise LLMException("expired", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        self.standing[slot] = deadline_ns

    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        self.calls.append([slot for slot, _ in leases])
        for slot in self.calls[-1]:
            self.standing.pop(slot, None)
        if self.num_failures:
            self.num_failures -= 1
            raise LLMException("it is stopped", status_code=LLMStatusCode.LLM_TIMEOUT)


@pytest.fixture
def words() -> list[Words]:
    return [Words("tcp"), Words("local")]


@pytest.fixture
def leases(registry: CacheRegistry, words: list[Words]) -> Iterator[Leases]:
    leases = Leases(1, bytes(16), registry, words)  # type: ignore[arg-type]
    yield leases
    leases.stop()


@pytest.fixture
def blocks(registry: CacheRegistry) -> Cache:
    return registry.allocate(BLOCKS, paged=True).cache


def test_a_delayed_transport_keeps_no_word_of_others(
    leases: Leases, words: list[Words], blocks: Cache
) -> None:
    lease = leases.begin(blocks, [1], "", None)
    words[0].num_failures = 1
    with refused("LLM_TIMEOUT", "it is stopped"):
        leases.end(lease)
    assert [word.standing for word in words] == [{}, {}]


def test_a_renewal_that_one_transport_refuses_has_no_effect(
    leases: Leases, words: list[Words], blocks: Cache
) -> None:
    lease = leases.begin(blocks, [1], "", 1e9)
    before, deadlines = [dict(word.standing) for word in words], dict(leases._deadlines)
    words[1].refuses = True
    with refused("LLM_KV_CACHE_NOT_EXIST", "expired just now"):
        leases.renew(lease, 2e9)
    assert [word.standing for word in words] == before
    assert leases._deadlines == deadlines


@pytest.mark.parametrize("end", LeaseEnd)
def test_delayed_leases_end_later_and_are_reported_then(
    leases: Leases,
    words: list[Words],
    blocks: Cache,
    caplog: pytest.LogCaptureFixture,
    end: LeaseEnd,
) -> None:
    """Leases that end together are ended in one call, because a stopped peer costs a second."""
    ended: SimpleQueue[tuple[BlockLease, LeaseEnd]] = SimpleQueue()
    leases.on_released(lambda *record: ended.put(record))
    # All leases are late before the thread looks.
    with leases._changed:
        ttl_ms = 1e-6 if end is LeaseEnd.EXPIRED else None
        made = [leases.begin(blocks, [number], "", ttl_ms) for number in (1, 2)]
        words[0].num_failures = 1
        if end is LeaseEnd.CACHE_FREED:
            leases.end_cache(blocks.cache_id)
        elif end is LeaseEnd.RELEASED:
            made = made[:1]
            with refused("LLM_TIMEOUT", "it is stopped"):
                leases.end(made[0])
        elif end is LeaseEnd.MOVED:
            with refused("LLM_TIMEOUT", "it is stopped"):
                leases.move(blocks, {1: 2, 2: 3}, None, follow=False)
    assert made[0] not in leases.live()
    assert sorted(ended.get(timeout=WAIT_S)[0].lease_id for _ in made) == [
        lease.lease_id for lease in made
    ]
    assert words[0].calls == [[lease.lease_id for lease in made]] * 2
    assert sum("leases_held_up" in record.getMessage() for record in caplog.records) == (
        end not in (LeaseEnd.RELEASED, LeaseEnd.MOVED)  # the caller knows of these ends
    )


def test_a_peer_that_delays_a_lease_for_long_is_logged_once(
    leases: Leases, words: list[Words], blocks: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    """The next lease is logged again: nothing is kept of ended ones."""
    ended: SimpleQueue[BlockLease] = SimpleQueue()
    leases.on_released(lambda value, _: ended.put(value))
    for number in (1, 2):
        lease = leases.begin(blocks, [number], "", None)
        words[0].num_failures = 2
        leases.end_cache(blocks.cache_id)
        with leases._changed:  # make the thread try again at once
            leases._wake_at(lease.lease_id, 1)
        assert ended.get(timeout=WAIT_S) is lease
        assert len(words[0].calls) == 3 * number
        assert sum("leases_held_up" in record.getMessage() for record in caplog.records) == number
        assert (leases._held_up, leases._ending, leases._deadlines) == (set(), {}, {})


@pytest.mark.parametrize("kind_of_end", ["released", "cache freed", "later released"])
def test_an_overdue_lease_has_expired_however_it_ends(
    leases: Leases, blocks: Cache, kind_of_end: str
) -> None:
    ended: SimpleQueue[tuple[BlockLease, LeaseEnd]] = SimpleQueue()
    leases.on_released(lambda *item: ended.put(item))
    with leases._changed:  # before the thread looks
        lease = leases.begin(blocks, [1], "", 1e12 if kind_of_end.startswith("later") else 1e-6)
        if kind_of_end == "cache freed":
            leases.end_cache(blocks.cache_id)
        else:
            leases.end(lease)
    end = LeaseEnd.RELEASED if kind_of_end.startswith("later") else LeaseEnd.EXPIRED
    assert ended.get(timeout=WAIT_S) == (lease, end)


def test_a_cache_that_is_freed_while_it_is_leased_has_no_lease(
    leases: Leases, registry: CacheRegistry, words: list[Words], blocks: Cache
) -> None:
    """The cache is freed while a transport begins its word: after the lookup, before the lease."""
    ended: SimpleQueue[tuple[int, LeaseEnd]] = SimpleQueue()
    leases.on_released(lambda lease, end: ended.put((lease.lease_id, end)))
    words[1].meanwhile = lambda: registry.deallocate(blocks.cache_id)
    with refused("LLM_KV_CACHE_NOT_EXIST", f"cache_id={blocks.cache_id} was freed"):
        leases.begin(blocks, [1], "", None)
    assert leases.live() == []
    assert ended.get(timeout=WAIT_S) == (1, LeaseEnd.CACHE_FREED)
    assert words[0].standing == {}


def test_a_cache_that_is_registered_again_while_it_is_leased_keeps_its_leases(
    leases: Leases, registry: CacheRegistry, words: list[Words]
) -> None:
    """Another thread calls `remap_registered_memory` at the same moment as in the test above."""
    arrays = [np.zeros(BLOCKS.shape, np.uint8) for _ in range(BLOCKS.num_tensors)]
    cache = registry.register(BLOCKS, arrays, paged=True).cache
    before = leases.begin(cache, [1], "", None)
    words[1].meanwhile = lambda: registry.renew([cache.cache_id])
    lease = leases.begin(cache, [2], "", None)
    assert leases.live() == [before, lease]


def test_a_callback_may_close(
    leases: Leases, blocks: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    """The callback runs in the thread that ends leases, which does not wait for itself."""
    closed: SimpleQueue[str] = SimpleQueue()

    def close(lease: BlockLease, end: LeaseEnd) -> None:
        leases.stop()
        closed.put(current_thread().name)

    leases.on_released(close)
    leases.begin(blocks, [1], "", 1e-6)
    assert closed.get(timeout=WAIT_S) == "kvplan-leases-1"
    assert "a callback has failed" not in caplog.text


class CopyError(Exception):
    """Raised by a function that copies blocks."""


@pytest.mark.parametrize("fails", ["a peer", "the copy", "a word", "the word of the next"])
def test_a_move_that_fails_leaves_the_leases_where_they_are(
    leases: Leases, words: list[Words], blocks: Cache, fails: str
) -> None:
    first, second = (leases.begin(blocks, [block, 3], "", 1e9) for block in (1, 2))
    called = []

    def copy() -> None:
        called.append(1)
        raise CopyError

    if fails == "a peer":
        words[0].num_failures = 1
        with refused("LLM_TIMEOUT", "it is stopped"):
            leases.move(blocks, {3: 0}, copy, follow=True)
        assert not called
    elif fails == "the copy":
        with pytest.raises(CopyError):
            leases.move(blocks, {3: 0}, copy, follow=True)
    else:
        begin, left = words[1].begin_lease, iter(range(fails == "the word of the next"))
        words[1].begin_lease = (  # type: ignore[method-assign]
            lambda deadline_ns=0: begin(deadline_ns) if next(left, None) == 0 else 1 // 0
        )
        with pytest.raises(ZeroDivisionError):
            leases.move(blocks, {3: 0}, copy, follow=True)
        assert leases.live() == [first, second]
        assert [{*word.standing} for word in words] == [{1, 2}, {1, 2}]
        return
    live = leases.live()
    assert [lease.blocks for lease in live] == [(1, 3), (2, 3)]
    assert [lease.moves for lease in live] == [1, 1]
    assert {*words[0].standing} == {word.slot for lease in live for word in lease.words[:1]}
    assert not {*first.words, *second.words} & {word for lease in live for word in lease.words}
    for lease in (first, live[1]):
        leases.end(lease)
    assert [item.standing for item in words] == [{}, {}]


@pytest.mark.parametrize("end", list(LeaseEnd))
def test_a_moved_lease_is_published_until_its_end(
    leases: Leases, registry: CacheRegistry, blocks: Cache, end: LeaseEnd
) -> None:
    """Peers keep the places of a limited number of moved leases."""
    ended: SimpleQueue[LeaseEnd] = SimpleQueue()
    leases.on_released(lambda _, end: ended.put(end))
    leases.begin(blocks, [1], "", 1e9)
    (moved,) = leases.move(blocks, {1: 5}, None, follow=True)
    assert registry.moved_leases == {moved.lease_id: moved}
    match end:
        case LeaseEnd.RELEASED:
            leases.end(moved)
        case LeaseEnd.EXPIRED:
            leases.renew(moved, 1e-6)
        case LeaseEnd.CACHE_FREED:
            leases.end_cache(blocks.cache_id)
        case LeaseEnd.MOVED:
            leases.move(blocks, {5: 6}, None, follow=False)
    assert ended.get(timeout=WAIT_S) is end
    assert registry.moved_leases == {}


def test_a_lease_is_released_or_renewed_while_it_moves(
    leases: Leases, words: list[Words], blocks: Cache
) -> None:
    """A release stays effective. A new deadline applies to the new place."""
    ended: SimpleQueue[tuple[int, LeaseEnd]] = SimpleQueue()
    leases.on_released(lambda lease, end: ended.put((lease.lease_id, end)))
    released, renewed = (leases.begin(blocks, [block], "", 1e9) for block in (1, 2))

    def copy() -> None:
        leases.end(released)
        leases.renew(renewed, 2e9)

    (moved,) = leases.move(blocks, {1: 5, 2: 6}, copy, follow=True)
    assert (moved.lease_id, moved.blocks) == (renewed.lease_id, (6,))
    assert leases.live() == [moved]
    assert ended.get_nowait() == (released.lease_id, LeaseEnd.RELEASED)
    deadline = leases._deadlines[renewed.lease_id]
    assert [item.standing for item in words] == [{word.slot: deadline} for word in moved.words]
