"""Leases as values, and as their owner keeps them; no peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pickle import dumps, loads

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import BlockLease, Cache, CacheDesc, DataType, LlmDataDist, LLMException, LlmRole
from kvplan.lease import LeaseWord, _digest
from kvplan.transport.local import LocalTransport
from kvplan.transport.registrations import MAX_LEASES
from kvplan.transport.tcp.transport import TcpTransport
from kvplan.transport.ucx.transport import UcxTransport
from tests.support.refusals import refused

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
            unique_by=lambda it: it.transport,
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
    assert [lease.word(it) for it in ("local", "tcp", "ucx")] == [*words[::-1], None]
    assert lease.packed_word("local") == np.array([70_000, 9], np.uint64).tobytes()
    assert lease.packed_word("ucx") is None
    assert lease.places() == [("tcp", (5, 7)), ("local", (70_000, 9))]


def test_the_blocks_that_are_named() -> None:
    assert LEASE.named("src_blocks", None) == (5, 2, 900)
    for table in ([2], (900, 5), np.array([2, 5]), []):
        assert LEASE.named("src_blocks", table) is table
    for wrong in ([5, 3], np.array([5, 3])):
        with refused("LLM_PARAM_INVALID", r"src_blocks\[1\]=.*3.* is no block of lease 17"):
            LEASE.named("src_blocks", wrong)
    with pytest.raises(TypeError, match="src_blocks must be a sequence of int, not int"):
        LEASE.named("src_blocks", 5)  # type: ignore[arg-type]


def test_it_is_small() -> None:
    words = tuple(LeaseWord(it, 2**24, 2**63) for it in ("local", "tcp", "ucx", "hccl"))
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
    with refused("LLM_PARAM_INVALID", "no lease"):
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
    with engine.leased_blocks(cache, [0]) as third:
        assert engine.leases() == [second, third]
    assert engine.leases() == [second]
    engine.deallocate_cache(cache)
    assert engine.leases() == []
    engine.release(second)


def test_expiry(engine: LlmDataDist, cache: Cache) -> None:
    lease = engine.lease_blocks(cache, [3], ttl_ms=60_000)
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
    with refused("LLM_KV_CACHE_NOT_EXIST", "lease 3 expired"):
        engine.renew(short, 5)
    assert engine.leases() == [lease, for_ever, short]  # its blocks are not free before it ends
    engine.release(short)
    with refused("LLM_KV_CACHE_NOT_EXIST", "lease 3 was released"):
        engine.renew(short, 5)
    with refused("LLM_PARAM_INVALID", "cluster 7"):
        engine.renew(LEASE, 5)


def test_a_slot(engine: LlmDataDist, cache: Cache) -> None:
    contiguous = engine.allocate_cache(DESC)
    lease = engine.lease_slot(contiguous, 7, tag="a")
    assert (lease.blocks, lease.paged) == ((7,), False)
    assert BlockLease.from_bytes(lease.to_bytes()) == lease
    for index in (-1, 8):
        with refused("LLM_PARAM_INVALID", "batch_index"):
            engine.lease_slot(contiguous, index)
    with pytest.raises(TypeError, match="batch_index="):
        engine.lease_slot(contiguous, True)
    with refused("LLM_PARAM_INVALID", "must be a contiguous cache"):
        engine.lease_slot(cache, 0)
    with refused("LLM_PARAM_INVALID", "must be a paged cache"):
        engine.lease_blocks(contiguous, [0])


def test_on_released(engine: LlmDataDist, cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each lease, whatever has ended it; the callback may use the engine."""
    seen: list[tuple[int, list[BlockLease]]] = []
    first, second, third = (engine.lease_blocks(cache, [it]) for it in range(3))
    remove = engine.on_released(lambda it: seen.append((it.lease_id, engine.leases())))
    broken = engine.on_released(lambda it: 1 // 0)
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
    with refused("LLM_PARAM_INVALID", "paged"):
        engine.lease_blocks(engine.allocate_cache(DESC), [0])
    engine.deallocate_cache(cache)
    with refused("LLM_KV_CACHE_NOT_EXIST"):
        engine.lease_blocks(cache, [0])
    assert engine.leases() == []


def test_what_cannot_be_released(engine: LlmDataDist, cache: Cache) -> None:
    lease = engine.lease_blocks(cache, [3])
    with refused("LLM_PARAM_INVALID", "cluster 7"):
        engine.release(LEASE)
    for forged in (replace(lease, words=(LeaseWord("local", 0, 1),)), replace(lease, lease_id=9)):
        with refused("LLM_PARAM_INVALID", "not as this engine has made it"):
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
        with refused("LLM_OUT_OF_MEMORY", "leases are taken"):
            transport.begin_lease()
        registration = transport.register(bytearray(8))
        transport.end_leases(held)
        transport.end_leases(held)  # nothing is given back twice
        again = [transport.begin_lease() for _ in range(MAX_LEASES)]
        assert not set(again) & set(held)  # of each slot another generation
        with refused("LLM_OUT_OF_MEMORY", "leases are taken"):
            transport.begin_lease()
        transport.deregister(registration)
