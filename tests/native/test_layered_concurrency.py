"""Layers that many threads open, await, poll and give up at once."""

import random
from collections.abc import Callable
from threading import Event

import pytest

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_FAILED,
    KVN_OK,
    KVN_TIMEOUT,
    Backend,
    ThreadPool,
    host_backend,
)
from kvnative._executor import Executor
from kvnative._layered import LAYER_DONE, LAYER_FAILED, LAYER_WAITING, LayeredTask
from tests.native.scatter import Scattered, indices, scatter
from tests.native.test_executor_concurrency import at_once
from tests.support.spare import assert_same, copy_of
from tests.support.wrappers import delay, fail_at, limit_bandwidth, limit_batch

COUNT, SIZE = 60, 7
LAYERS = -(-COUNT // SIZE)
BACKENDS: dict[str, Callable[[Backend], Backend]] = {
    "host": lambda host: host,
    "batches": lambda host: limit_batch(host, 3),
    "delay": lambda host: limit_batch(delay(host, 0.2), 3),
    "bandwidth": lambda host: limit_bandwidth(host, 2e9),
}


@pytest.fixture(params=BACKENDS)
def executor(request: pytest.FixtureRequest) -> Executor:
    return Executor(BACKENDS[request.param](host_backend(ThreadPool(2))))


def assert_consistent(case: Scattered, task: LayeredTask) -> None:
    """Check that report and states agree on each descriptor, and that confirmed ones arrived."""
    report = task.report
    assert task.done
    unconfirmed = indices(report.unconfirmed)
    assert report.descriptors_done == COUNT - len(unconfirmed)
    assert (report.status == KVN_OK) == (not unconfirmed)
    assert all(case.arrived(index) for index in set(range(COUNT)) - unconfirmed)
    for layer, state in enumerate(task.states()):
        mine = set(range(layer * SIZE, min(COUNT, (layer + 1) * SIZE)))
        if state == LAYER_DONE:
            assert mine.isdisjoint(unconfirmed)
        elif state == LAYER_WAITING:
            assert mine <= unconfirmed
            assert not any(case.arrived(index) for index in mine)
        else:
            assert state == LAYER_FAILED
            assert not mine.isdisjoint(unconfirmed)


@pytest.mark.parametrize("size", [500, 90_000])
def test_opened_in_any_order_by_many_threads(executor: Executor, size: int) -> None:
    for turn in range(10):
        case = scatter([size] * COUNT, seed=turn)
        task = executor.layered(case.descriptors, SIZE)
        opened: list[int] = []

        def work(
            number: int, turn: int = turn, task: LayeredTask = task, opened: list[int] = opened
        ) -> None:
            if number < 2:
                assert task.wait().status == KVN_OK
                return
            order = random.Random(turn * 100 + number).sample(range(LAYERS), LAYERS)
            opened.extend(layer for layer in order if task.open(layer))
            assert task.sealed

        at_once(work)
        assert sorted(opened) == list(range(LAYERS))  # each layer by one thread
        assert_consistent(case, task)
        case.assert_moved()


@pytest.mark.parametrize("end", ["cancel", "deadline", "close", "fault"])
def test_given_up_while_others_open_wait_and_poll(executor: Executor, end: str) -> None:
    for turn in range(20):
        backend = executor.backend
        if end == "fault":
            backend = fail_at(backend, random.Random(turn).randrange(COUNT))
        own = Executor(backend)
        case = scatter([40_000] * COUNT, seed=turn)
        task = own.layered(case.descriptors, SIZE)

        def give_up(task: LayeredTask = task, own: Executor = own) -> object:
            if end == "cancel":
                return task.cancel()
            if end == "deadline":
                return task.wait(timeout_ms=0.3)
            return own.close() if end == "close" else task.wait()

        def open_some(number: int, turn: int = turn, task: LayeredTask = task) -> None:
            layers = range(LAYERS) if end == "fault" else range(1, LAYERS)
            order = random.Random(turn * 100 + number).sample(layers, len(layers))
            for layer in order:
                task.open(layer)

        calls: list[Callable[[int], object]] = [
            open_some,
            open_some,
            lambda _, give_up=give_up: give_up(),
            lambda _, task=task: task.wait(),
            lambda _, task=task: [task.done for _ in range(20)],
            lambda _, task=task: [task.report for _ in range(20)],
            lambda _, task=task: [task.states() for _ in range(20)],
        ]
        at_once(lambda number, calls=calls: calls[number](number), len(calls))
        assert_consistent(case, task)
        after = copy_of(case.target)
        expected = {KVN_FAILED} if end == "fault" else {KVN_CANCELLED, KVN_TIMEOUT}
        assert task.report.status in expected
        other = scatter([300_000])
        own.close() if end == "close" else own.run(other.descriptors)
        assert_same(case.target, after)  # no byte arrives later


def test_cancelling_wakes_threads_that_wait_for_a_layer_to_be_opened(executor: Executor) -> None:
    case = scatter([100] * COUNT)
    task = executor.layered(case.descriptors, SIZE)

    def work(number: int) -> None:
        assert (task.cancel() if number == 0 else task.wait()).status == KVN_CANCELLED

    at_once(work)
    case.assert_moved(set())


def test_a_wait_copies_though_another_layer_is_not_open() -> None:
    """Layers in flight progress during a wait for others: here only waiting moves bytes."""
    case = scatter([1000] * COUNT)
    executor = Executor(limit_bandwidth(host_backend(ThreadPool(1)), 1e9))
    task = executor.layered(case.descriptors, COUNT // 2)
    half, waiting = set(range(COUNT // 2)), Event()

    def work(number: int) -> None:
        if number == 0:
            waiting.set()
            assert task.wait().status == KVN_OK
            return
        waiting.wait()
        assert task.open(0)
        while not all(case.arrived(index) for index in half):
            pass
        assert task.open(1)

    at_once(work, 2)
    case.assert_moved()


def test_many_tasks_share_an_executor() -> None:
    executor = Executor(host_backend(ThreadPool(2)))

    def work(number: int) -> None:
        for turn in range(5):
            case = scatter([60_000] * COUNT, seed=number * 10 + turn)
            task = executor.layered(case.descriptors, SIZE, keep=case)
            for layer in random.Random(turn).sample(range(LAYERS), LAYERS):
                task.open(layer)
            assert task.wait().status == KVN_OK
            case.assert_moved()

    at_once(work, 6)
    assert repr(executor).endswith("0 tasks in flight>")
