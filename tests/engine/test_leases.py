"""Leases at their owner, without a peer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import current_thread
from threading import enumerate as enumerate_threads

import numpy as np
import pytest

from kvplan import BlockLease, Cache, CacheDesc, DataType, LeaseEnd, LlmDataDist, LlmRole
from kvplan.lease import LeaseWord
from kvplan.transport.local import LocalTransport
from kvplan.transport.registrations import MAX_LEASES
from kvplan.transport.tcp.transport import TcpTransport
from kvplan.transport.ucx.transport import UcxTransport
from tests.engine.caches import LEASE
from tests.support.refusals import refused

WAIT_S = 30  # for events that happen at once
DESC = CacheDesc(2, (8, 64), DataType.DT_FLOAT)


@pytest.fixture
def engine() -> Iterator[LlmDataDist]:
    with LlmDataDist(1, LlmRole.MIX) as engine:
        engine.initialize()
        yield engine


@pytest.fixture
def cache(engine: LlmDataDist) -> Cache:
    return engine.allocate_blocks_cache(DESC)


def test_a_lease_is_made_and_released(engine: LlmDataDist, cache: Cache) -> None:
    first = engine.lease_blocks(cache, [3, 5], tag="a")
    second = engine.lease_blocks(cache, np.array([5]))  # a block may have several leases
    assert (first.cluster_id, first.cache_id, first.blocks) == (1, cache.cache_id, (3, 5))
    assert (str(first), str(second)) == ("lease 1 of a", "lease 2")
    assert engine.leases() == [first, second]
    for _ in range(2):
        engine.release(first)
        assert engine.leases() == [second]
    engine.deallocate_cache(cache)
    assert engine.leases() == []
    engine.release(second)


def test_a_lease_expires(engine: LlmDataDist, cache: Cache) -> None:
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


def test_deadlines_are_checked(engine: LlmDataDist, cache: Cache) -> None:
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
    """A single thread reports each expired lease once. Renewed leases stay."""
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
        engine.release(lease)  # already ended
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


def test_a_slot_is_leased(engine: LlmDataDist, cache: Cache) -> None:
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


def test_callbacks_are_called_for_released_leases(
    engine: LlmDataDist, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    """The callback is called once for each lease and each kind of end, and may use the engine."""
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


def test_registered_arrays_are_leased(engine: LlmDataDist) -> None:
    cache = engine.register_blocks_cache(DESC, [np.zeros(DESC.shape, np.float32) for _ in range(2)])
    engine.lease_blocks(cache, [1])
    engine.unregister_cache(cache.cache_id)
    assert engine.leases() == []


def test_blocks_that_cannot_be_leased(engine: LlmDataDist, cache: Cache) -> None:
    with refused("LLM_PARAM_INVALID", r"blocks\[1\]=8 is out of range"):
        engine.lease_blocks(cache, [0, 8])
    with refused("LLM_PARAM_INVALID", r"blocks\[1\]=3 is already blocks\[0\]; name each"):
        engine.lease_blocks(cache, [3, 3])
    with refused("LLM_PARAM_INVALID", "empty"):
        engine.lease_blocks(cache, [])
    with refused("LLM_PARAM_INVALID", "tag"):
        engine.lease_blocks(cache, [0], tag="x" * 65)
    engine.deallocate_cache(cache)
    with refused("LLM_KV_CACHE_NOT_EXIST"):
        engine.lease_blocks(cache, [0])
    assert engine.leases() == []


def test_leases_that_cannot_be_released(engine: LlmDataDist, cache: Cache) -> None:
    lease = engine.lease_blocks(cache, [3])
    with refused("LLM_PARAM_INVALID", "cluster 7"):
        engine.release(LEASE)
    for forged in (replace(lease, words=(LeaseWord("local", 0, 1),)), replace(lease, lease_id=9)):
        with refused("LLM_PARAM_INVALID", "differs from the lease that this engine made"):
            engine.release(forged)
    engine.release(replace(lease, instance=bytes(16)))  # a lease of the engine before a restart
    assert engine.leases() == [lease]
    with pytest.raises(TypeError, match="BlockLease"):
        engine.release(b"lease")  # type: ignore[arg-type]


@pytest.mark.usefixtures("ucx")
@pytest.mark.parametrize(
    "make", [LocalTransport, TcpTransport, partial(UcxTransport, settings='{"UCX_TLS": "shm"}')]
)
def test_no_slot_is_lost(make: Callable[..., LocalTransport | TcpTransport | UcxTransport]) -> None:
    """Leases have their own slots, besides those of registrations, and return them."""
    with make(max_registrations=1) as transport:
        held = [transport.begin_lease() for _ in range(MAX_LEASES)]
        assert len(set(held)) == MAX_LEASES
        with refused("LLM_OUT_OF_MEMORY", f"all {MAX_LEASES} .* are taken: release a lease first"):
            transport.begin_lease()
        registration = transport.register(bytearray(8))
        transport.end_leases(held)
        transport.end_leases(held)  # no slot is returned twice
        again = [transport.begin_lease() for _ in range(MAX_LEASES)]
        assert not set(again) & set(held)  # each slot has another generation
        with refused("LLM_OUT_OF_MEMORY", f"all {MAX_LEASES} .* are taken: release a lease first"):
            transport.begin_lease()
        transport.deregister(registration)


@pytest.mark.usefixtures("ucx")
@pytest.mark.parametrize(
    "make", [LocalTransport, TcpTransport, partial(UcxTransport, settings='{"UCX_TLS": "shm"}')]
)
def test_every_transport_refuses_to_renew_a_lease_that_has_ended(
    make: Callable[..., LocalTransport | TcpTransport | UcxTransport],
) -> None:
    """Its slot has another lease by then."""
    later_ns = time.monotonic_ns() + 3600 * 10**9
    with make() as transport:
        ended = transport.begin_lease(later_ns)
        transport.end_leases([ended])
        for _ in range(2):
            with refused("LLM_KV_CACHE_NOT_EXIST", "the lease has ended"):
                transport.renew_lease(*ended, later_ns)
            successor = transport.begin_lease(later_ns)
        assert successor[0] != ended[0] or successor[1] != ended[1]
        transport.renew_lease(*successor, later_ns)


def test_leases_that_cannot_be_moved(engine: LlmDataDist, cache: Cache) -> None:
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


def test_moves_may_be_numbers_of_numpy(engine: LlmDataDist, cache: Cache) -> None:
    lease, copies = engine.lease_blocks(cache, [3, 5]), SimpleQueue[int]()
    now = engine.moved(cache, {np.int32(3): np.int64(4)}, copy=lambda: copies.put(1))
    assert now == engine.leases() == [replace(lease, blocks=(4, 5), words=now[0].words, moves=1)]
    assert BlockLease.from_bytes(now[0].to_bytes()) == now[0]
    assert copies.qsize() == 1


def test_a_lease_of_very_many_blocks_does_not_follow(engine: LlmDataDist) -> None:
    large = engine.allocate_blocks_cache(CacheDesc(1, (1 << 16, 1), DataType.DT_INT8))
    most = engine.lease_blocks(large, range(1, 1 + (1 << 15)))
    more = engine.lease_blocks(large, range(1 + (1 << 15)))
    with refused("LLM_PARAM_INVALID", "lease 2 has 32769 blocks; peers follow leases of at most"):
        engine.moved(large, {5: 65_535})
    assert engine.leases() == [most, more]
    assert [item.blocks[4] for item in engine.moved(most, {5: 65_535})] == [65_535]
    assert engine.moved(more, {5: 65_535}, follow=False) == [more]
