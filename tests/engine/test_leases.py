"""Leases as values, and as their owner keeps them; no peer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from copy import copy, deepcopy
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pickle import dumps, loads
from queue import SimpleQueue
from threading import current_thread
from threading import enumerate as enumerate_threads

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import (
    BlockLease,
    Cache,
    CacheDesc,
    DataType,
    LeaseEnd,
    LlmDataDist,
    LLMException,
    LlmRole,
    LLMStatusCode,
)
from kvplan.engine.leases import Leases
from kvplan.engine.registry import CacheRegistry
from kvplan.lease import LeaseWord, _digest
from kvplan.transport.local import LocalTransport
from kvplan.transport.registrations import MAX_LEASES
from kvplan.transport.tcp.transport import TcpTransport
from kvplan.transport.ucx.transport import UcxTransport
from tests.engine.caches import BLOCKS
from tests.support.refusals import refused

WAIT_S = 30  # for what happens at once
DESC = CacheDesc(2, (8, 64), DataType.DT_FLOAT)
LEASE = BlockLease(
    7, bytes(range(16)), 3, 17, (5, 2, 900), True, "cmpl-3", (LeaseWord("local", 70_000, 9),)
)
tags = st.text(st.characters(categories=("L", "N", "P", "Zs"), include_characters=" "), max_size=64)


@pytest.fixture
def engine() -> Iterator[LlmDataDist]:
    with LlmDataDist(1, LlmRole.MIX) as engine:
        engine.initialize()
        yield engine


@pytest.fixture
def cache(engine: LlmDataDist) -> Cache:
    return engine.allocate_blocks_cache(DESC)


@given(
    st.builds(
        BlockLease,
        cluster_id=st.integers(0, 2**64 - 1),
        instance=st.binary(min_size=16, max_size=16),
        cache_id=st.integers(0, 2**63 - 1),
        lease_id=st.integers(0, 2**64 - 1),
        blocks=st.lists(st.integers(0, 2**63 - 1), max_size=9).map(tuple),
        paged=st.just(True),
        tag=tags.filter(str.isprintable),
        words=st.lists(
            st.builds(
                LeaseWord,
                st.sampled_from(["local", "tcp"]),
                st.integers(0, 2**32 - 1),
                st.integers(0, 2**64 - 1),
            ),
            max_size=4,
            unique_by=lambda link: link.transport,
        ).map(tuple),
    )
)
def test_what_is_written_is_read(lease: BlockLease) -> None:
    assert BlockLease.from_bytes(lease.to_bytes()) == lease


@pytest.mark.parametrize("largest", [0, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**63 - 1])
def test_it_is_a_value(largest: int) -> None:
    words = LeaseWord("tcp", 2**32 - 1, 2**64 - 1), LeaseWord("local", 0, 0)
    lease = replace(LEASE, blocks=(3, largest), words=words, tokens=5)
    assert (lease.blocks, lease.words) == ((3, largest), words)
    for copied in (copy(lease), deepcopy(lease), loads(dumps(lease)), replace(lease)):
        assert copied == lease
        assert hash(copied) == hash(lease)
        assert repr(copied) == repr(lease)
    assert {lease, replace(lease, tokens=None), replace(lease, blocks=(largest, 3))} - {lease}
    with pytest.raises(FrozenInstanceError):
        lease.tag = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        lease.other = 1  # type: ignore[attr-defined]


def test_words_by_transport() -> None:
    words = LeaseWord("tcp", 5, 7), LeaseWord("local", 70_000, 9)
    lease = replace(LEASE, words=words)
    assert [lease.word(name) for name in ("local", "tcp", "ucx")] == [*words[::-1], None]
    assert lease.packed_word("local") == np.array([70_000, 9], np.uint64).tobytes()
    assert lease.packed_word("ucx") is None
    assert lease.places() == [("tcp", (5, 7)), ("local", (70_000, 9))]


def test_the_blocks_that_are_named() -> None:
    assert LEASE.named("src_blocks", None) == (5, 2, 900)
    for table in ([2], (900, 5), np.array([2, 5]), []):
        assert LEASE.named("src_blocks", table) is table
    for wrong in ([5, 3], np.array([5, 3])):
        with refused("LLM_PARAM_INVALID", r"src_blocks\[1\]=.*3.* is not a block of lease 17"):
            LEASE.named("src_blocks", wrong)
    with pytest.raises(TypeError, match="src_blocks must be a sequence of int, not int"):
        LEASE.named("src_blocks", 5)  # type: ignore[arg-type]


def test_it_is_small() -> None:
    words = tuple(LeaseWord(name, 2**24, 2**63) for name in ("local", "tcp", "ucx", "hccl"))
    largest = replace(
        LEASE, cluster_id=2**64 - 1, lease_id=2**63, tag="x" * 64, words=words, blocks=()
    )
    assert len(largest.to_bytes()) < 200
    assert len(replace(LEASE, blocks=tuple(range(10_000))).to_bytes()) < 30_200


def test_cut_or_changed() -> None:
    whole = LEASE.to_bytes()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        with refused("LLM_PARAM_INVALID", "blob"):
            BlockLease.from_bytes(bytes(changed))
    for length in range(len(whole)):
        with refused("LLM_PARAM_INVALID", "blob"):
            BlockLease.from_bytes(whole[:length])
    with refused("LLM_PARAM_INVALID", "blob"):
        BlockLease.from_bytes(whole + b"\0")
    with pytest.raises(TypeError):
        BlockLease.from_bytes("lease")  # type: ignore[arg-type]


@given(st.binary(max_size=80))
def test_forged(body: bytes) -> None:
    """Whatever follows a digest that is right."""
    with refused("LLM_PARAM_INVALID", "not a lease"):
        BlockLease.from_bytes(_digest(body) + body)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("tag", "x" * 65, LLMException),
        ("tag", "a\nb", LLMException),
        ("tag", 5, TypeError),
        ("paged", 1, TypeError),
        ("paged", False, LLMException),  # three slots
        ("instance", b"short", LLMException),
        ("blocks", (1, True), TypeError),
        ("blocks", [1], TypeError),
        ("cluster_id", -1, ValueError),
        ("words", (("local", 1, 1),), TypeError),
        ("blocks", (1, -1), LLMException),
        ("blocks", (2**63,), LLMException),
        ("words", (LeaseWord("local", 1, 1), LeaseWord("local", 2, 1)), LLMException),
        ("words", (LeaseWord("x" * 33, 1, 1),), LLMException),
        ("words", (LeaseWord(5, 1, 1),), TypeError),  # type: ignore[arg-type]
        ("words", (LeaseWord("local", -1, 1),), ValueError),
        ("words", (LeaseWord("local", 1, 2**64),), ValueError),
    ],
)
def test_impossible_fields(field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        replace(LEASE, **{field: value})


def test_life(engine: LlmDataDist, cache: Cache) -> None:
    first = engine.lease_blocks(cache, [3, 5], tag="a")
    second = engine.lease_blocks(cache, np.array([5]))  # a block may have several
    assert (first.cluster_id, first.cache_id, first.blocks) == (1, cache.cache_id, (3, 5))
    assert (str(first), str(second)) == ("lease 1 of a", "lease 2")
    assert engine.leases() == [first, second]
    for _ in range(2):
        engine.release(first)
        assert engine.leases() == [second]
    engine.deallocate_cache(cache)
    assert engine.leases() == []
    engine.release(second)


def test_expiry(engine: LlmDataDist, cache: Cache) -> None:
    lease = engine.lease_blocks(cache, [3], ttl_ms=np.int64(60_000))
    engine.renew(lease, 1e12)
    for wrong in (0, -1.0, 2e12, float("nan"), float("inf")):
        with refused("LLM_PARAM_INVALID", "ttl_ms="):
            engine.renew(lease, wrong)
        with refused("LLM_PARAM_INVALID", "ttl_ms="):
            engine.lease_blocks(cache, [3], ttl_ms=wrong)
    for other in ("1", True, None):
        with pytest.raises(TypeError, match="ttl_ms="):
            engine.renew(lease, other)  # type: ignore[arg-type]
    for_ever = engine.lease_blocks(cache, [3])
    with refused("LLM_PARAM_INVALID", "without ttl_ms"):
        engine.renew(for_ever, 5)
    short = engine.lease_blocks(cache, [4], ttl_ms=1e-6)
    for _ in range(2):
        with refused("LLM_KV_CACHE_NOT_EXIST", "lease 3 was released or has expired"):
            engine.renew(short, 5)
        assert engine.leases() == [lease, for_ever]
        engine.release(short)
    with refused("LLM_PARAM_INVALID", "cluster 7"):
        engine.renew(LEASE, 5)


def test_deadlines(engine: LlmDataDist, cache: Cache) -> None:
    for lease in (
        engine.lease_blocks(cache, [3], ttl_ms=60_000),
        engine.lease_blocks(engine.allocate_cache(DESC), [0], ttl_ms=60_000),
    ):
        began = time.monotonic()
        assert began + 120 <= engine.renew(lease, 120_000) <= time.monotonic() + 120
        engine.release(lease)
        with refused("LLM_KV_CACHE_NOT_EXIST", "was released"):
            engine.renew(lease, 120_000)
    with pytest.raises(TypeError, match="BlockLease"):
        engine.renew(b"lease", 5)  # type: ignore[arg-type]


def test_expired_leases_end(engine: LlmDataDist, cache: Cache) -> None:
    """Each is reported once, as what it was, by one thread for all; renewed ones stay."""
    ended: SimpleQueue[tuple[int, LeaseEnd, str]] = SimpleQueue()
    engine.on_released(lambda value, end: ended.put((value.lease_id, end, current_thread().name)))
    here, there = current_thread().name, "kvplan-leases-1"
    kept = engine.lease_blocks(cache, [0], ttl_ms=3_600_000)
    short = [engine.lease_blocks(cache, [index], ttl_ms=5) for index in range(3)]
    for _ in range(2):
        engine.renew(kept, 1e-6 if _ else 3_600_000)
    reported = sorted((ended.get(timeout=WAIT_S) for _ in range(4)), key=lambda value: value[0])
    assert reported == [(number, LeaseEnd.EXPIRED, there) for number in (1, 2, 3, 4)]
    assert engine.leases() == []
    for lease in short:
        engine.release(lease)  # it has ended
    released = engine.lease_blocks(cache, [0], ttl_ms=3_600_000)
    engine.lease_blocks(cache, [1], ttl_ms=3_600_000)
    engine.release(released)
    engine.deallocate_cache(cache)
    assert [ended.get_nowait() for _ in range(2)] == [
        (5, LeaseEnd.RELEASED, here),
        (6, LeaseEnd.CACHE_FREED, here),
    ]
    assert [thread.name for thread in enumerate_threads()].count(there) == 1
    engine.finalize()
    assert there not in [thread.name for thread in enumerate_threads()]
    assert ended.empty()


def test_a_callback_that_exits_ends_no_thread(engine: LlmDataDist, cache: Cache) -> None:
    ended: SimpleQueue[int] = SimpleQueue()
    engine.on_released(lambda lease, _: sys.exit(lease.lease_id))
    engine.on_released(lambda lease, _: ended.put(lease.lease_id))
    for number in (1, 2):
        engine.lease_blocks(cache, [0], ttl_ms=1)
        assert ended.get(timeout=WAIT_S) == number
    with pytest.raises(SystemExit):
        engine.release(engine.lease_blocks(cache, [0]))


class Words:
    """A transport of leases alone, which fails as it is told to; `standing` is not ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.standing: dict[int, int] = {}
        self.number = 0
        self.held_up = 0  # calls of `end_leases` that fail
        self.refuses = False  # to renew
        self.calls: list[list[int]] = []  # of `end_leases`
        self.meanwhile: Callable[[], object] = lambda: None  # what another thread does

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
        if self.held_up:
            self.held_up -= 1
            raise LLMException("it is stopped", status_code=LLMStatusCode.LLM_TIMEOUT)


@pytest.fixture
def words() -> list[Words]:
    return [Words("tcp"), Words("local")]


@pytest.fixture
def leases(registry: CacheRegistry, words: list[Words]) -> Iterator[Leases]:
    leases = Leases(1, bytes(16), registry, words)  # type: ignore[arg-type]
    yield leases
    leases.close()


@pytest.fixture
def blocks(registry: CacheRegistry) -> Cache:
    return registry.allocate(BLOCKS, paged=True).cache


def test_a_transport_that_is_held_up_keeps_no_word_of_others(
    leases: Leases, words: list[Words], blocks: Cache
) -> None:
    lease = leases.begin(blocks, [1], "", None)
    words[0].held_up = 1
    with refused("LLM_TIMEOUT", "it is stopped"):
        leases.end(lease)
    assert [word.standing for word in words] == [{}, {}]


def test_a_renewal_that_one_transport_refuses_is_none(
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
def test_held_up_leases_end_later_and_are_reported_then(
    leases: Leases,
    words: list[Words],
    blocks: Cache,
    caplog: pytest.LogCaptureFixture,
    end: LeaseEnd,
) -> None:
    """Those that end together are ended in one call: a peer that is stopped costs a second."""
    ended: SimpleQueue[tuple[BlockLease, LeaseEnd]] = SimpleQueue()
    leases.on_released(lambda *record: ended.put(record))
    # All are late before the thread has a look.
    with leases._changed:
        ttl_ms = 1e-6 if end is LeaseEnd.EXPIRED else None
        made = [leases.begin(blocks, [number], "", ttl_ms) for number in (1, 2)]
        words[0].held_up = 1
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
        end not in (LeaseEnd.RELEASED, LeaseEnd.MOVED)  # the caller was told
    )


def test_a_peer_that_holds_up_a_lease_for_long_is_logged_once(
    leases: Leases, words: list[Words], blocks: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    """And again for the next lease: nothing is kept of those that have ended."""
    ended: SimpleQueue[BlockLease] = SimpleQueue()
    leases.on_released(lambda value, _: ended.put(value))
    for number in (1, 2):
        lease = leases.begin(blocks, [number], "", None)
        words[0].held_up = 2
        leases.end_cache(blocks.cache_id)
        with leases._changed:  # it is tried again at once
            leases._wake_at(lease.lease_id, 1)
        assert ended.get(timeout=WAIT_S) is lease
        assert len(words[0].calls) == 3 * number
        assert sum("leases_held_up" in record.getMessage() for record in caplog.records) == number
        assert (leases._held_up, leases._ending, leases._deadlines) == (set(), {}, {})


@pytest.mark.parametrize("how", ["released", "cache freed", "later released"])
def test_a_lease_that_is_late_has_expired_whatever_ends_it(
    leases: Leases, blocks: Cache, how: str
) -> None:
    ended: SimpleQueue[tuple[BlockLease, LeaseEnd]] = SimpleQueue()
    leases.on_released(lambda *item: ended.put(item))
    with leases._changed:  # the thread has not looked yet
        lease = leases.begin(blocks, [1], "", 1e12 if how.startswith("later") else 1e-6)
        if how == "cache freed":
            leases.end_cache(blocks.cache_id)
        else:
            leases.end(lease)
    end = LeaseEnd.RELEASED if how.startswith("later") else LeaseEnd.EXPIRED
    assert ended.get(timeout=WAIT_S) == (lease, end)


def test_a_cache_that_is_freed_while_it_is_leased_has_no_lease(
    leases: Leases, registry: CacheRegistry, words: list[Words], blocks: Cache
) -> None:
    """Between the look at the cache and the lease: that is when a transport begins its word."""
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
    """`remap_registered_memory` of another thread, at the moment of the test above."""
    arrays = [np.zeros(BLOCKS.shape, np.uint8) for _ in range(BLOCKS.num_tensors)]
    cache = registry.register(BLOCKS, arrays, paged=True).cache
    before = leases.begin(cache, [1], "", None)
    words[1].meanwhile = lambda: registry.renew([cache.cache_id])
    lease = leases.begin(cache, [2], "", None)
    assert leases.live() == [before, lease]


def test_a_callback_may_close(
    leases: Leases, blocks: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    """In the thread that ends leases, which does not wait for itself."""
    closed: SimpleQueue[str] = SimpleQueue()

    def close(lease: BlockLease, end: LeaseEnd) -> None:
        leases.close()
        closed.put(current_thread().name)

    leases.on_released(close)
    leases.begin(blocks, [1], "", 1e-6)
    assert closed.get(timeout=WAIT_S) == "kvplan-leases-1"
    assert "a callback has failed" not in caplog.text


def test_a_slot(engine: LlmDataDist, cache: Cache) -> None:
    contiguous = engine.allocate_cache(DESC)
    lease = engine.lease_blocks(contiguous, [7], tag="a")
    assert (lease.blocks, lease.paged) == ((7,), False)
    assert BlockLease.from_bytes(lease.to_bytes()) == lease
    for index in (-1, 8):
        with refused("LLM_PARAM_INVALID", "blocks"):
            engine.lease_blocks(contiguous, [index])
    with pytest.raises(TypeError, match="blocks must hold int, not bool"):
        engine.lease_blocks(contiguous, [True])
    with refused("LLM_PARAM_INVALID", r"blocks=\[0, 1\] and tokens=None .* must be one slot"):
        engine.lease_blocks(contiguous, [0, 1])
    with refused("LLM_PARAM_INVALID", "tokens=1 of a contiguous cache"):
        engine.lease_blocks(contiguous, [0], tokens=1)


def test_on_released(engine: LlmDataDist, cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each lease, whatever has ended it; the callback may use the engine."""
    seen: list[tuple[int, list[BlockLease]]] = []
    first, second, third = (engine.lease_blocks(cache, [index]) for index in range(3))
    remove = engine.on_released(lambda lease, _: seen.append((lease.lease_id, engine.leases())))
    broken = engine.on_released(lambda *_: 1 // 0)
    for _ in range(2):
        engine.release(first)
    assert seen == [(1, [second, third])]
    assert "on_released: a callback has failed" in caplog.text
    broken()
    engine.deallocate_cache(cache)
    assert sorted(number for number, _ in seen) == [1, 2, 3]
    remove()
    remove()
    other = engine.allocate_blocks_cache(DESC)
    engine.release(engine.lease_blocks(other, [0]))
    assert len(seen) == 3
    with pytest.raises(TypeError, match="callback="):
        engine.on_released(None)  # type: ignore[arg-type]


def test_of_registered_arrays(engine: LlmDataDist) -> None:
    cache = engine.register_blocks_cache(DESC, [np.zeros(DESC.shape, np.float32) for _ in range(2)])
    engine.lease_blocks(cache, [1])
    engine.unregister_cache(cache.cache_id)
    assert engine.leases() == []


def test_what_cannot_be_leased(engine: LlmDataDist, cache: Cache) -> None:
    with refused("LLM_PARAM_INVALID", r"blocks\[1\]=8 is out of range"):
        engine.lease_blocks(cache, [0, 8])
    with refused("LLM_PARAM_INVALID", r"blocks\[1\]=3 is already"):
        engine.lease_blocks(cache, [3, 3])
    with refused("LLM_PARAM_INVALID", "empty"):
        engine.lease_blocks(cache, [])
    with refused("LLM_PARAM_INVALID", "tag"):
        engine.lease_blocks(cache, [0], tag="x" * 65)
    engine.deallocate_cache(cache)
    with refused("LLM_KV_CACHE_NOT_EXIST"):
        engine.lease_blocks(cache, [0])
    assert engine.leases() == []


def test_what_cannot_be_released(engine: LlmDataDist, cache: Cache) -> None:
    lease = engine.lease_blocks(cache, [3])
    with refused("LLM_PARAM_INVALID", "cluster 7"):
        engine.release(LEASE)
    for forged in (replace(lease, words=(LeaseWord("local", 0, 1),)), replace(lease, lease_id=9)):
        with refused("LLM_PARAM_INVALID", "differs from the lease that this engine made"):
            engine.release(forged)
    engine.release(replace(lease, instance=bytes(16)))  # of the engine before a restart
    assert engine.leases() == [lease]
    with pytest.raises(TypeError, match="BlockLease"):
        engine.release(b"lease")  # type: ignore[arg-type]


@pytest.mark.usefixtures("ucx")
@pytest.mark.parametrize(
    "make", [LocalTransport, TcpTransport, partial(UcxTransport, settings='{"UCX_TLS": "shm"}')]
)
def test_no_slot_is_lost(make: Callable[..., LocalTransport | TcpTransport | UcxTransport]) -> None:
    """Leases have slots of their own, whatever is registered, and give them back."""
    with make(max_registrations=1) as transport:
        held = [transport.begin_lease() for _ in range(MAX_LEASES)]
        assert len(set(held)) == MAX_LEASES
        with refused("LLM_OUT_OF_MEMORY", "leases are in use"):
            transport.begin_lease()
        registration = transport.register(bytearray(8))
        transport.end_leases(held)
        transport.end_leases(held)  # nothing is given back twice
        again = [transport.begin_lease() for _ in range(MAX_LEASES)]
        assert not set(again) & set(held)  # of each slot another generation
        with refused("LLM_OUT_OF_MEMORY", "leases are in use"):
            transport.begin_lease()
        transport.deregister(registration)


class CopyError(Exception):
    """Raised by what copies blocks."""


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
        words[0].held_up = 1
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


def test_what_happens_to_a_lease_while_it_moves(
    leases: Leases, words: list[Words], blocks: Cache
) -> None:
    """Released, it stays so; a new deadline is that of its new place."""
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


def test_what_cannot_be_moved(engine: LlmDataDist, cache: Cache) -> None:
    lease = engine.lease_blocks(cache, [3, 5])
    for wrong, reason in (
        ({3: 8}, "8 is out of range"),
        ({-1: 3}, "-1 is out of range"),
        ({3: 5}, "would let lease 1 name a block twice"),
    ):
        with refused("LLM_PARAM_INVALID", reason):
            engine.moved(cache, wrong)
    with pytest.raises(TypeError, match=r"moves=.* must be a mapping"):
        engine.moved(cache, [(3, 4)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="where"):
        engine.moved(3, {3: 4})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="copy=5 must be callable"):
        engine.moved(cache, {3: 4}, copy=5)  # type: ignore[arg-type]
    assert engine.leases() == [lease]
    assert engine.moved(cache, {6: 7}) == []
    assert engine.moved(lease, {}) == []
    (moved,) = engine.moved(lease, {3: 4})
    forged = replace(lease, tag="other")
    for later in (forged, replace(moved, blocks=(1, 2)), replace(lease, moves=2)):
        with refused("LLM_PARAM_INVALID", "differs from the lease that this engine made"):
            engine.release(later)
    assert engine.fingerprint(lease) == engine.fingerprint(cache, [4, 5])
    engine.release(lease)
    with refused("LLM_KV_CACHE_NOT_EXIST", "lease 1 was released"):
        engine.moved(moved, {4: 3})
    assert engine.leases() == []


def test_a_lease_of_very_many_blocks_does_not_follow(engine: LlmDataDist) -> None:
    large = engine.allocate_blocks_cache(CacheDesc(1, (1 << 16, 1), DataType.DT_INT8))
    most = engine.lease_blocks(large, range(1, 1 + (1 << 15)))
    more = engine.lease_blocks(large, range(1 + (1 << 15)))
    with refused("LLM_PARAM_INVALID", "lease 2 has 32769 blocks; peers follow leases of at most"):
        engine.moved(large, {5: 65_535})
    assert engine.leases() == [most, more]
    assert [item.blocks[4] for item in engine.moved(most, {5: 65_535})] == [65_535]
    assert engine.moved(more, {5: 65_535}, follow=False) == [more]
