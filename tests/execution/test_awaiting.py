"""Tasks under asyncio."""

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import Event

import numpy as np
import pytest

import kvplan
from kvplan import (
    CacheDesc,
    DataType,
    HostMemory,
    KvCacheExtParam,
    LLMStatusCode,
    Rows,
    Transfer,
    Transfers,
)
from kvplan.execution.completion import AwaitableTask, run_aside
from tests.support.held import Held
from tests.support.holding import held_transfers
from tests.support.peer import DEADLINE_S
from tests.support.refusals import refused
from tests.support.wrappers import delay, fail_at

DESC = CacheDesc(4, (8, 100), DataType.DT_UINT8)
PLAN = kvplan.plan(
    Transfer(Rows(DESC, [0, 1]), Rows(DESC, [5, 3]), layers=KvCacheExtParam(None, None, 2)),
    local="src",
)


def tensors(value: int) -> list[np.ndarray]:
    return [np.full(DESC.tensor_nbytes, value, np.uint8) for _ in range(4)]


def test_the_result_of_await_is_none():
    dst = tensors(2)

    async def main():
        with held_transfers() as (transfers, let):
            task = transfers.submit(PLAN, tensors(1), dst)
            assert not task.done
            asyncio.get_running_loop().call_soon(let)
            assert await task is None
            assert await task is None  # a finished task needs no thread and no wait

    asyncio.run(main())
    assert dst[0][300:400].all()


def test_the_loop_continues_and_makes_layers_ready():
    async def main():
        with Transfers(1) as transfers:
            dst = tensors(2)
            task = transfers.layered(PLAN, tensors(1), dst)

            async def compute():
                for layer in task.layers:
                    await asyncio.sleep(0.005)
                    task.ready(layer)

            await asyncio.gather(task_of(task), compute(), task_of(task))
            assert (dst[3][300:400] == 1).all()

    asyncio.run(main())


async def task_of(task):
    await task


def test_a_failure_is_raised_in_every_awaiter():
    async def main():
        with Transfers(wrap=lambda backend: fail_at(delay(backend, 10), 5)) as transfers:
            task = transfers.submit(PLAN, tensors(1), tensors(2))
            results = await asyncio.gather(task_of(task), task_of(task), return_exceptions=True)
            results.append((await asyncio.gather(task_of(task), return_exceptions=True))[0])
        assert [str(error.origin) for error in results] == ["layer 1>1 tensor 2>2 block 1>3"] * 3

    asyncio.run(main())


@pytest.mark.parametrize("layered", [False, True])
def test_a_cancelled_await_cancels_the_transfer(layered):
    async def main():
        with Transfers(wrap=lambda backend: delay(backend, 1e9)) as transfers:
            begin = transfers.layered if layered else transfers.submit
            task = begin(PLAN, tensors(1), tensors(2))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(task, 0.02)
            assert task.done
            with refused(LLMStatusCode.LLM_CANCELLED, "cancelled"):
                await task

    asyncio.run(main())


def test_ten_thousand_awaits_cost_no_thread():
    desc = CacheDesc(1, (2, 8), DataType.DT_UINT8)
    plan = kvplan.plan(Transfer(Rows(desc, [0]), Rows(desc, [1])), local="src")
    src = HostMemory.from_arrays([np.ones((2, 8), np.uint8)])
    dst = HostMemory.from_arrays([np.zeros((2, 8), np.uint8)])

    async def main():
        with held_transfers() as (transfers, open_all):
            first = asyncio.ensure_future(transfers.submit(plan, src, dst))
            await asyncio.sleep(0)  # starts the thread that serves all tasks of the process
            before = Held.now()
            tasks = [transfers.submit(plan, src, dst) for _ in range(10_000)]
            awaits = [asyncio.ensure_future(task) for task in tasks]
            await asyncio.sleep(0)
            assert not tasks[0].done
            assert not tasks[-1].done
            before.check_new_threads(set())
            open_all()
            assert await asyncio.gather(first, *awaits) == [None] * 10_001
            before.check_new_threads(set())

    asyncio.run(main())


def test_loops_of_several_threads_await_the_same_tasks():
    with held_transfers() as (transfers, open_all):
        tasks = [transfers.submit(PLAN, tensors(1), tensors(2)) for _ in range(20)]
        awaiting = threading.Barrier(3)

        async def main():
            awaits = [asyncio.ensure_future(task) for task in tasks]
            await asyncio.sleep(0)
            awaiting.wait(30)
            return await asyncio.gather(*awaits)

        with ThreadPoolExecutor(2) as threads:
            loops = [threads.submit(asyncio.run, main()) for _ in range(2)]
            awaiting.wait(30)
            open_all()
            assert [loop.result(30) for loop in loops] == [[None] * 20] * 2


@pytest.mark.parametrize("closed", [True, False])
def test_a_loop_that_is_abandoned_leaves_nothing_behind(closed, monkeypatch):
    """The coroutine ends with its loop, and the task then has no awaiter for its result."""
    unseen = []
    monkeypatch.setattr(threading, "excepthook", unseen.append)
    with held_transfers() as (transfers, open_all):
        task = transfers.submit(PLAN, tensors(1), tensors(2))
        loop = asyncio.new_event_loop()
        gone = weakref.ref(loop)
        awaiting = task.__await__()

        async def begin():
            awaiting.send(None)

        loop.run_until_complete(begin())
        if closed:
            loop.close()
            open_all()
            task.wait()
        awaiting.close()
        if not closed:
            loop.close()
        loop = awaiting = None
        gc.collect()
        assert gone() is None
        open_all()
        task.wait()
    assert unseen == []


def test_a_cancelled_await_leaves_nothing_behind():
    async def main(transfers):
        task = transfers.submit(PLAN, tensors(1), tensors(2))
        gone = weakref.ref(task)
        awaiting = asyncio.ensure_future(task)
        await asyncio.sleep(0)
        awaiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaiting
        assert task.done
        later = weakref.ref(awaiting)
        del task, awaiting
        return gone, later

    with held_transfers() as (transfers, open_all):
        gone, later = asyncio.run(main(transfers))
        other = transfers.submit(PLAN, tensors(1), tensors(2))
        open_all()
        asyncio.run(task_of(other))  # so the thread has read the end of the first
        deadline = time.monotonic() + 60  # the thread may still hold the last task
        while (gone(), later()) != (None, None):
            assert time.monotonic() < deadline
            gc.collect()


class SlowToCancel(AwaitableTask):
    """A transfer to a stopped peer: `cancel` returns only after `peer` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.peer = Event()
        self.cancelled = False

    @property
    def done(self) -> bool:
        return self.cancelled

    def wait(self, timeout_ms: float | None = None) -> None:
        raise NotImplementedError

    def cancel(self, reason: kvplan.LLMException | None = None) -> None:
        self.cancelled = self.peer.wait(30)
        self._note_settled()

    def _follow(self) -> None:
        pass


def test_a_cancelled_await_does_not_block_the_loop_and_ends_with_the_transfer():
    async def main():
        task = SlowToCancel()
        awaiting = asyncio.ensure_future(task.coroutine())
        await asyncio.sleep(0)
        for _ in range(2):  # also a second time
            awaiting.cancel()
            await asyncio.sleep(0)
        assert not awaiting.done()
        task.peer.set()  # a blocked loop would be late
        with pytest.raises(asyncio.CancelledError):
            await awaiting
        assert task.done

    asyncio.run(main())


def test_a_dropped_task_continues_while_it_is_awaited():
    async def main():
        with held_transfers() as (transfers, open_all):
            dst = tensors(2)
            task = transfers.submit(PLAN, tensors(1), dst)
            gone = weakref.ref(task)
            awaiting = [asyncio.ensure_future(task.coroutine()) for _ in range(2)]
            await asyncio.sleep(0)
            del task
            open_all()
            assert await asyncio.gather(*awaiting) == [None] * 2
            assert (dst[0][300:400] == 1).all()
            awaiting.clear()
            deadline = time.monotonic() + DEADLINE_S
            while gone() is not None and time.monotonic() < deadline:
                await transfers.submit(PLAN, tensors(1), dst)  # the thread then drops its last task
                gc.collect()
            assert gone() is None

    asyncio.run(main())


def test_callbacks_at_the_end_are_called_once():
    with held_transfers() as (transfers, open_all):
        task = transfers.submit(PLAN, tensors(1), tensors(2))
        called = SimpleQueue()
        for number in range(3):
            task.when_settled(partial(called.put, number))
        assert called.empty()
        open_all()
        assert sorted(called.get(timeout=30) for _ in range(3)) == [0, 1, 2]
        task.when_settled(partial(called.put, 3))
        assert called.get_nowait() == 3
        task.wait()
        assert called.empty()


def test_an_await_ends_with_a_failed_layer_though_others_are_not_ready():
    async def main():
        with Transfers(1, lambda backend: fail_at(backend, 5)) as transfers:
            task = transfers.layered(PLAN, tensors(1), tensors(2))
            awaiting = asyncio.ensure_future(task)
            await asyncio.sleep(0)
            task.ready(1)
            with refused(LLMStatusCode.LLM_FAILED):
                await awaiting
            assert task.progress().waiting == (0,)

    asyncio.run(main())


def test_await_returns_none_or_raises_like_wait():
    with held_transfers() as (transfers, open_all):
        task = transfers.submit(PLAN, tensors(1), tensors(2))
        with refused(LLMStatusCode.LLM_TIMEOUT):
            task.result(0)
        assert task.done
        open_all()
        assert transfers.submit(PLAN, tensors(1), tensors(2)).result() is None
        with pytest.raises(ValueError, match="timeout_ms"):
            transfers.submit(PLAN, tensors(1), tensors(2)).result(-1)


def test_an_await_outside_of_a_loop_is_refused():
    ready = Event()
    with Transfers(1) as transfers:
        task = transfers.layered(PLAN, tensors(1), tensors(2), on_last=lambda _: ready.set())
        with pytest.raises(RuntimeError, match="no running event loop"):
            next(task.__await__())
        task.cancel()
    assert ready.is_set()


def test_background_calls_share_threads_that_end_when_idle():
    before = Held.now()
    threads: SimpleQueue[threading.Thread] = SimpleQueue()
    for _ in range(50):
        run_aside(lambda: threads.put(threading.current_thread()))
    made_by = {threads.get(timeout=60) for _ in range(50)}
    assert {item.name for item in made_by} == {"kvplan-aside"}
    assert len(made_by) <= 32
    before.check_new_threads(set())


def test_background_calls_do_not_wait_for_each_other():
    several = threading.Barrier(4, timeout=60)
    for _ in range(3):
        run_aside(several.wait)
    several.wait()
