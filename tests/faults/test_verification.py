"""Verification: bytes that arrive in a wrong place are found by reading them again."""

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
from tests.faults.leased import (
    MINE,
    NOT_EXIST,
    RELEASED,
    THEIRS,
    lease_at,
    make_local_cache,
    their_arrays,
)
from tests.faults.peer import Peer
from tests.faults.transfers import LONG_MS, link
from tests.support.refusals import refused
from tests.support.wrappers import swap_at

pytestmark = [pytest.mark.over_tcp, pytest.mark.over_ucx]
DIFFERS = "verify: layer 0>0 tensor 1>1 block .* is not the same on both sides"
SWAPPED = 2  # of two blocks in each tensor: the first block of tensor 1

ways = pytest.mark.parametrize("way", ["call", "task", "option"])
memories = pytest.mark.parametrize("memory", ["allocated", "registered"])
directions = pytest.mark.parametrize("direction", ["pull", "push"])


class SwapOnce:
    """A wrapper that swaps two descriptors in the first transfer.

    Verification uses another backend.
    """

    def __init__(self, machine: str, direction: str = "pull", memory: str = "allocated") -> None:
        self.num_wrapped = 0
        # The first backend is of plain copies, which read arenas of another process.
        self.swapped_index = (
            1 if (machine, direction, memory) == ("host", "pull", "allocated") else 2
        )

    def __call__(self, backend: Backend) -> Backend:
        self.num_wrapped += 1
        return swap_at(backend, SWAPPED) if self.num_wrapped == self.swapped_index else backend


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
def test_swapped_blocks_are_found(
    make_engine: MakeEngine, peer: Peer, machine: str, direction: str, memory: str, way: str
) -> None:
    with Transfers(2, SwapOnce(machine, direction, memory)) as transfers:
        options = {"verify": "all"} if way == "option" else {}
        user, lease = make_engine(2, transfers=transfers, **options), lease_at(peer, memory)
        cache, arrays = make_local_cache(user, 2)
        link(user, peer)
        move = mover(user, direction, way, CacheIndex(1, lease.cache_id), cache)
        with refused("LLM_FAILED", DIFFERS):
            move()
        move()  # the wrapper swaps once only
        if direction == "pull":
            assert all(
                (array[1] == to[2]).all() for array, to in zip(arrays, pattern(1), strict=True)
            )
        else:
            assert [item[2] for item in their_arrays(peer)] == [
                value[1].tolist() for value in pattern(2)
            ]


def test_swapped_blocks_pass_without_verification(
    make_engine: MakeEngine, peer: Peer, machine: str
) -> None:
    """Without verification the call succeeds, so the test before has found a real swap."""
    with Transfers(2, SwapOnce(machine)) as transfers:
        user, lease = make_engine(2, transfers=transfers), lease_at(peer)
        cache, arrays = make_local_cache(user)
        link(user, peer)
        user.pull_blocks(CacheIndex(1, lease.cache_id), cache, THEIRS, MINE)
        wrong = [
            number
            for number, (pair, to) in enumerate(zip(arrays, pattern(1), strict=True))
            if (pair[1] != to[2]).any()
        ]
        assert wrong == [1]


def test_layers_are_verified(make_engine: MakeEngine, peer: Peer, machine: str) -> None:
    pairs = KvCacheExtParam(tensor_num_per_layer=2)
    with Transfers(2, SwapOnce(machine, "push")) as transfers:
        user, lease = make_engine(2, transfers=transfers), lease_at(peer)
        cache, _ = make_local_cache(user, 5)
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


def test_the_end_of_a_lease_is_reported_before_verification(
    make_engine: MakeEngine, peer: Peer
) -> None:
    user, lease = make_engine(2), lease_at(peer)
    cache, _ = make_local_cache(user)
    link(user, peer)
    user.pull_blocks(lease, cache, None, MINE, verify=True)
    peer.run("datadist.release(lease)")
    with refused(NOT_EXIST, RELEASED):
        user.pull_blocks(lease, cache, None, MINE, verify=True)


def test_fingerprints_agree(make_engine: MakeEngine, peer: Peer) -> None:
    user, lease = make_engine(2), lease_at(peer)
    cache, arrays = make_local_cache(user)
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
    message = peer.run(
        """
        try:
            datadist.fingerprint(lease)
        except LLMException as error:
            result = str(error)
        """
    )
    assert "lease 1 of cmpl-3 was released" in message
    with refused("LLM_PARAM_INVALID", "only its owner"):
        user.fingerprint(lease)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((2, 4, 8, 2, 16), "kv block token head dim"), ((1, 1, 4, 8), None)],
)
def test_fingerprints_are_of_blocks_in_any_layout(
    make_engine: MakeEngine, shape: tuple[int, ...], layout: str | None
) -> None:
    """The fingerprints equal those of a cache whose first dimension counts blocks."""
    user = make_engine(2)
    axis = shape.index(4)
    permuted = user.allocate_blocks_cache(
        CacheDesc(2, shape, DataType.DT_INT8, batch_dim_index=axis, kv_tensor_format=layout)
    )
    plain = user.allocate_blocks_cache(CacheDesc(2, (4, math.prod(shape) // 4), DataType.DT_INT8))
    chance = np.random.default_rng(1)
    for permuted_array, plain_array in zip(user.arrays(permuted), user.arrays(plain), strict=True):
        permuted_array[...] = chance.integers(-128, 128, shape)
        for block in range(4):
            plain_array[block] = permuted_array.take(block, axis=axis).ravel()
    assert user.fingerprint(permuted) == user.fingerprint(plain)
    assert len(set(user.fingerprint(permuted))) == 4


@pytest.mark.parametrize("wrong", ["", "on", "sample:1/0", "sample:2/3", "sample:1/-4", "all "])
def test_invalid_options_are_refused(make_engine: MakeEngine, wrong: str) -> None:
    with refused("LLM_PARAM_INVALID", 'must be "off", "all" or'):
        make_engine(2, verify=wrong)
