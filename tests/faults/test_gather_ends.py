"""A gather of three sources that ends at once when one fails while the others stand still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvnative._backend import Backend
from kvplan import (
    CacheDesc,
    CacheIndex,
    DataType,
    GatherError,
    GatherTask,
    LlmDataDist,
    Rows,
    Shard,
    Transfer,
    Transfers,
)
from tests.faults.conftest import MakeEngine, MakePeer
from tests.faults.transfers import link
from tests.support.wrappers import fail_at, hold

NUM_SOURCES = 3
WAIT_MS = 20_000  # reached only by a hanging test


def heads(first: int, count: int) -> CacheDesc:
    """Return a cache description with some of the heads of the model."""
    return CacheDesc(
        1,
        (4, count, 4, 8),
        DataType.DT_INT32,
        kv_tensor_format="block head token dim",
        shard=Shard(range(1), range(first, first + count), 1, NUM_SOURCES),
    )


OFFER = """
arrays = [np.zeros(desc.shape, np.int32)]
result = datadist.register_blocks_cache(desc, arrays).cache_id
"""
Begin = Callable[[int | None], tuple[LlmDataDist, GatherTask]]


@pytest.fixture
def begin(make_engine: MakeEngine, make_peer: MakePeer) -> Begin:
    """A function that begins a gather whose sources stand still, except a victim, which fails."""

    def make(victim: int | None) -> tuple[LlmDataDist, GatherTask]:
        sides: list[Backend] = []

        def wrap(backend: Backend) -> Backend:
            sides.append(backend)  # plain copies come first, then a backend for each source
            return fail_at(backend, 1) if len(sides) - 2 == victim else hold(backend)

        user = make_engine(9, transfers=Transfers(1, wrap=wrap))
        mine = user.allocate_blocks_cache(heads(0, NUM_SOURCES))
        peers = [make_peer(head + 1) for head in range(NUM_SOURCES)]
        sources = [
            CacheIndex(head + 1, peer.run(OFFER, desc=heads(head, 1)))
            for head, peer in enumerate(peers)
        ]
        link(user, *peers)
        user.completions()
        rows = [Rows(key, [0, 1]) for key in sources]
        return user, user.submit(Transfer(rows, Rows(mine, [2, 3])))

    return make


def waited(_: LlmDataDist, task: GatherTask) -> None:
    task.wait()


def awaited(_: LlmDataDist, task: GatherTask) -> None:
    asyncio.run(task.coroutine())


def taken(user: LlmDataDist, task: GatherTask) -> None:
    """Take the outcome from the completions, without waiting for the task itself."""
    assert user.completions().wait(WAIT_MS)
    assert list(user.completions()) == [task]
    task.result(0)


@pytest.mark.over_tcp
@pytest.mark.parametrize("learn", [waited, awaited, taken])
@pytest.mark.parametrize("victim", range(NUM_SOURCES))
def test_a_failure_stops_the_other_sources_at_once(
    begin: Begin, victim: int, learn: Callable[[LlmDataDist, GatherTask], None]
) -> None:
    user, task = begin(victim)
    with pytest.raises(GatherError) as error:
        learn(user, task)
    assert [*error.value.failed] == [victim]
    assert sorted(error.value.stopped) == [index for index in range(NUM_SOURCES) if index != victim]
    assert task.done
    assert user.metrics()["in_flight"] == 0


@pytest.mark.parametrize("learn", [awaited, taken])
def test_a_cancelled_gather_ends_every_wait(
    begin: Begin, learn: Callable[[LlmDataDist, GatherTask], None]
) -> None:
    user, task = begin(None)
    assert not task.wait_done(0)
    task.cancel()
    with pytest.raises(GatherError) as error:
        learn(user, task)
    assert [*error.value.failed] == [*range(NUM_SOURCES)]
    assert not error.value.stopped
