"""Tasks under asyncio."""

import asyncio
import threading
from threading import Event

import numpy as np
import pytest

import kvplan
from kvplan import CacheDesc, DataType, KvCacheExtParam, LLMStatusCode, Rows, Transfer, Transfers
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
        with Transfers(wrap=lambda backend: delay(backend, 20)) as transfers:
            task = transfers.submit(PLAN, tensors(1), dst)
            assert not task.done
            assert await task is None
            assert await task is None  # done: no thread, no waiting

    asyncio.run(main())
    assert dst[0][300:400].all()


def test_the_loop_goes_on_and_makes_layers_ready():
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


def awaiting_threads(before):
    return [it for it in threading.enumerate() if it.name == "kvplan-await" and it not in before]


def test_a_loop_that_ends_first_leaves_no_error_behind(monkeypatch):
    """The awaiting coroutine is dropped with its loop; the thread then has no result to deliver."""
    unseen = []
    monkeypatch.setattr(threading, "excepthook", unseen.append)
    before = threading.enumerate()  # one of an earlier test may be about to end
    with Transfers(1) as transfers:
        task = transfers.layered(PLAN, tensors(1), tensors(2))
        loop = asyncio.new_event_loop()
        awaiting = task.__await__()

        async def begin():
            awaiting.send(None)

        loop.run_until_complete(begin())
        (thread,) = awaiting_threads(before)
        loop.close()
        for layer in task.layers:
            task.ready(layer)
        thread.join()
        task.wait()
        awaiting.close()
    assert unseen == []


def test_the_thread_is_a_daemon_and_ends_with_the_transfer():
    async def main():
        before = threading.enumerate()
        with Transfers(1) as transfers:
            task = transfers.layered(PLAN, tensors(1), tensors(2))
            awaited = asyncio.ensure_future(task_of(task))
            await asyncio.sleep(0)
            (thread,) = awaiting_threads(before)
            assert thread.daemon
            for layer in task.layers:
                task.ready(layer)
            await awaited
            thread.join(30)
            assert not thread.is_alive()

    asyncio.run(main())


def test_awaited_outside_a_loop_it_is_refused():
    ready = Event()
    with Transfers(1) as transfers:
        task = transfers.layered(PLAN, tensors(1), tensors(2), on_last=lambda _: ready.set())
        with pytest.raises(RuntimeError, match="no running event loop"):
            next(task.__await__())
        task.cancel()
    assert ready.is_set()
