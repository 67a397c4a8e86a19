"""Faults of pushes by layers: each destination fails separately, and never reports a success."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvnative._backend import Backend
from kvplan import (
    Cache,
    CacheDesc,
    CacheIndex,
    DataType,
    LayerTask,
    LinkState,
    LlmDataDist,
    LLMException,
    LLMStatusCode,
    Rows,
    Shard,
    Transfer,
    Transfers,
)
from tests.datadist.layers import ready, wait_until
from tests.faults.conftest import Attempt, MakeEngine, MakePeer
from tests.faults.contents import pattern
from tests.faults.gate import Gate
from tests.faults.outcomes import unconfirmed
from tests.faults.peer import Peer
from tests.faults.states import link_of, wait_for_state
from tests.faults.transfers import link
from tests.support.refusals import refused
from tests.support.wrappers import delay, fail_at

NUM_LAYERS = 30
DESC = CacheDesc(2 * NUM_LAYERS, (4, 64), DataType.DT_INT32, shard=Shard(num_layers=NUM_LAYERS))
SLOW = {"heartbeat_interval_ms": 20_000, "heartbeat_timeout_ms": 60_000}
MAX_FINALIZE_S = 8.0
FOR_EVER_MS = 600_000

MAKE = """
from kvplan import DataType, Shard
layered = CacheDesc(60, (4, 64), DataType.DT_INT32, shard=Shard(num_layers=30))
cache, arrays = make_cache(datadist, memory, None, layered)
result = cache.cache_id
"""
ENDS = {
    "allocated": "datadist.deallocate_cache(cache)",
    "registered": "datadist.unregister_cache(cache.cache_id)",
}
memories = pytest.mark.parametrize("memory", ["allocated", "registered"])


def offered(peer: Peer, memory: str = "allocated") -> int:
    return int(peer.run(MAKE, memory=memory))


def source(user: LlmDataDist) -> Cache:
    """Return a cache with different values in every tensor."""
    cache = user.allocate_cache(DESC)
    for array, values in zip(user.arrays(cache), pattern(1, DESC), strict=True):
        array[:] = values
    return cache


def failed(task: LayerTask) -> LLMException:
    with pytest.raises(LLMException) as caught:
        task.wait(30_000)
    return caught.value


def arrived(peer: Peer, error: LLMException | None = None, slot: int = 0) -> None:
    """Check that the confirmed descriptors have arrived at the peer."""
    missing = set() if error is None else unconfirmed(error)
    there = np.array(peer.run("result = [it.tolist() for it in arrays]"))
    for tensor, values in enumerate(pattern(1, DESC)):
        if tensor not in missing:
            assert (there[tensor][slot] == values[slot]).all(), f"tensor {tensor} is confirmed"


def counted(user: LlmDataDist) -> dict[str, int]:
    return user.metrics()["operations"]["push_layers"]["statuses"]


@pytest.fixture
def slowed(make_engine: MakeEngine) -> Iterator[Callable[..., LlmDataDist]]:
    """A function that makes an engine whose transfers are wrapped."""
    made = []

    def make(wrap: Callable[[Backend], Backend], **options: object) -> LlmDataDist:
        made.append(Transfers(1, wrap))
        return make_engine(2, transfers=made[-1], **{**SLOW, **options})

    yield make
    for transfers in made:
        transfers.close(cancel=True)


@memories
def test_a_peer_killed_at_layer_7_fails_only_its_own_task(
    make_engine: MakeEngine, make_peer: MakePeer, memory: str
) -> None:
    user, dying, living = make_engine(2, **SLOW), make_peer(1), make_peer(3)
    cache = source(user)
    targets = [CacheIndex(value.cluster_id, offered(value, memory)) for value in (dying, living)]
    link(user, dying, living)
    dying_task, living_task = (
        user.layered(Transfer(Rows(cache), Rows(target))) for target in targets
    )
    for layer in range(NUM_LAYERS):
        if layer == 7:
            dying.kill()
        dying_task.ready(layer)
        living_task.ready(layer)
    living_task.wait()
    arrived(living)
    error = failed(dying_task)
    assert error.status_code is LLMStatusCode.LLM_LINK_FAILED, error
    # Earlier layers are unconfirmed, too, because the peer that could confirm them is gone.
    assert unconfirmed(error) == set(range(2 * NUM_LAYERS))
    assert counted(user) == {"LLM_SUCCESS": 1, "LLM_LINK_FAILED": 1}
    assert user.metrics()["in_flight"] == 0
    wait_for_state(user, 1, LinkState.BROKEN)


@pytest.mark.over_tcp
@memories
def test_a_cache_freed_in_the_middle_is_not_written_any_more(
    make_engine: MakeEngine, peer: Peer, memory: str, machine: str
) -> None:
    user = make_engine(2, **SLOW)
    cache = source(user)
    target = CacheIndex(1, offered(peer, memory))
    link(user, peer)
    task = user.layered(Transfer(Rows(cache), Rows(target)))
    ready(task, range(7))
    wait_until(lambda: 0 in task.progress().done)  # over tcp later layers may find the cache gone
    peer.run(ENDS[memory])
    ready(task, range(7, NUM_LAYERS))
    assert task.done or machine == "tcp"  # over tcp the peer's answer comes later
    error = failed(task)
    assert error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, error
    found = np.array(peer.run("result = [it.tolist() for it in arrays]"))
    assert (found[:2, 0] == np.array(pattern(1, DESC))[:2, 0]).all()
    assert not found[14:].any()
    assert counted(user) == {"LLM_KV_CACHE_NOT_EXIST": 1}


def test_a_forced_unlink_ends_the_task_and_its_writes(make_engine: MakeEngine, peer: Peer) -> None:
    user = make_engine(2, **SLOW)
    cache = source(user)
    target = CacheIndex(1, offered(peer))
    link(user, peer)
    task = user.layered(Transfer(Rows(cache), Rows(target)))
    ready(task, range(7))
    user.unlink_clusters([1], force=True).raise_for_status()
    ready(task, range(7, NUM_LAYERS))
    assert failed(task).status_code is LLMStatusCode.LLM_NOT_YET_LINK
    there = np.array(peer.run("result = [it.tolist() for it in arrays]"))
    assert not there[14:].any()
    assert user.metrics()["in_flight"] == 0


def test_unlink_waits_for_the_layers_and_then_the_link_stays(
    make_engine: MakeEngine, peer: Peer, attempt: Attempt
) -> None:
    user = make_engine(2, **SLOW)
    cache = source(user)
    target = CacheIndex(1, offered(peer))
    link(user, peer)
    task = user.layered(Transfer(Rows(cache), Rows(target)))
    began = time.monotonic()
    (result,) = user.unlink_clusters([1], timeout_ms=200)
    assert result.status is LLMStatusCode.LLM_LINK_BUSY
    assert 0.2 <= time.monotonic() - began < MAX_FINALIZE_S
    # The same from the other end, which is idle although this one is not.
    peer.run(
        """
        (result,) = datadist.unlink_clusters([2], timeout_ms=200)
        assert result.status is LLMStatusCode.LLM_LINK_BUSY, result
        result = None
        """
    )
    unlinking = attempt(lambda: user.unlink_clusters([1], timeout_ms=30_000).raise_for_status())
    ready(task, task.layers)
    assert unlinking.result(30) is None
    task.wait()
    arrived(peer)


def test_finalize_ends_a_task_whose_layers_never_come(make_engine: MakeEngine, peer: Peer) -> None:
    user = make_engine(2, sync_kv_cache_wait_time=200, **SLOW)
    cache = source(user)
    target = CacheIndex(1, offered(peer))
    link(user, peer)
    tasks = [user.layered(Transfer(Rows(cache), Rows(target))) for _ in range(3)]
    ready(tasks[1], range(5))
    began = time.monotonic()
    user.finalize()
    assert 0.2 <= time.monotonic() - began < MAX_FINALIZE_S
    for task in tasks:
        assert task.done
        task.ready(9)
        assert failed(task).status_code in {
            LLMStatusCode.LLM_FAILED,
            LLMStatusCode.LLM_NOT_YET_LINK,
        }
    assert counted(user)["LLM_FAILED"] == 3
    with refused(LLMStatusCode.LLM_ENGINE_FINALIZED):
        user.layered(Transfer(Rows(cache), Rows(target)))
    there = np.array(peer.run("result = [it.tolist() for it in arrays]"))
    assert not there[10:].any()


def test_finalize_waits_for_layers_that_do_come(
    make_engine: MakeEngine, peer: Peer, attempt: Attempt
) -> None:
    user = make_engine(2, sync_kv_cache_wait_time=30_000, **SLOW)
    cache = source(user)
    target = CacheIndex(1, offered(peer))
    link(user, peer)
    task = user.layered(Transfer(Rows(cache), Rows(target)))
    ready(task, range(29))
    ending = attempt(user.finalize)
    while user._engine is not None:
        time.sleep(0.001)
    task.ready(29)
    assert ending.result(30) is None
    task.wait()
    arrived(peer)


def test_a_task_dropped_with_open_layers_is_cancelled(make_engine: MakeEngine, peer: Peer) -> None:
    user = make_engine(2, **SLOW)
    cache = source(user)
    target = CacheIndex(1, offered(peer))
    link(user, peer)
    task = user.layered(Transfer(Rows(cache), Rows(target)))
    ready(task, range(7))
    with pytest.warns(ResourceWarning, match="never ready"):
        del task
    assert user.metrics()["in_flight"] == 0
    assert counted(user) == {"LLM_CANCELLED": 1}
    user.unlink_clusters([1]).raise_for_status()


def test_a_layer_that_fails_ends_the_task(
    slowed: Callable[..., LlmDataDist], peer: Peer, machine: str
) -> None:
    user = slowed(lambda backend: fail_at(backend, 15))
    cache = source(user)
    target = CacheIndex(1, offered(peer))
    link(user, peer)
    task = user.layered(Transfer(Rows(cache), Rows(target)))
    ready(task, task.layers)
    error = failed(task)
    assert error.status_code is LLMStatusCode.LLM_FAILED
    assert error.origin is not None
    assert (error.origin.src_layer, error.origin.src_tensor) == (7, 15)
    assert 15 in unconfirmed(error)
    assert 7 in task.progress().failed
    if machine != "tcp":  # over tcp the next layers are on their way when the outcome comes
        assert set(range(8, NUM_LAYERS)) <= set(task.progress().waiting)
    arrived(peer, error)
    assert counted(user) == {"LLM_FAILED": 1}
    assert user.metrics()["in_flight"] == 0


def test_a_timeout_stops_only_a_task_whose_layers_are_all_ready(
    slowed: Callable[..., LlmDataDist], peer: Peer
) -> None:
    user = slowed(lambda backend: delay(backend, FOR_EVER_MS))
    cache = source(user)
    target = CacheIndex(1, offered(peer))
    link(user, peer)
    task = user.layered(Transfer(Rows(cache), Rows(target)))
    ready(task, range(3))
    with refused(LLMStatusCode.LLM_TIMEOUT):
        task.wait(20, stop=False)
    assert not task.done
    assert task.progress().moving == (0, 1, 2)
    ready(task, task.layers)  # now the engine waits for it too
    with refused(LLMStatusCode.LLM_TIMEOUT):
        task.wait(20, stop=False)
    assert user.metrics()["in_flight"] == 1
    with refused(LLMStatusCode.LLM_TIMEOUT):
        task.wait(20)
    assert task.done
    assert counted(user) == {"LLM_TIMEOUT": 1}


def test_finalize_stops_layers_that_stand_still(
    slowed: Callable[..., LlmDataDist], peer: Peer
) -> None:
    user = slowed(lambda backend: delay(backend, FOR_EVER_MS), sync_kv_cache_wait_time=100)
    cache = source(user)
    target = CacheIndex(1, offered(peer))
    link(user, peer)
    half, whole = (user.layered(Transfer(Rows(cache), Rows(target))) for _ in range(2))
    ready(half, range(3))
    ready(whole, whole.layers)
    began = time.monotonic()
    user.finalize()
    assert time.monotonic() - began < MAX_FINALIZE_S
    for task in (half, whole):
        assert task.done
        assert failed(task).status_code is not LLMStatusCode.LLM_SUCCESS
    assert sum(counted(user).values()) == 2


def test_layers_overlap(gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt) -> None:
    """Layer 1 can be awaited while layer 0 copies: a slow layer delays no other call."""
    user = gated(2, **SLOW)
    cache = source(user)
    target = CacheIndex(1, offered(peer, "registered"))
    link(user, peer)
    task = user.layered(Transfer(Rows(cache), Rows(target)))
    first = attempt(lambda: task.ready(0))
    gate.wait()
    assert 0 in task.progress().moving
    assert not task.done
    gate.open()
    assert first.result(30) is None
    ready(task, task.layers)
    task.wait()
    arrived(peer)


def test_a_layer_task_can_be_awaited(make_engine: MakeEngine, peer: Peer) -> None:
    user = make_engine(2, **SLOW)
    cache = source(user)
    target = CacheIndex(1, offered(peer))
    link(user, peer)

    async def push() -> None:
        task = user.layered(Transfer(Rows(cache), Rows(target)))
        waiting = asyncio.ensure_future(_awaited(task))
        for layer in task.layers:
            await asyncio.sleep(0)
            assert not waiting.done()
            task.ready(layer)
        await asyncio.wait_for(waiting, 30)

    asyncio.run(push())
    arrived(peer)
    assert counted(user) == {"LLM_SUCCESS": 1}


async def _awaited(task: LayerTask) -> None:
    await task


def test_a_cancelled_await_cancels_the_task(make_engine: MakeEngine, peer: Peer) -> None:
    user = make_engine(2, **SLOW)
    cache = source(user)
    target = CacheIndex(1, offered(peer))
    link(user, peer)

    async def push() -> LayerTask:
        task = user.layered(Transfer(Rows(cache), Rows(target)))
        task.ready(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_awaited(task), 0.05)
        return task

    task = asyncio.run(push())
    assert task.done
    task.ready(1)
    assert failed(task).status_code is LLMStatusCode.LLM_CANCELLED
    assert user.metrics()["in_flight"] == 0
    user.unlink_clusters([1]).raise_for_status()


def test_an_await_of_a_failing_task_raises(make_engine: MakeEngine, make_peer: MakePeer) -> None:
    user, dying = make_engine(2, **SLOW), make_peer(1)
    cache = source(user)
    target = CacheIndex(1, offered(dying))
    link(user, dying)

    async def push() -> None:
        task = user.layered(Transfer(Rows(cache), Rows(target)))
        waiting = asyncio.ensure_future(_awaited(task))
        await asyncio.sleep(0)
        dying.kill()
        ready(task, task.layers)
        await asyncio.wait_for(waiting, 30)

    with refused(LLMStatusCode.LLM_LINK_FAILED):
        asyncio.run(push())


def race(task: LayerTask, pause_s: float) -> LLMStatusCode:
    """Make layers ready in two threads, cancel the task in one, and wait for it in this one."""
    begun = threading.Barrier(4)
    half = NUM_LAYERS // 2

    def run(layers: range | None) -> None:
        begun.wait()
        if layers is None:
            time.sleep(pause_s)
            task.cancel()
        else:
            ready(task, layers)

    parts = (range(half), range(half, NUM_LAYERS), None)
    threads = [threading.Thread(target=run, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    begun.wait()
    status = LLMStatusCode.LLM_SUCCESS
    try:
        task.wait(30_000)
    except LLMException as error:
        status = error.status_code
    for thread in threads:
        thread.join()
    return status


def test_ready_and_cancel_and_wait_race(make_engine: MakeEngine, peer: Peer) -> None:
    """In any order of the threads, the task has one outcome, counted once.

    A success has all bytes.
    """
    user = make_engine(2, **SLOW)
    cache = source(user)
    target = CacheIndex(1, offered(peer))
    link(user, peer)
    outcomes = []
    for round_ in range(40):
        peer.run("for it in arrays: it[:] = 0")
        outcomes.append(race(user.layered(Transfer(Rows(cache), Rows(target))), round_ % 8 / 2e4))
        if outcomes[-1] is LLMStatusCode.LLM_SUCCESS:
            arrived(peer)
    assert sum(counted(user).values()) == len(outcomes)
    assert set(outcomes) <= {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_CANCELLED}
    assert counted(user).get("LLM_SUCCESS", 0) == outcomes.count(LLMStatusCode.LLM_SUCCESS)
    assert user.metrics()["in_flight"] == 0
    status = link_of(user, 1)
    assert status is not None
    assert status.in_flight == 0
