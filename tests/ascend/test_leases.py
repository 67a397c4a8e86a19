"""Blocks of a device become another request's before, while and after a peer moves them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvplan import (
    BlockLease,
    Cache,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LLMException,
    Transfers,
)
from kvplan.lease import LeaseWord
from kvplan.transport.registrations import MAX_LEASES
from tests.ascend.hccl_side import Side
from tests.datadist.conftest import MakeEngine
from tests.datadist.peer import Peer
from tests.faults.gate import Gate
from tests.support.refusals import refused

DESC = CacheDesc(4, (8, 16), DataType.DT_INT32)
THEIRS, MINE = [2, 0], [1, 3]
RELEASED = "lease 1 of cmpl-3 was released"
NOT_EXIST = "LLM_KV_CACHE_NOT_EXIST"
LONG_MS = 30_000


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


@pytest.fixture
def gated(gate: Gate, make_engine: MakeEngine, peer: Peer) -> Iterator[LlmDataDist]:
    """Linked with the peer; its transfers stand still after the first descriptor."""
    with Transfers(1, gate.wrap) as transfers:
        user = make_engine(2, transfers=transfers)
        user.link_clusters([ClusterInfo(1, peer.address)], LONG_MS).raise_for_status()
        yield user
        gate.open()


@pytest.fixture
def lease(peer: Peer) -> BlockLease:
    """Of blocks THEIRS, that are full of 7."""
    blob = peer.run(
        """
        cache = datadist.allocate_blocks_cache(desc)
        arrays = datadist.arrays(cache)
        [it.fill(7) for it in arrays]
        lease = datadist.lease_blocks(cache, blocks, tag="cmpl-3")
        result = lease.to_bytes()
        """,
        desc=DESC,
        blocks=THEIRS,
    )
    return BlockLease.from_bytes(blob)


def pull(user: LlmDataDist, lease: BlockLease, cache: Cache) -> None:
    user.pull_blocks(lease, cache, None, MINE, timeout_ms=LONG_MS)


@pytest.mark.parametrize("when", ["during", "after"])
def test_a_pull(gated: LlmDataDist, peer: Peer, lease: BlockLease, gate: Gate, when: str) -> None:
    cache, errors = gated.allocate_blocks_cache(DESC), []

    def call() -> None:
        try:
            pull(gated, lease, cache)
        except LLMException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    gate.wait()
    release = "datadist.release(lease); [it.fill(9) for it in arrays]"
    if when == "during":
        peer.run(release)
    gate.open()
    thread.join(30)
    if when == "after":
        assert errors == []
        peer.run(release)
        assert all((it[MINE] == 7).all() for it in gated.arrays(cache))
    else:
        assert [it.status_code.name for it in errors] == [NOT_EXIST], errors
        assert RELEASED in str(errors[0])
    with refused(NOT_EXIST, RELEASED):
        pull(gated, lease, cache)


def test_leased_again(user: LlmDataDist, peer: Peer, lease: BlockLease) -> None:
    cache = user.allocate_blocks_cache(DESC)
    pull(user, lease, cache)
    again = "datadist.release(lease); lease = datadist.lease_blocks(cache, blocks, tag='cmpl-4')"
    blob = peer.run(f"{again}; result = lease.to_bytes()", blocks=THEIRS)
    with refused(NOT_EXIST, RELEASED):
        pull(user, lease, cache)
    user.submit_pull_blocks(BlockLease.from_bytes(blob), cache, [0], [5]).wait(LONG_MS)
    assert all((it[[1, 3, 5]] == 7).all() for it in user.arrays(cache))
    peer.run("datadist.deallocate_cache(cache)")
    with refused(NOT_EXIST):
        pull(user, BlockLease.from_bytes(blob), cache)


def test_a_push_is_refused(user: LlmDataDist, lease: BlockLease) -> None:
    """A lease that had ended would show when the bytes are there."""
    cache = user.allocate_blocks_cache(DESC)
    with refused("LLM_FEATURE_NOT_ENABLED", "is made without a lease"):
        user.push_blocks(cache, lease, MINE)


def test_forged(user: LlmDataDist, lease: BlockLease) -> None:
    cache = user.allocate_blocks_cache(DESC)
    (word,) = [it for it in lease.words if it.transport == "hccl"]
    for slot, generation in (
        (word.slot, word.generation + 1),
        (word.slot + 1, word.generation),
        (word.slot + 1, 0),
        (0, word.generation + 5),
        (2**32 - 1, word.generation),
    ):
        forged = replace(lease, words=(LeaseWord("hccl", slot, generation),))
        with refused(NOT_EXIST, RELEASED):
            pull(user, forged, cache)
    with refused("LLM_FEATURE_NOT_ENABLED", "leases are not checked"):
        pull(user, replace(lease, words=()), cache)
    pull(user, lease, cache)  # the link is as good as before


def test_slots(one: Side) -> None:
    """Leases have their own, and give them back once; each has another generation."""
    transport = one.transport
    first, second = transport.begin_lease(), transport.begin_lease()
    for _ in range(2):
        transport.end_leases([first])
    held = {transport.begin_lease() for _ in range(2)}
    assert len({first, second, *held}) == 4
    assert len({slot for slot, _ in {second, *held}}) == 3
    table = transport._hccl.generations
    assert table.ref.num_slots == 65536 + MAX_LEASES
    words = np.zeros(table.ref.num_slots, np.uint64)
    one.device.read(table.ref.address, words)
    live = {slot: int(words[slot]) for slot in np.flatnonzero(words).tolist() if slot >= 65536}
    assert live == dict([second, *held])
