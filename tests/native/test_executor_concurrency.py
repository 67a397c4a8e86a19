"""Many threads, many tasks, overlapping pools."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from kvnative._backend import KVN_CANCELLED, KVN_OK, KVN_TIMEOUT, ThreadPool, host_backend
from kvnative._executor import Executor
from kvnative._lower import lower
from kvnative._task import Task
from tests.native.scatter import indices, scatter
from tests.support.wrappers import delay, limit_bandwidth, limit_batch

THREADS = 8


def at_once(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Run `work` on several threads that start together; raise what any of them raises."""
    start = Barrier(threads)

    def one(number: int) -> None:
        start.wait()
        work(number)

    with ThreadPoolExecutor(threads) as python_threads:
        for done in [python_threads.submit(one, number) for number in range(threads)]:
            done.result()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_threads_on_one_executor(threads: int) -> None:
    executor = Executor(host_backend(ThreadPool(threads)))

    def work(number: int) -> None:
        for turn in range(6):
            case = scatter([1000, 300_000, 7, 70_000], seed=number * 100 + turn)
            if turn % 2:
                assert executor.run(case.descriptors).status == KVN_OK
            else:
                assert executor.submit(case.descriptors, keep=case).wait().status == KVN_OK
            case.assert_moved()

    at_once(work)


def test_overlapping_pools() -> None:
    executors = [Executor(host_backend(ThreadPool(1 + number % 3))) for number in range(THREADS)]

    def work(number: int) -> None:
        tasks = []
        for turn in range(4):
            case = scatter([200_000] * 5, seed=number * 10 + turn)
            executor = executors[(number + turn) % THREADS]
            tasks.append((executor.submit(case.descriptors, keep=case), case))
        for task, case in reversed(tasks):
            assert task.wait().status == KVN_OK
            case.assert_moved()

    at_once(work)


def test_thousands_of_tiny_tasks() -> None:
    case = scatter([16] * 50)
    executor = Executor(limit_batch(host_backend(ThreadPool(2)), 10))
    tasks = [executor.submit(case.descriptors) for _ in range(5000)]
    executor.close()
    assert all(task.done for task in tasks)
    assert {task.report.bytes_done for task in tasks} == {case.total}
    case.assert_moved()


def test_thousands_of_small_tasks_on_the_pool() -> None:
    cases = [scatter([300_000], seed=seed) for seed in range(20)]
    executor = Executor(host_backend(ThreadPool(3)))
    tasks = [executor.submit(case.descriptors) for _ in range(100) for case in cases]
    assert {task.wait().status for task in reversed(tasks)} == {KVN_OK}
    for case in cases:
        case.assert_moved()


def test_an_awaited_task_overtakes_others() -> None:
    executor = Executor(host_backend(ThreadPool(1)))
    large, small = scatter([4 << 20] * 4), scatter([300_000])
    queued = [executor.submit(large.descriptors) for _ in range(100)]
    assert executor.submit(small.descriptors).wait().status == KVN_OK
    small.assert_moved()
    assert not queued[-1].done  # 1.6 GiB are queued before the small one
    executor.close(cancel=True)
    assert queued[-1].report.status == KVN_CANCELLED


@pytest.mark.parametrize("layers", ["host", "batches", "delay"])
def test_a_task_is_awaited_polled_and_cancelled_at_once(layers: str) -> None:
    backend = host_backend(ThreadPool(2))
    if layers == "batches":
        backend = limit_batch(backend, 3)
    if layers == "delay":
        backend = limit_batch(delay(backend, 0.2), 3)
    for turn in range(10):
        case = scatter([150_000] * 30, seed=turn)
        task = Executor(backend).submit(case.descriptors)
        calls: list[Callable[[Task], object]] = [
            lambda task: task.wait(),
            lambda task: task.done,
            lambda task: task.report,
            lambda task: task.wait(timeout_ms=0.5),
            lambda task: task.cancel(),
        ]
        at_once(lambda number, task=task, calls=calls: calls[number](task), len(calls))
        report = task.report
        assert report.status in (KVN_OK, KVN_TIMEOUT, KVN_CANCELLED)
        confirmed = set(range(30)) - indices(report.unconfirmed)
        assert all(case.arrived(index) for index in confirmed)


def test_all_waiters_get_one_report_and_the_descriptors_are_free_once() -> None:
    executor = Executor(host_backend(ThreadPool(2)))
    for turn in range(20):
        case = scatter([300_000, 4096], seed=turn)
        task = executor.submit(case.descriptors, keep=case)
        reports: list[object] = []

        def work(_: int, task: Task = task, reports: list[object] = reports) -> None:
            reports.append(task.wait())

        at_once(work)
        assert {id(report) for report in reports} == {id(task.report)}
        # If they were released twice, another call could write to them while they are read.
        view = case.descriptors.nbytes
        base = np.zeros(1, np.uint64)
        with pytest.raises(BufferError, match="in use by 1 views"):
            lower(base, base, base + 1, base, base, case.descriptors)
        assert view.sum() == 304_096


def test_cancelling_wakes_all_waiters() -> None:
    case = scatter([1000] * 1000)
    executor = Executor(limit_bandwidth(host_backend(ThreadPool(1)), 1))
    task = executor.submit(case.descriptors)

    def work(number: int) -> None:
        if number == 0:
            task.cancel()
        else:
            assert task.wait().status == KVN_CANCELLED

    at_once(work)


def test_closing_while_others_submit() -> None:
    backend = host_backend(ThreadPool(2))
    case = scatter([200_000] * 4)

    def work(number: int) -> None:
        with Executor(backend) as executor:
            tasks = [executor.submit(case.descriptors) for _ in range(10)]
        assert {task.report.status for task in tasks} == {KVN_OK}

    at_once(work)
    case.assert_moved()
