"""Many threads use one registry: each byte, id and key has one owner, and all are returned."""

from __future__ import annotations

import gc
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest

from kvplan import CacheDesc, DataType, LLMStatusCode
from kvplan.engine.memory import tensor_arrays
from kvplan.engine.options import Options
from kvplan.engine.pools import PoolConfig
from kvplan.engine.registry import CacheRegistry
from kvplan.transport.local import LocalTransport
from kvplan.transport.registrations import AnyRegistration

from .caches import ALL_TENSORS, SLOTS, free_nbytes, key, tried

_T = TypeVar("_T")
THREADS = 6
ROUNDS = 60
POOL = 64 << 10


def in_threads(work: Callable[[int], _T]) -> list[_T]:
    start = threading.Barrier(THREADS)

    def run(number: int) -> _T:
        start.wait(30)
        return work(number)

    with ThreadPoolExecutor(THREADS) as threads:
        return [task.result(60) for task in [threads.submit(run, i) for i in range(THREADS)]]


def made(transport: LocalTransport) -> CacheRegistry:
    options = Options(mem_pool_config=PoolConfig(POOL, page_shift=10))
    return CacheRegistry((transport,), options, lambda: None)


def test_caches_come_and_go_in_all_threads():
    def work(number: int) -> list[int]:
        chance = np.random.default_rng(number)
        ids = []
        while len(ids) < ROUNDS:
            desc = CacheDesc(1, (1, int(chance.integers(1, 8)) << 10), DataType.DT_UINT8)
            entry, status = tried(
                lambda: registry.allocate(desc, paged=False, keys=[key(number)])  # noqa: B023
            )
            if entry is None:
                assert status is LLMStatusCode.LLM_OUT_OF_MEMORY
                gc.collect()  # garbage of all threads
                continue
            ids.append(entry.cache.cache_id)
            (array,) = tensor_arrays(desc, entry.memory)
            array[:] = number
            assert registry.survey(dict)[ids[-1]] is registry.get(ids[-1])
            claim = registry.claim(key(number), number)
            registry.deallocate(ids[-1])
            assert (array == number).all()
            registry.release(claim.claim_id, ALL_TENSORS)
            # Any thread may collect garbage in a cycle and return the memory, even a thread in the
            # pool.
            cycle: list[object] = [entry, claim, array]
            cycle.append(cycle)
        return ids

    with LocalTransport() as transport:
        registry = made(transport)
        ids = [item for one in in_threads(work) for item in one]
        assert len(ids) == len(set(ids)) == THREADS * ROUNDS
        gc.collect()
        assert registry.entries() == []
        assert free_nbytes(registry) == POOL
        assert transport.metadata() == transport.metadata([])
        registry.close()


def test_only_one_of_many_threads_can_claim_a_key():
    def bind(number: int) -> LLMStatusCode:
        return tried(lambda: registry.allocate(SLOTS, paged=False, keys=[key(1)]))[1]

    def pull(number: int) -> LLMStatusCode:
        claim, status = tried(lambda: registry.claim(key(1), number))
        if claim is not None:
            registry.release(claim.claim_id, ALL_TENSORS)
        return status

    refusals = {
        bind: {LLMStatusCode.LLM_PARAM_INVALID},
        pull: {LLMStatusCode.LLM_REPEAT_REQUEST, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST},
    }
    with LocalTransport() as transport:
        registry = made(transport)
        for _ in range(ROUNDS):
            for work, allowed in refusals.items():
                results = in_threads(work)
                results.remove(LLMStatusCode.LLM_SUCCESS)
                assert set(results) <= allowed
            ((entry, _),) = registry.entries()
            registry.deallocate(entry.cache.cache_id)
            del entry
        gc.collect()
        assert free_nbytes(registry) == POOL
        registry.close()


def test_closing_leaves_nothing_behind_of_unfinished_caches():
    def work(number: int) -> LLMStatusCode:
        if number == 0:
            registry.close()
        status = LLMStatusCode.LLM_SUCCESS
        while status is LLMStatusCode.LLM_SUCCESS:
            _, status = tried(lambda: registry.register(SLOTS, arrays, paged=False))
        return status

    arrays = [np.zeros(SLOTS.shape, np.uint8) for _ in range(2)]
    with LocalTransport() as transport:
        for _ in range(10):
            registry = made(transport)
            assert set(in_threads(work)) == {LLMStatusCode.LLM_ENGINE_FINALIZED}
            assert registry.entries() == []
            assert transport.metadata() == transport.metadata([])


class Sending(LocalTransport):
    """A transport over which the first offered memory is being sent until `sent` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.events: queue.Queue[str] = queue.Queue()
        self.sent = threading.Event()
        self._first: object = None

    def register(self, memory: Any, *, writable: bool = True, keep: object = None) -> Any:
        made = super().register(memory, writable=writable, keep=keep)
        self._first = self._first or made
        return made

    def deregister(self, registration: AnyRegistration) -> None:
        if registration is self._first:
            self.events.put("waits")
            assert self.sent.wait(30)
        super().deregister(registration)


@pytest.mark.parametrize("call", ["unregister", "renew"])
def test_a_cache_that_another_thread_is_ending_is_waited_for(call: str) -> None:
    """The user may free the memory when `unregister` returns."""
    with Sending() as transport, ThreadPoolExecutor(2) as threads:
        registry = made(transport)
        entry = registry.register(
            SLOTS, [np.zeros(SLOTS.shape, np.uint8) for _ in range(2)], paged=False
        )
        cache_id, events = entry.cache.cache_id, transport.events
        calls = {"unregister": registry.unregister, "renew": lambda value: registry.renew([value])}
        try:
            first = threads.submit(calls[call], cache_id)
            assert events.get(timeout=30) == "waits"
            second = threads.submit(registry.unregister, cache_id)
            second.add_done_callback(lambda _: events.put("returned"))
            assert events.get(timeout=30) == "waits"
        finally:
            transport.sent.set()
        assert [engine.result(30) for engine in (first, second)] == [None, None]
        assert registry.survey(dict) == {}
        registry.unregister(cache_id)
        assert transport.metadata() == transport.metadata([])
        registry.close()


class Interrupted(LocalTransport):
    """A transport that calls `then` after each registration."""

    then: Callable[[], object] = staticmethod(lambda: None)

    def register(self, memory: Any, *, writable: bool = True, keep: object = None) -> Any:
        made = super().register(memory, writable=writable, keep=keep)
        self.then()
        return made


def test_a_cache_that_is_unregistered_while_it_is_renewed_has_no_registration() -> None:
    with Interrupted() as transport:
        registry = made(transport)
        caches = [
            registry.register(
                SLOTS, [np.zeros(SLOTS.shape, np.uint8) for _ in range(2)], paged=False
            )
            for _ in range(2)
        ]
        gone, stays = (entry.cache.cache_id for entry in caches)
        transport.then = lambda: registry.unregister(gone)
        registry.renew([gone, stays])
        (entry,) = registry.survey(dict).values()
        assert entry.cache.cache_id == stays
        registry.unregister(stays)
        assert transport.metadata() == transport.metadata([])
        registry.close()


def test_finalizers_and_signal_handlers_may_use_the_registry_that_they_interrupt() -> None:
    script = """
import gc, signal
from kvplan import CacheDesc, CacheKey, DataType, LlmDataDist, LlmRole

class Request:  # in a cycle: only the garbage collector ends it
    def __init__(self, cache):
        self.me, self.cache = self, cache
    def __del__(self):
        engine.deallocate_cache(self.cache)

engine, desc = LlmDataDist(1, LlmRole.PROMPT), CacheDesc(2, (4, 64), DataType.DT_INT8)
engine.initialize()
signal.signal(signal.SIGALRM, lambda *_: engine.caches())
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.005)
gc.set_threshold(5)
for _ in range(1000):
    keys = [CacheKey(1, req_id=row) for row in range(4)]
    Request(engine.allocate_cache(desc, keys))
    for key in keys:
        engine.remove_cache_key(key)
signal.setitimer(signal.ITIMER_REAL, 0)
gc.collect()
assert engine.caches() == []
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
