"""Gathers from several caches of another engine that wait for one event of a model's compute."""

from __future__ import annotations

from dataclasses import replace
from threading import Event
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from kvplan import (
    Cache,
    CacheDesc,
    CacheIndex,
    DataType,
    GatherError,
    GatherTask,
    LLMStatusCode,
    Placement,
    PlanEvent,
    Rows,
    Shard,
    Transfer,
)
from tests.device.compute import handle_of
from tests.device.engines import NUM_TENSORS
from tests.device.pair import A_WHILE, FOREVER, Pair, row, still_pending
from tests.support.refusals import refused

WHOLE = CacheDesc(
    NUM_TENSORS,
    (8, 4, 2, 12),
    DataType.DT_UINT16,
    Placement.DEVICE,
    kv_tensor_format="block token head dim",
    shard=Shard(num_layers=NUM_TENSORS),
)
"""A model's cache; each source of the gather is one layer of it."""
ARRIVED = [[number + 1] for number in range(NUM_TENSORS)]
LIMIT_MS = 2000  # long enough for a busy machine to get from one step to the next
DEADLINE_S = 30
COMPUTED = [[row(9)]] * NUM_TENSORS


class Gathered:
    """Gathers into blocks 5 and 6 of the prefill's cache, which its compute still writes.

    Each layer is a source: a cache of its own in the decode engine.
    """

    def __init__(self, linked: Pair) -> None:
        self.pair = linked
        self.mine = linked.prefill.allocate_blocks_cache(WHOLE)
        self.caches = []
        for layer in range(NUM_TENSORS):
            shard = Shard(range(layer, layer + 1), num_layers=NUM_TENSORS)
            cache = linked.decode.allocate_blocks_cache(replace(WHOLE, num_tensors=1, shard=shard))
            linked.decode.write_cache(cache, [np.full(WHOLE.shape, layer + 1, np.uint16)])
            self.caches.append(cache)
        self.sources = [CacheIndex(4, cache.cache_id) for cache in self.caches]
        linked.compute.hold()
        for address in self.mine.tensor_addrs:
            linked.compute.fill(address + 5 * WHOLE.stride, 2 * WHOLE.stride, 9)

    def submit(self, dst: Cache | None = None, **more: Any) -> GatherTask:
        return self.pair.prefill.submit(self.transfer(dst or self.mine), **more)

    def can_be_planned(self) -> bool:
        """Return True if all sources exist, as far as the prefill knows."""
        try:
            self.pair.prefill.plan(self.transfer(self.mine))
        except GatherError:
            return False
        return True

    def transfer(self, dst: Cache) -> Transfer:
        """Return the gather of blocks 0 and 3 of each source into blocks 6 and 5 of `dst`."""
        return Transfer([Rows(source, [0, 3]) for source in self.sources], Rows(dst, [6, 5]))

    def found(self, cache: Cache | None = None) -> list[list[int]]:
        """Return the values in blocks 5 and 6 of each tensor."""
        tensors = self.pair.prefill.arrays(cache or self.mine, copy=True)
        return [np.unique(tensor[[5, 6]]).tolist() for tensor in tensors]

    def release(self) -> None:
        self.pair.compute.release()
        self.pair.compute.wait()


def test_each_source_waits_for_the_event(linked: Pair) -> None:
    gathered = Gathered(linked)
    event = linked.compute.event()
    task = gathered.submit(after=event)
    linked.compute.destroy(handle_of(event))
    assert len(task.tasks) == NUM_TENSORS
    assert all(still_pending(task) for task in task.tasks.values())
    assert gathered.found() == [[0]] * NUM_TENSORS
    linked.compute.release()
    task.wait(FOREVER)
    assert gathered.found() == ARRIVED  # each source arrived after the compute


def test_groups_wait_for_the_event(linked: Pair) -> None:
    gathered = Gathered(linked)
    other = linked.prefill.allocate_blocks_cache(WHOLE)
    groups = {"one": gathered.transfer(gathered.mine), "two": gathered.transfer(other)}
    task = linked.prefill.submit(groups, after=linked.compute)
    assert still_pending(task)
    assert gathered.found(other) == [[0]] * NUM_TENSORS
    linked.compute.release()
    task.wait(FOREVER)
    assert gathered.found() == gathered.found(other) == ARRIVED


def test_more_sources_than_waiting_streams_arrive(linked: Pair) -> None:
    gathered = Gathered(linked)
    caches = [linked.prefill.allocate_blocks_cache(WHOLE) for _ in range(3)]
    tasks = [gathered.submit(dst=cache, after=linked.compute) for cache in caches]
    assert all(still_pending(task) for task in tasks)
    linked.compute.release()
    for task in tasks:
        task.wait(FOREVER)
    assert [gathered.found(cache) for cache in caches] == [ARRIVED] * 3


def test_a_gather_behind_an_event_that_never_comes_times_out(linked: Pair) -> None:
    gathered = Gathered(linked)
    task = gathered.submit(after=linked.compute)
    with pytest.raises(GatherError, match="3 of 3 sources failed") as caught:
        task.wait(A_WHILE)
    assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
    assert [*caught.value.failed] == [0, 1, 2]
    gathered.release()
    assert gathered.found() == COMPUTED
    gathered.submit(after=linked.compute).wait(FOREVER)
    assert gathered.found() == ARRIVED


@pytest.mark.parametrize("several", [False, True])
def test_the_time_limit_of_a_call_includes_its_hooks(linked: Pair, several: bool) -> None:
    """The hook uses up the time limit, so the wait for compute must fail without a second limit."""
    ended = linked.prefill.completions()
    gathered = Gathered(linked)
    desc = replace(WHOLE, num_tensors=1, shard=Shard(range(1), num_layers=NUM_TENSORS))
    one = Rows(linked.prefill.allocate_blocks_cache(desc), [6, 5])
    transfer = Transfer(Rows(gathered.sources[0], [0, 3]), one)
    if several:
        transfer = gathered.transfer(gathered.mine)
    began = perf_counter()
    shown: list[float] = []

    def hook(_: PlanEvent) -> None:
        Event().wait(max(0.0, began + LIMIT_MS / 1000 - perf_counter()))
        shown.append(perf_counter())

    remove = linked.prefill.on_plan(hook)
    with refused(LLMStatusCode.LLM_TIMEOUT):
        linked.prefill.run(transfer, after=linked.compute, timeout_ms=LIMIT_MS)
    assert perf_counter() - shown[-1] < LIMIT_MS / 1000
    assert not len(ended)  # the call has raised the error
    remove()
    gathered.release()
    assert gathered.found() == COMPUTED
    gathered.submit().wait(FOREVER)  # a renewal would wait for a peer that ends meanwhile
    assert gathered.found() == ARRIVED


def test_a_gather_behind_an_event_is_cancelled(linked: Pair) -> None:
    gathered = Gathered(linked)
    task = gathered.submit(after=linked.compute)
    assert still_pending(task)
    task.cancel()
    assert task.done
    with pytest.raises(GatherError, match="3 of 3 sources failed"):
        task.wait(FOREVER)
    gathered.release()
    assert gathered.found() == COMPUTED


def test_a_source_that_was_freed_meanwhile_fails_alone(linked: Pair) -> None:
    gathered = Gathered(linked)
    task = gathered.submit(after=linked.compute)
    linked.decode.deallocate_cache(gathered.caches[1])
    assert still_pending(task)
    gathered.release()
    with pytest.raises(GatherError, match=r"sources\[1\] ") as caught:
        task.wait(FOREVER)
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert [*caught.value.failed] == [1]
    # Each other source arrived whole, or was stopped because of the failure.
    for index, found in enumerate(gathered.found()):
        assert found == ARRIVED[index] or index in {1, *caught.value.stopped}


def test_a_freed_source_is_refused(linked: Pair) -> None:
    gathered = Gathered(linked)
    linked.decode.deallocate_cache(gathered.caches.pop())
    deadline = perf_counter() + DEADLINE_S
    while gathered.can_be_planned():  # until the prefill has learned it
        assert perf_counter() < deadline
    with pytest.raises(GatherError, match=r"sources\[2\] ") as caught:
        gathered.submit(after=linked.compute)
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert linked.prefill.metrics()["in_flight"] == 0
    gathered.release()
    assert gathered.found() == COMPUTED


def test_values_that_are_not_events_are_refused(linked: Pair) -> None:
    gathered = Gathered(linked)
    with pytest.raises(TypeError, match="after='now' must be an event or a stream"):
        gathered.submit(after="now")
    with refused("LLM_PARAM_INVALID", "after=0: the handle of an event must be"):
        gathered.submit(after=0)
    assert linked.prefill.metrics()["in_flight"] == 0
    gathered.release()
    assert gathered.found() == COMPUTED
