"""Leases come and go while peers move blocks, are stopped and killed: each word says whose it is.

KVPLAN_TEST_LEASE_ROUNDS: how many rounds; 8,000 take some ten minutes (with --timeout 0).
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from kvplan import BlockLease, CacheDesc, DataType, LlmDataDist, LLMException, LLMStatusCode
from tests.faults.conftest import MakeEngine, MakePeer
from tests.faults.gate import DEADLINE_S
from tests.faults.peer import Peer

ROUNDS = int(os.environ.get("KVPLAN_TEST_LEASE_ROUNDS", "25"))
PATIENT = {"heartbeat_timeout_ms": 60_000}
OWNER, PEERS = 8, (1, 2)
DESC = CacheDesc(4, (8, 1 << 17), DataType.DT_UINT32)  # blocks of 512 KiB: 4 of each peer
# What the peer does, in a thread of its own, with each lease that it is given.
WORK = """
import queue, threading

jobs, outcomes = queue.Queue(), []
mine, source = (datadist.allocate_blocks_cache(desc) for _ in range(2))
pulled, pushed = datadist.arrays(mine), datadist.arrays(source)

def link():
    datadist.link_clusters([ClusterInfo(owner, address)], 10_000).raise_for_status()

def move(lease, stamp, pushes):
    rows = range(len(lease.blocks))
    if pushes:
        for it in pushed:
            it[: len(rows)] = stamp + 1
        datadist.push_blocks(source, lease, rows, timeout_ms=20_000)
        return "pushed"
    for it in pulled:
        it[: len(rows)] = 0
    datadist.pull_blocks(lease, mine, None, rows, timeout_ms=20_000)
    return "pulled" if all((it[: len(rows)] == stamp).all() for it in pulled) else "WRONG"

def work():
    while True:
        blob, stamp, pushes = jobs.get()
        for _ in range(3):
            try:
                outcomes.append(move(BlockLease.from_bytes(blob), stamp, pushes))
            except LLMException as error:
                outcomes.append(error.status_code.name)
                if error.status_code is LLMStatusCode.LLM_LINK_FAILED:
                    datadist.unlink_clusters([owner], 10_000, force=True)
                    link()
        jobs.task_done()

link()
threading.Thread(target=work, daemon=True).start()
"""


class Scene:
    """An owner whose blocks are stamped, and peers that move them."""

    def __init__(self, owner: LlmDataDist, make_peer: MakePeer, seed: int) -> None:
        self.owner, self._make_peer = owner, make_peer
        self.random = random.Random(seed)
        cache = owner.allocate_blocks_cache(DESC)
        self.cache, self.arrays = cache, owner.arrays(cache)
        self.peers = {it: self.make(it) for it in PEERS}
        self.counts: Counter[str] = Counter()
        self._stamp = 0
        self._left: dict[int, int] = {}  # what must be in blocks that no request has

    def make(self, cluster_id: int) -> Peer:
        peer = self._make_peer(cluster_id, **PATIENT)
        peer.run(WORK, desc=DESC, owner=OWNER, address=self.owner.listen_address)
        return peer

    def fill(self, blocks: Sequence[int], stamp: int) -> None:
        for it in self.arrays:
            it[list(blocks)] = stamp

    def check(self) -> None:
        """Nobody has written to blocks since they were released."""
        for block, stamp in self._left.items():
            assert [it for it in self.arrays if not (it[block] == stamp).all()] == []

    def begin(self, cluster_id: int) -> tuple[BlockLease, int]:
        """Give some blocks to another request, which a peer works on from here on."""
        self._stamp += 10
        first = 4 * PEERS.index(cluster_id)
        blocks = self.random.sample(range(first, first + 4), self.random.randint(1, 4))
        self.fill(blocks, self._stamp)
        for it in blocks:
            self._left.pop(it, None)
        ttl_ms = self.random.choice([None, None, 0.3, 3.0, 1000.0])
        lease = self.owner.lease_blocks(self.cache, blocks, ttl_ms=ttl_ms)
        pushes = self.random.random() < 0.6
        job = lease.to_bytes(), self._stamp, pushes
        self.peers[cluster_id].run("jobs.put(job)", job=job)
        return lease, self._stamp

    def end(self, lease: BlockLease, stamp: int) -> None:
        """Release it; the blocks are another's at once."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                self.owner.release(lease)
                break
            except LLMException as error:
                if error.status_code is not LLMStatusCode.LLM_TIMEOUT:
                    raise
                assert time.monotonic() < deadline
                self.counts["held up"] += 1
                for it in self.peers.values():
                    it.resume()
        self.fill(lease.blocks, stamp + 5)
        self._left |= dict.fromkeys(lease.blocks, stamp + 5)

    def disturb(self, cluster_id: int) -> None:
        """Stop the peer, or kill it, or more often neither."""
        fate, peer = self.random.random(), self.peers[cluster_id]
        if fate < 0.1:
            peer.stop()
        elif fate < 0.12:
            peer.kill()

    def mend(self, cluster_id: int) -> None:
        """Have the peer go on, or another in its stead; sometimes wait until it has done all."""
        peer = self.peers[cluster_id]
        if peer.dead:
            self.owner.unlink_clusters([cluster_id], 10_000, force=True)
            self.peers[cluster_id] = self.make(cluster_id)
            return
        peer.resume()
        if self.random.random() < 0.7:
            peer.run("jobs.join()")
        found = peer.run("result = outcomes[:]; del outcomes[: len(result)]")
        self.counts.update(found)


@pytest.mark.over_tcp
@pytest.mark.over_ucx
@pytest.mark.over_hccl
@pytest.mark.slow
def test_each_word_is_whose_it_says(make_engine: MakeEngine, make_peer: MakePeer) -> None:
    scene = Scene(make_engine(OWNER, **PATIENT), make_peer, seed=ROUNDS)
    for _ in range(ROUNDS):
        leases = {it: scene.begin(it) for it in PEERS}
        for _ in range(scene.random.choice([0, 1, 5, 20, 60])):  # some 0.1 ms each
            scene.peers[PEERS[0]].run("")
        for it in PEERS:
            scene.disturb(it)
        for lease, stamp in leases.values():
            scene.end(lease, stamp)
        for it in PEERS:
            scene.mend(it)
        scene.check()
    assert scene.counts["WRONG"] == 0
    assert scene.counts["pulled"] > 0
    assert scene.counts["pushed"] > 0
    assert scene.counts["LLM_KV_CACHE_NOT_EXIST"] > 0
