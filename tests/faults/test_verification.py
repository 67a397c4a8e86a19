"""Bytes that arrive in a wrong place are found by who reads them again."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from kvnative._backend import Backend
from kvplan import (
    Cache,
    CacheDesc,
    CacheIndex,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    Rows,
    Transfer,
    Transfers,
)
from tests.faults.conftest import MakeEngine
from tests.faults.contents import pattern
from tests.faults.leased import MINE, NOT_EXIST, RELEASED, THEIRS, here, lease_at, there
from tests.faults.peer import Peer
from tests.faults.transfers import LONG_MS, link
from tests.support.refusals import refused
from tests.support.wrappers import swap_at

pytestmark = [pytest.mark.over_tcp, pytest.mark.over_ucx]
DIFFERS = "verify: layer 0>0 tensor 1>1 block .* is not the same on both sides"
SWAPPED = 2  # of two blocks in each tensor: the first of tensor 1

ways = pytest.mark.parametrize("way", ["call", "task", "option"])
memories = pytest.mark.parametrize("memory", ["allocated", "registered"])
directions = pytest.mark.parametrize("direction", ["pull", "push"])


class SwapOnce:
    """Wraps what moves the first transfer with a peer; what reads it again is another backend."""

    def __init__(self, machine: str, direction: str = "pull", memory: str = "allocated") -> None:
        self.seen = 0
        # The first is of plain copies: arenas of another process are read so.
        self.which = 1 if (machine, direction, memory) == ("host", "pull", "allocated") else 2

    def __call__(self, backend: Backend) -> Backend:
        self.seen += 1
        return swap_at(backend, SWAPPED) if self.seen == self.which else backend


def mover(
    user: LlmDataDist, direction: str, way: str, index: CacheIndex, cache: Cache
) -> Callable[[], None]:
    verify = way != "option"
    submit, execute = (
        (
            partial(user.submit, Transfer(Rows(index, THEIRS), Rows(cache, MINE)), verify=verify),
            partial(user.pull_blocks, index, cache, THEIRS, MINE, verify=verify),
        )
        if direction == "pull"
        else (
            partial(user.submit, Transfer(Rows(cache, MINE), Rows(index, THEIRS)), verify=verify),
            partial(user.push_blocks, cache, index, MINE, THEIRS, verify=verify),
        )
    )
    return (lambda: submit().wait(LONG_MS)) if way == "task" else execute


@ways
@memories
@directions
def test_swapped(
    make_engine: MakeEngine, peer: Peer, machine: str, direction: str, memory: str, way: str
) -> None:
    with Transfers(2, SwapOnce(machine, direction, memory)) as transfers:
        options = {"verify": "all"} if way == "option" else {}
        user, lease = make_engine(2, transfers=transfers, **options), lease_at(peer, memory)
        cache, arrays = here(user, 2)
        link(user, peer)
        move = mover(user, direction, way, CacheIndex(1, lease.cache_id), cache)
        with refused("LLM_FAILED", DIFFERS):
            move()
        move()  # the wrapper does it once
        if direction == "pull":
            assert all(
                (array[1] == to[2]).all() for array, to in zip(arrays, pattern(1), strict=True)
            )
        else:
            assert [item[2] for item in there(peer)] == [value[1].tolist() for value in pattern(2)]


def test_nobody_asked(make_engine: MakeEngine, peer: Peer, machine: str) -> None:
    """What the test before finds is there: without it the call succeeds."""
    with Transfers(2, SwapOnce(machine)) as transfers:
        user, lease = make_engine(2, transfers=transfers), lease_at(peer)
        cache, arrays = here(user)
        link(user, peer)
        user.pull_blocks(CacheIndex(1, lease.cache_id), cache, THEIRS, MINE)
        wrong = [
            t
            for t, (pair, to) in enumerate(zip(arrays, pattern(1), strict=True))
            if (pair[1] != to[2]).any()
        ]
        assert wrong == [1]


def test_layer_by_layer(make_engine: MakeEngine, peer: Peer, machine: str) -> None:
    pairs = KvCacheExtParam(tensor_num_per_layer=2)
    with Transfers(2, SwapOnce(machine, "push")) as transfers:
        user, lease = make_engine(2, transfers=transfers), lease_at(peer)
        cache, _ = here(user, 5)
        link(user, peer)
        for fails in (True, False):
            task = user.layered(
                Transfer(Rows(cache, MINE), Rows(lease), layers=pairs),
                notify=b"moved",
                notify_failure=b"not moved",
                verify=True,
            )
            for layer in task.layers:
                task.ready(layer)
            if fails:
                with refused("LLM_FAILED", "is not the same on both sides"):
                    task.wait(LONG_MS)
            else:
                task.wait(LONG_MS)
        told = "result = [next(iter(datadist.notifications())).data for _ in range(2)]"
        assert sorted(peer.run(told)) == [b"moved", b"not moved"]


def test_a_lease_that_ended_comes_first(make_engine: MakeEngine, peer: Peer) -> None:
    user, lease = make_engine(2), lease_at(peer)
    cache, _ = here(user)
    link(user, peer)
    user.pull_blocks(lease, cache, None, MINE, verify=True)
    peer.run("datadist.release(lease)")
    with refused(NOT_EXIST, RELEASED):
        user.pull_blocks(lease, cache, None, MINE, verify=True)


def test_fingerprints_agree(make_engine: MakeEngine, peer: Peer) -> None:
    user, lease = make_engine(2), lease_at(peer)
    cache, arrays = here(user)
    link(user, peer)
    user.pull_blocks(lease, cache, None, MINE)
    theirs = peer.run("result = datadist.fingerprint(lease)")
    assert user.fingerprint(cache, MINE) == theirs
    assert len(set(theirs)) == 2
    assert peer.run("result = datadist.fingerprint(lease, [0])") == theirs[1:]
    arrays[-1].view(np.uint8).reshape(4, -1)[1, -1] ^= 1
    changed = user.fingerprint(cache)
    assert (changed[1] != theirs[0], changed[3]) == (True, theirs[1])
    peer.run("datadist.release(lease)")
    told = peer.run(
        """
        try:
            datadist.fingerprint(lease)
        except LLMException as error:
            result = str(error)
        """
    )
    assert "lease 1 of cmpl-3 was released" in told
    with refused("LLM_PARAM_INVALID", "only its owner"):
        user.fingerprint(lease)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((2, 4, 8, 2, 16), "kv block token head dim"), ((1, 1, 4, 8), None)],
)
def test_fingerprints_are_of_blocks_wherever_they_lie_in_a_tensor(
    make_engine: MakeEngine, shape: tuple[int, ...], layout: str | None
) -> None:
    """As those of a cache whose first dimension counts blocks."""
    user = make_engine(2)
    axis = shape.index(4)
    lying = user.allocate_blocks_cache(
        CacheDesc(2, shape, DataType.DT_INT8, batch_dim_index=axis, kv_tensor_format=layout)
    )
    plain = user.allocate_blocks_cache(CacheDesc(2, (4, math.prod(shape) // 4), DataType.DT_INT8))
    chance = np.random.default_rng(1)
    for one, other in zip(user.arrays(lying), user.arrays(plain), strict=True):
        one[...] = chance.integers(-128, 128, shape)
        for block in range(4):
            other[block] = one.take(block, axis=axis).ravel()
    assert user.fingerprint(lying) == user.fingerprint(plain)
    assert len(set(user.fingerprint(lying))) == 4


@pytest.mark.parametrize("wrong", ["", "on", "sample:1/0", "sample:2/3", "sample:1/-4", "all "])
def test_an_option_that_is_none(make_engine: MakeEngine, wrong: str) -> None:
    with refused("LLM_PARAM_INVALID", 'must be "off", "all" or'):
        make_engine(2, verify=wrong)
