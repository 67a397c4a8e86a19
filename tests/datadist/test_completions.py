"""A single queue for many tasks: each submitted task is queued once when it ends."""

from __future__ import annotations

import asyncio
import gc
import select
from functools import partial
from typing import Any
from weakref import ref

import pytest

from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    CacheIndex,
    CacheKey,
    ClusterInfo,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    PlanEvent,
    Rows,
    Transfer,
    Transfers,
)
from kvplan.engine.queues import MAX_UNTAKEN
from tests.datadist.conftest import MakeEngine
from tests.datadist.machine import Machine, on_host_only, skip_if_peers_serve
from tests.datadist.peer import Peer
from tests.support.refusals import refused
from tests.support.wrappers import delay, fail_at, hold

DESC = CacheDesc(2, (4, 64), DataType.DT_INT8)
THEIRS = BlocksCacheKey(1)
WAIT_MS = 20_000  # only a hanging test reaches it

OFFER = """
desc = CacheDesc(2, (4, 64), DataType.DT_INT8)
paged = datadist.allocate_blocks_cache(desc, BlocksCacheKey(1))
"""


def take_tasks(user: LlmDataDist, count: int) -> list[Any]:
    """Take the next `count` tasks that have ended."""
    found: list[Any] = []
    while len(found) < count:
        assert user.completions().wait(WAIT_MS)
        found += user.completions()
    assert len(found) == count
    return found


@pytest.mark.over_tcp
def test_each_task_is_queued_once_whether_or_not_a_call_waits(
    user: LlmDataDist, peer: Peer
) -> None:
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)
    before = user.submit(Transfer(Rows(THEIRS, [0]), Rows(cache, [0])))
    completions = user.completions()
    assert user.completions() is completions
    tasks = [user.submit(Transfer(Rows(THEIRS, [i % 4]), Rows(cache, [i % 4]))) for i in range(30)]
    for task in tasks[::3]:
        task.wait()
    found = take_tasks(user, 30)
    assert {id(item) for item in found} == {id(item) for item in tasks}
    for task in found:
        assert task.done
        task.wait(0)
    before.wait()
    user.pull_blocks(THEIRS, cache, [0], [0])  # not submitted, so not queued
    assert completions.wait(5) is False
    assert not select.select([completions], [], [], 0)[0]


def test_failed_cancelled_and_local_tasks_are_queued_too(
    peer: Peer, make_engine: MakeEngine, machine: Machine
) -> None:
    on_host_only(machine, "the wrapper holds what host backends move")
    peer.run(OFFER)
    broken = make_engine(3, transfers=Transfers(1, wrap=lambda value: fail_at(value, 1)))
    held = make_engine(4, transfers=Transfers(1, wrap=lambda value: delay(value, 600_000)))
    for engine in (broken, held):
        engine.link_clusters([ClusterInfo(1, peer.address)], 5000).raise_for_status()
        engine.completions()
    mine = broken.allocate_blocks_cache(DESC)
    task: Any = broken.submit(Transfer(Rows(THEIRS, [0, 2]), Rows(mine, [0, 2])))
    assert take_tasks(broken, 1) == [task]
    with refused("LLM_FAILED"):
        task.wait(0)
    task = broken.submit(Transfer(Rows(mine, [0]), Rows(mine, [1])))
    assert take_tasks(broken, 1) == [task]
    mine = held.allocate_blocks_cache(DESC)
    first = held.submit(Transfer(Rows(THEIRS, [0]), Rows(mine, [0])))
    second = held.submit(Transfer(Rows(THEIRS, [1]), Rows(mine, [1])))
    assert list(held.completions()) == []
    second.cancel()
    assert take_tasks(held, 1) == [second]  # though the first still moves
    first.cancel()
    assert take_tasks(held, 1) == [first]


def test_a_push_by_layers_is_queued_after_its_last_layer(user: LlmDataDist, peer: Peer) -> None:
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)
    completions = user.completions()
    param = KvCacheExtParam(tensor_num_per_layer=1)

    def push() -> Any:
        return user.layered(Transfer(Rows(cache, [0]), Rows(CacheIndex(1, 1), [0]), layers=param))

    task, cancelled = push(), push()
    task.ready(0)
    assert completions.wait(5) is False
    task.ready(1)
    assert take_tasks(user, 1) == [task]
    cancelled.cancel()
    assert take_tasks(user, 1) == [cancelled]
    dropped = push()
    with pytest.warns(ResourceWarning, match="dropped"):
        del dropped
    assert completions.wait(5) is False


@pytest.mark.parametrize(
    "end",
    ["ready", "failed", "failed late", "cancelled", "dropped", "asked, dropped", "held, dropped"],
)
def test_caches_by_layers_are_queued_after_the_last_layer_of_all(
    make_engine: MakeEngine, peer: Peer, machine: Machine, end: str
) -> None:
    """A handle that is dropped earlier cancels: peers learn of that, and nothing is in flight."""
    transfers = None
    if end.startswith("failed"):
        on_host_only(machine, "the wrapper fails or holds what host backends move")
        wrap = hold if end == "failed late" else partial(fail_at, descriptor=0)
        transfers = Transfers(1, wrap)
    user = make_engine(2, transfers=transfers)
    user.link_clusters([ClusterInfo(1, peer.address)], WAIT_MS).raise_for_status()
    peer.run(OFFER)
    cache, others = user.allocate_blocks_cache(DESC), user.allocate_blocks_cache(DESC)
    completions = user.completions()
    param = KvCacheExtParam(tensor_num_per_layer=1)
    names = {"a": cache, "b": others}
    task = user.layered(
        {
            name: Transfer(Rows(THEIRS, [0]), Rows(to, [0]), layers=param)
            for name, to in names.items()
        },
        notify=b"all",
        notify_failure=b"not all",
    )
    task.ready(0)
    first, second = sources = list(task.tasks.values())
    if end != "failed":
        assert completions.wait(5) is False
    if end == "ready":
        task.ready(1)
    elif end == "cancelled":
        task.cancel()
    elif end == "failed late":  # with all of its layers ready, while the other waits for one
        first.ready(1)
        first.cancel()
        assert second.wait_done(WAIT_MS)
    elif end == "held, dropped":
        del task
        assert [source.done for source in sources] == [True, True]
    elif end.endswith("dropped"):
        assert end == "dropped" or not task.settled
        del first, second, sources
        with pytest.warns(ResourceWarning, match="dropped"):
            del task
    if end.endswith("dropped"):
        assert completions.wait(5) is False
    else:
        assert take_tasks(user, 1) == [task]
        assert task.done
    peer.run(f"assert datadist.notifications().wait({WAIT_MS})")
    received = peer.run("result = [each.data for each in datadist.notifications()]")
    assert received == [b"all" if end == "ready" else b"not all"]
    assert user.metrics()["in_flight"] == 0
    user.unlink_clusters([1]).raise_for_status()


def test_a_gather_is_queued_as_one_task(user: LlmDataDist, peer: Peer) -> None:
    shape, layout = (4, 2, 4, 8), "block token head dim"
    desc = CacheDesc(2, shape, DataType.DT_INT8, kv_tensor_format=layout)
    peer.run("datadist.allocate_blocks_cache(desc, BlocksCacheKey(1))", desc=desc)
    cache = user.allocate_blocks_cache(desc)
    user.completions()
    task = user.submit({"kv": Transfer([Rows(THEIRS, [0, 1])], Rows(cache, [2, 3]))})
    found: list[Any] = take_tasks(user, 1)
    assert found == [task]
    task.wait(0)
    user.run(Transfer([Rows(THEIRS, [0, 1])], Rows(cache, [2, 3])))
    assert user.completions().wait(5) is False


def test_a_task_with_a_notification_is_queued_once_the_peer_has_it(
    user: LlmDataDist, peer: Peer, machine: Machine
) -> None:
    skip_if_peers_serve(machine)
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)
    user.completions()
    user.pull_blocks(THEIRS, cache, [0], [0])

    def stop(_: PlanEvent) -> None:
        peer.stop()

    user.on_plan(stop)
    late = user.submit(Transfer(Rows(CacheIndex(1, 1), [0]), Rows(cache, [0])), notify=b"stopped")
    plain = user.submit(Transfer(Rows(CacheIndex(1, 1), [1]), Rows(cache, [1])))
    assert take_tasks(user, 1) == [plain]
    peer.resume()
    assert take_tasks(user, 1) == [late]
    late.wait(0)
    assert peer.run("result = [note.data for note in datadist.notifications()]") == [b"stopped"]


def test_a_pull_that_consumes_a_key_delays_no_other_task_by_its_peer(
    user: LlmDataDist, peer: Peer, machine: Machine
) -> None:
    on_host_only(machine, "a stopped peer renews no connection, which a new cache needs")
    peer.run(OFFER + "datadist.allocate_cache(desc, [CacheKey(1, 7, 0)])")
    cache, blocks = user.allocate_cache(DESC), user.allocate_blocks_cache(DESC)
    user.completions()
    user.on_plan(lambda _: peer.stop())
    keyed = user.submit(Transfer(Rows(CacheKey(1, 7, 0)), Rows(cache, slot=0)))
    plain = user.submit(Transfer(Rows(blocks, [0]), Rows(blocks, [1])))
    assert take_tasks(user, 1) == [plain]
    peer.resume()
    assert take_tasks(user, 1) == [keyed]
    keyed.wait(0)


def test_a_task_that_has_ended_keeps_no_memory(user: LlmDataDist) -> None:
    cache = user.allocate_blocks_cache(DESC)
    memory = ref(user._running().registry.resolve(cache).memory)
    completions = user.completions()
    task = user.submit(Transfer(Rows(cache, [0]), Rows(cache, [1])))
    assert completions.wait(WAIT_MS)
    user.deallocate_cache(cache)
    gc.collect()
    assert memory() is None
    assert [*completions] == [task]
    task.wait(0)


def test_tasks_that_finalize_stops_can_still_be_taken(
    peer: Peer, make_engine: MakeEngine, machine: Machine
) -> None:
    on_host_only(machine, "the wrapper holds what host backends move")
    peer.run(OFFER)
    held = make_engine(
        3,
        transfers=Transfers(1, wrap=lambda value: delay(value, 600_000)),
        SyncKvCacheWaitTime="50",
    )
    held.link_clusters([ClusterInfo(1, peer.address)], 5000).raise_for_status()
    completions = held.completions()
    cache = held.allocate_blocks_cache(DESC)
    task = held.submit(Transfer(Rows(THEIRS, [0]), Rows(cache, [0])))
    held.finalize()
    assert list(completions) == [task]
    assert completions.closed
    with refused("LLM_ENGINE_FINALIZED"):
        held.completions()


def test_a_scheduler_polls_one_descriptor_for_many_tasks(user: LlmDataDist, peer: Peer) -> None:
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)

    async def run() -> int:
        completions = user.completions()
        pending = {
            user.submit(Transfer(Rows(THEIRS, [0]), Rows(cache, [i % 4]))) for i in range(50)
        }
        async for task in completions:
            pending.remove(task)  # type: ignore[arg-type]
            if not pending:
                break
        return len(pending)

    assert asyncio.run(asyncio.wait_for(run(), WAIT_MS / 1000)) == 0


def test_tasks_work_with_asyncio(user: LlmDataDist, peer: Peer) -> None:
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)

    def submit() -> Any:
        return user.submit(Transfer(Rows(THEIRS, [0]), Rows(cache, [1])))

    async def run() -> None:
        done, pending = await asyncio.wait(
            [asyncio.ensure_future(submit()) for _ in range(3)], timeout=20
        )
        assert (len(done), len(pending)) == (3, 0)
        await asyncio.gather(submit(), submit())
        await asyncio.wait_for(submit(), 20)
        await asyncio.create_task(submit().coroutine())
        async with asyncio.TaskGroup() as group:
            made = [group.create_task(submit().coroutine()) for _ in range(3)]
        assert [task.result() for task in made] == [None] * 3

    asyncio.run(run())


def test_untaken_tasks_are_bounded_and_can_still_be_taken(user: LlmDataDist, peer: Peer) -> None:
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)
    completions = user.completions()
    user.submit(Transfer(Rows(THEIRS, [0]), Rows(cache, [0])))
    (task,) = take_tasks(user, 1)
    for _ in range(MAX_UNTAKEN):
        completions.put(task)
    param = KvCacheExtParam(tensor_num_per_layer=1)
    for submit in (
        lambda: user.submit(Transfer(Rows(THEIRS, [0]), Rows(cache, [0]))),
        lambda: user.submit(Transfer(Rows(cache, [0]), Rows(cache, [1]))),
        lambda: user.submit(Transfer([Rows(THEIRS, [0])], Rows(cache, [0]))),
        lambda: user.layered(Transfer(Rows(cache, [0]), Rows(CacheIndex(1, 1), [0]), layers=param)),
    ):
        with refused("LLM_LINK_BUSY", f"{MAX_UNTAKEN} ended tasks wait in completions"):
            submit()
    user.pull_blocks(THEIRS, cache, [0], [0])  # not submitted, so not reported
    assert next(iter(completions)) is task
    last = user.submit(Transfer(Rows(THEIRS, [0]), Rows(cache, [0])))
    assert take_tasks(user, MAX_UNTAKEN)[-1] is last
    assert user.metrics()["in_flight"] == 0
