"""Leased blocks that their owner moves: no peer succeeds with the bytes of an old place."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from kvplan import (
    BlockLease,
    Cache,
    CacheDesc,
    DataType,
    GatherError,
    KvCacheExtParam,
    LlmDataDist,
    LLMException,
    Planned,
    Rows,
    Transfer,
)
from kvplan.planning.segments import DEFAULT_COALESCE
from tests.faults.conftest import Attempt, MakeEngine
from tests.faults.gate import Gate
from tests.faults.leased import NOT_EXIST, lease_at, make_local_cache, mover, their_arrays
from tests.faults.peer import Peer
from tests.faults.transfers import LONG_MS, link
from tests.support.refusals import refused

pytestmark = [pytest.mark.over_tcp, pytest.mark.over_ucx, pytest.mark.over_hccl]

GONE = "lease 1 of cmpl-3 was released or moved"
DESC = CacheDesc(2, (16, 1, 1, 32), DataType.DT_INT32, kv_tensor_format="block token head dim")
LAYERS = KvCacheExtParam(None, None, 1)
OWNER = """
desc = CacheDesc(2, (16, 1, 1, 32), DataType.DT_INT32, kv_tensor_format="block token head dim")
cache = datadist.allocate_blocks_cache(desc)
arrays = datadist.arrays(cache)
leases = {}

def fill(block, token):
    for number, array in enumerate(arrays):
        array[block] = 2 * token + number

def copy(moves):
    was = [array.copy() for array in arrays]
    for array, old in zip(arrays, was):
        for source, target in moves.items():
            array[target] = old[source]
    for source in set(moves) - set(moves.values()):
        fill(source, 9999)

def lease(tag, blocks, tokens):
    for block, token in zip(blocks, tokens):
        fill(block, token)
    leases[tag] = datadist.lease_blocks(cache, blocks, tag=tag)
    return leases[tag].to_bytes()

def move(moves, tags, follow):
    for where in [cache] if tags is None else [leases[tag] for tag in tags]:
        datadist.moved(where, moves, follow=follow, copy=lambda: copy(moves))
"""
"""Code for the owner: blocks of 32 equal numbers, which name a token and the tensor.

9999 stands for no token.
"""


@pytest.fixture
def owner(make_peer: Callable[..., Peer]) -> Peer:
    peer = make_peer(1)
    peer.run(OWNER)
    return peer


def taken(cache: list[Any], blocks: list[int]) -> list[int]:
    """Return the tokens in blocks, after checking that both tensors have the same ones."""
    tokens = []
    for block in blocks:
        token = int(cache[0][block].flat[0]) // 2
        for number, array in enumerate(cache):
            assert (array[block] == 2 * token + number).all(), (block, token)
        tokens.append(token)
    return tokens


def test_peers_follow_by_every_verb(make_engine: MakeEngine, owner: Peer) -> None:
    user = make_engine(2)
    cache = user.allocate_blocks_cache(DESC)
    arrays = user.arrays(cache)
    link(user, owner)
    before = BlockLease.from_bytes(owner.run("result = lease('a', [14, 3, 5], [70, 71, 72])"))
    # from now on the pair is known
    user.pull_blocks(before, cache, None, [0, 1, 2], timeout_ms=LONG_MS)
    latest = BlockLease.from_bytes(
        owner.run(
            """
            moves = {14: 4, 5: 3, 3: 5}
            (now,) = datadist.moved(cache, moves, copy=lambda: copy(moves))
            result = now.to_bytes()
            """
        )
    )
    assert (latest.blocks, latest.moves, latest.lease_id) == ((4, 5, 3), 1, before.lease_id)
    for lease in (before, latest):
        rows, number = Rows(lease), 14 if lease is before else 4
        user.pull_blocks(lease, cache, None, [6, 7, 8], timeout_ms=LONG_MS)
        user.submit(Transfer(rows, Rows(cache, [9, 10, 11]))).wait(LONG_MS)
        user.run({"one": Transfer(Rows(lease, [number]), Rows(cache, [12]))}, timeout_ms=LONG_MS)
        user.run(Transfer([Rows(lease, [number])], Rows(cache, [13])), timeout_ms=LONG_MS)
        task = user.layered(Transfer(rows, Rows(cache, [1, 2, 0]), layers=LAYERS))
        for layer in task.layers:
            task.ready(layer)
        task.wait(LONG_MS)
        assert taken(arrays, [6, 7, 8]) == taken(arrays, [9, 10, 11]) == [70, 71, 72]
        assert taken(arrays, [12, 13, 1, 2, 0]) == [70, 70, 70, 71, 72]
        for array in arrays:
            array[:] = 0
    with refused("LLM_PARAM_INVALID", "=4 is not a block of lease 1"):
        user.pull_blocks(before, cache, [4], [6])
    for number, array in enumerate(arrays):
        array[6] = 2 * 80 + number
    # block 14 is an old number of the lease
    user.push_blocks(cache, before, [6], [14], timeout_ms=LONG_MS)
    assert owner.run("result = [int(array[4].flat[0]) for array in arrays]") == [160, 161]
    assert owner.run("result = [int(array[14].flat[0]) for array in arrays]") == [19998, 19999]


def test_a_lease_that_does_not_follow_ends(make_engine: MakeEngine, owner: Peer) -> None:
    user = make_engine(2)
    cache = user.allocate_blocks_cache(DESC)
    link(user, owner)
    ended, other = map(
        BlockLease.from_bytes,
        owner.run(
            """
            ends = []
            datadist.on_released(lambda lease, end: ends.append((lease.tag, end.value)))
            result = lease("a", [14, 3], [70, 71]), lease("b", [6], [72])
            move({14: 4}, None, False)
            """
        ),
    )
    assert owner.run("result = ends") == [("a", "moved")]
    for _ in range(2):
        with refused(NOT_EXIST, "lease 1 of a was released or moved"):
            user.pull_blocks(ended, cache, None, [0, 1], timeout_ms=LONG_MS)
    user.pull_blocks(other, cache, None, [0], timeout_ms=LONG_MS)
    assert taken(user.arrays(cache), [0]) == [72]


def test_only_one_of_two_leases_of_a_block_moves(make_engine: MakeEngine, owner: Peer) -> None:
    user = make_engine(2)
    cache = user.allocate_blocks_cache(DESC)
    first, second = map(
        BlockLease.from_bytes,
        owner.run(
            """
            result = lease("a", [14, 3], [70, 71]), lease("b", [14], [70])
            fill(4, 75)
            datadist.moved(leases["a"], {14: 4})
            """
        ),
    )
    link(user, owner)  # after the move
    user.pull_blocks(first, cache, [14, 3], [0, 1], timeout_ms=LONG_MS)
    user.pull_blocks(second, cache, None, [2], timeout_ms=LONG_MS)
    assert taken(user.arrays(cache), [0, 1, 2]) == [75, 71, 70]
    owner.run("datadist.release(leases['a'])")  # an earlier value of the lease
    with refused(NOT_EXIST, "lease 1 of a was released or moved"):
        user.pull_blocks(first, cache, None, [0, 1], timeout_ms=LONG_MS)


def test_a_plan_from_before_the_move_is_refused(make_engine: MakeEngine, owner: Peer) -> None:
    user = make_engine(2)
    cache = user.allocate_blocks_cache(DESC)
    link(user, owner)
    lease = BlockLease.from_bytes(owner.run("result = lease('a', [14, 3], [70, 71])"))
    plan = user.plan(Transfer(Rows(lease), Rows(cache, [0, 1])))
    user.run(Planned(plan, lease, cache), timeout_ms=LONG_MS)
    latest = BlockLease.from_bytes(
        owner.run("move({14: 3, 3: 14}, None, True); result = datadist.leases()[0].to_bytes()")
    )
    with refused(NOT_EXIST, "src=lease 1 of a has moved to other blocks: plan again"):
        user.run(Planned(plan, lease, cache), timeout_ms=LONG_MS)
    again = user.plan(Transfer(Rows(lease), Rows(cache, [0, 1])))
    user.run(Planned(again, latest, cache), timeout_ms=LONG_MS)
    assert taken(user.arrays(cache), [0, 1]) == [70, 71]


def test_a_leased_slot_moves(make_engine: MakeEngine, owner: Peer) -> None:
    user = make_engine(2)
    cache = user.allocate_cache(DESC)
    link(user, owner)
    lease = BlockLease.from_bytes(
        owner.run(
            """
            slots = datadist.allocate_cache(desc)
            for number, array in enumerate(datadist.arrays(slots)):
                array[2] = 2 * 70 + number
                array[5] = 2 * 70 + number
            made = datadist.lease_blocks(slots, [2], tag="a")
            result = made.to_bytes()
            """
        )
    )
    user.pull_cache(lease, cache, timeout_ms=LONG_MS)
    owner.run(
        """
        datadist.moved(slots, {2: 5})
        for array in datadist.arrays(slots):
            array[2] = 9999
        """
    )
    for slot in (None, 2):
        user.run(Transfer(Rows(lease, slot=slot), Rows(cache, slot=1)), timeout_ms=LONG_MS)
        assert taken(user.arrays(cache), [1]) == [70]


def test_a_gather_whose_lease_moves_after_it_was_planned(
    make_engine: MakeEngine, owner: Peer
) -> None:
    """The gather is planned again for the new places, natively or by the planner."""
    user = make_engine(2)
    cache = user.allocate_blocks_cache(DESC)
    link(user, owner)
    for coalesce in (False, True, DEFAULT_COALESCE):
        lease = BlockLease.from_bytes(owner.run("result = lease('a', [14, 3], [70, 71])"))
        moves = iter(["move({14: 4}, ['a'], True)"])
        remove = user.on_plan(lambda _, moves=moves: [*map(owner.run, moves)])
        sources = [Rows(lease, [14, 3])]
        with suppress(GatherError):  # over a transport whose peer checks the lease
            user.run(Transfer(sources, Rows(cache, [0, 1]), coalesce=coalesce), timeout_ms=LONG_MS)
            assert taken(user.arrays(cache), [0, 1]) == [70, 71]
        remove()
        assert next(moves, None) is None


@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize("follow", [True, False])
def test_a_lease_moves_during_a_transfer(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt, direction: str, follow: bool
) -> None:
    """A running transfer ends with an error, or has the bytes of the new place."""
    user, lease = gated(2), lease_at(peer)
    cache, arrays = make_local_cache(user, None if direction == "pull" else 2)
    link(user, peer)
    call = attempt(mover(user, direction, lease, cache))
    gate.wait()
    peer.run(
        """
        def copy():
            for array in arrays:
                array[3] = array[2]
                array[2] = 9
        datadist.moved(cache, {2: 3}, follow=follow, copy=copy)
        """,
        follow=follow,
    )
    wanted = peer.run("result = [[array[3].tolist(), array[0].tolist()] for array in arrays]")
    gate.open()
    error = call.result(30)
    if not follow:
        assert error is not None
        assert error.status_code is NOT_EXIST
        assert GONE in str(error)
    elif direction == "push":  # the push follows, and no byte has gone to the old place
        assert error is None
        assert [array[2] for array in their_arrays(peer)] == [[9] * 64] * 8
        pushed = [[array[1].tolist(), array[3].tolist()] for array in arrays]
        assert [[array[3], array[0]] for array in their_arrays(peer)] == pushed
    else:
        assert error is None
        assert [[array[1].tolist(), array[3].tolist()] for array in arrays] == wanted


def test_a_submitted_transfer_fails_and_the_next_follows(
    gated: MakeEngine, owner: Peer, gate: Gate, attempt: Attempt
) -> None:
    user = gated(2)
    cache = user.allocate_blocks_cache(DESC)
    link(user, owner)
    lease = BlockLease.from_bytes(owner.run("result = lease('a', [14, 3], [70, 71])"))
    rows = Transfer(Rows(lease), Rows(cache, [0, 1]))
    outcome = attempt(lambda: user.submit(rows).wait(LONG_MS))
    gate.wait()
    owner.run("move({14: 4}, None, True)")
    gate.open()
    error = outcome.result(30)
    assert error is not None
    assert error.status_code is NOT_EXIST
    assert "lease 1 of a was released or moved" in str(error)
    user.submit(rows).wait(LONG_MS)
    assert taken(user.arrays(cache), [0, 1]) == [70, 71]


class Model:
    """A model of the leases: a token for each block of each lease, wherever the block is."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.blocks: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.received: dict[str, BlockLease] = {}  # as the peer received it, at any time
        self.count = 0

    def free(self) -> list[int]:
        used = {block for blocks in self.blocks.values() for block in blocks}
        return [block for block in range(16) if block not in used]

    def lease(self, owner: Peer) -> None:
        if not (free := self.free()):
            return
        size = self.random.randint(1, min(4, len(free)))
        tag, self.count = f"r{self.count}", self.count + size
        self.blocks[tag] = self.random.sample(free, size)
        self.tokens[tag] = list(range(self.count - size, self.count))
        blob = owner.run(
            "result = lease(tag, blocks, tokens)",
            tag=tag,
            blocks=self.blocks[tag],
            tokens=self.tokens[tag],
        )
        self.received[tag] = BlockLease.from_bytes(blob)

    def release(self, owner: Peer) -> None:
        if self.blocks:
            tag = self.random.choice([*self.blocks])
            owner.run("datadist.release(leases[tag])", tag=tag)
            del self.blocks[tag], self.tokens[tag]

    def move(self, owner: Peer) -> None:
        """Move some blocks to free ones, or exchange blocks, of all leases or of one."""
        used = [block for blocks in self.blocks.values() for block in blocks]
        if not used:
            return
        sources = self.random.sample(used, self.random.randint(1, len(used)))
        if self.random.random() < 0.5:
            targets = self.random.sample(sources, len(sources))
        else:
            free = self.free()
            sources = sources[: len(free)]
            targets = self.random.sample(free, len(sources))
        moves = dict(zip(sources, targets, strict=True))
        hit = [tag for tag, blocks in self.blocks.items() if not moves.keys().isdisjoint(blocks)]
        follow = self.random.random() < 0.9
        tags = [hit[0]] if len(hit) == 1 and self.random.random() < 0.5 else None
        owner.run("move(moves, tags, follow)", moves=moves, tags=tags, follow=follow)
        for tag in hit:
            self.blocks[tag] = [moves.get(block, block) for block in self.blocks[tag]]
            if not follow:
                del self.blocks[tag], self.tokens[tag]

    def read(self, user: LlmDataDist, cache: Cache) -> bool:
        """Pull some blocks of any lease, and check the tokens after a success."""
        if not self.received:
            return False
        live = self.blocks and self.random.random() < 0.9
        tag = self.random.choice([*(self.blocks if live else self.received)])
        lease = self.received[tag]
        places = [place for place in range(len(lease.blocks)) if self.random.random() < 0.7]
        blocks = (
            None if len(places) == len(lease.blocks) else [lease.blocks[item] for item in places]
        )
        for array in user.arrays(cache):
            array[:] = 0
        own_blocks = [*range(len(places))]
        try:
            if self.random.random() < 0.5:
                user.pull_blocks(lease, cache, blocks, own_blocks, timeout_ms=LONG_MS)
            else:
                user.submit(Transfer(Rows(lease, blocks), Rows(cache, own_blocks))).wait(LONG_MS)
        except LLMException as error:
            if error.status_code is not NOT_EXIST or tag in self.tokens:
                raise
            return False
        if not own_blocks:
            return False
        assert taken(user.arrays(cache), own_blocks) == [
            self.tokens[tag][place] for place in places
        ]
        return True


@pytest.mark.parametrize("seed", range(3))
def test_every_success_has_the_tokens_asked_for(
    make_engine: MakeEngine, owner: Peer, seed: int
) -> None:
    user, model = make_engine(2), Model(seed)
    cache = user.allocate_blocks_cache(DESC)
    link(user, owner)
    read = 0
    for _ in range(160):
        step = model.random.choice(
            ["lease", "lease", "release", "move", "move", "read", "read", "read"]
        )
        if step == "read":
            read += model.read(user, cache)
        else:
            getattr(model, step)(owner)
    assert read > 20
    assert {
        item.tag
        for item in map(
            BlockLease.from_bytes, owner.run("result = [it.to_bytes() for it in datadist.leases()]")
        )
    } == model.blocks.keys()


def test_an_owner_compacts_while_a_peer_reads(make_engine: MakeEngine, owner: Peer) -> None:
    """Each read succeeds with the bytes of its tokens, or fails as the lease moved meanwhile."""
    user = make_engine(2)
    cache = user.allocate_blocks_cache(DESC)
    link(user, owner)
    lease = BlockLease.from_bytes(owner.run("result = lease('a', [14, 3, 5], [70, 71, 72])"))
    owner.run(
        """
        from threading import Event, Thread
        stopping, rounds = Event(), []
        def compact():
            while not stopping.is_set():
                blocks = datadist.leases()[0].blocks
                free = [it for it in range(16) if it not in blocks]
                move(dict(zip(blocks, free[len(rounds) % 9:])), None, True)
                rounds.append(1)
        thread = Thread(target=compact)
        thread.start()
        """
    )
    arrays = user.arrays(cache)
    read = 0
    for _ in range(200):
        for array in arrays:
            array[:3] = 0
        try:
            user.pull_blocks(lease, cache, None, [0, 1, 2], timeout_ms=LONG_MS)
        except LLMException as error:
            if error.status_code is not NOT_EXIST:
                raise
            continue
        assert taken(arrays, [0, 1, 2]) == [70, 71, 72]
        read += 1
    assert owner.run("stopping.set(); thread.join(); result = len(rounds)") > 0
