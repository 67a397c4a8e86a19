"""The queue of ended tasks: each watched task is queued once, even if others wait for it."""

import gc
import multiprocessing
import random
import select
import threading
import weakref

import pytest

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_FAILED,
    KVN_OK,
    Backend,
    NativeError,
    ThreadPool,
    host_backend,
    striped,
)
from kvnative._completions import CompletionQueue
from kvnative._executor import Executor
from kvnative._layered import LAYER_MOVING, LayeredTask
from kvnative._task import AnyTask, Task
from tests.native.scatter import scatter
from tests.support.ends import assert_no_outcome_before_its_end
from tests.support.wrappers import delay, fail_at, hold, let_go, limit_batch, swap_at

INLINE = 4096
LARGE = 1 << 20
DEADLINE_S = 30.0  # only a hanging test reaches it


@pytest.fixture
def host() -> Backend:
    return host_backend(ThreadPool(2))


def submit(executor: Executor, sizes: list[int]) -> Task:
    case = scatter(sizes)
    return executor.submit(case.descriptors, keep=case)


def layered(executor: Executor, sizes: list[int]) -> LayeredTask:
    """Submit a task with layers of two descriptors."""
    case = scatter(sizes)
    return executor.layered(case.descriptors, 2, keep=case)


def taken(queue: CompletionQueue, count: int) -> list[object]:
    """Take the next items as they arrive."""
    items: list[object] = []
    poll = select.poll()
    poll.register(queue, select.POLLIN)
    while len(items) < count:
        assert poll.poll(DEADLINE_S * 1000), f"{len(items)} of {count} have come"
        items += queue.take()
    return items


def is_readable(queue: CompletionQueue) -> bool:
    return bool(select.select([queue], [], [], 0)[0])


@pytest.mark.parametrize("nbytes", [INLINE, LARGE])
def test_a_task_watched_before_or_after_its_end_is_queued(host: Backend, nbytes: int) -> None:
    queue, executor = CompletionQueue(), Executor(host)
    early = submit(executor, [nbytes] * 3)
    queue.watch(early, "early")
    late = submit(executor, [nbytes] * 3)
    assert late.wait().status == KVN_OK
    assert late.ended
    queue.watch(late, "late")
    assert sorted(map(str, taken(queue, 2))) == ["early", "late"]
    assert early.ended
    assert early.wait().status == KVN_OK
    assert not is_readable(queue)
    assert queue.take() == []


@pytest.mark.parametrize("count", [255, 256, 257, 512, 513])
def test_take_returns_all_ended_tasks(host: Backend, count: int) -> None:
    """Reading the descriptor clears the signal, so `take` must return all of them."""
    queue, executor = CompletionQueue(), Executor(host)
    tasks = [submit(executor, [8]) for _ in range(count)]
    for number, task in enumerate(tasks):
        queue.watch(task, number)
    assert queue.take() == [*range(count)]
    assert not is_readable(queue)


WRAPS = {
    "host": lambda host: host,
    "delay": lambda host: delay(host, 1),
    "batches": lambda host: limit_batch(host, 2),
    "fault": lambda host: fail_at(host, 3),
    "fault at once": lambda host: fail_at(host, 0),
    "refused": lambda host: fail_at(host, 3, at_submit=True),
    "swap": lambda host: swap_at(host, 1),
    "stripes": lambda host: striped([host] * 3, min_nbytes=1),
    "one stripe fails": lambda host: striped([host, fail_at(host, 3), host], min_nbytes=1),
    "one stripe is refused": lambda host: striped(
        [host, fail_at(host, 3, at_submit=True), host], min_nbytes=1
    ),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("nbytes", [INLINE, LARGE])
def test_every_backend_reports_the_end_of_a_batch(host: Backend, wrap: str, nbytes: int) -> None:
    queue, executor = CompletionQueue(), Executor(WRAPS[wrap](host))
    task = submit(executor, [nbytes] * 6)
    queue.watch(task, task)
    assert taken(queue, 1) == [task]
    assert task.ended
    expected = KVN_FAILED if "fa" in wrap or "refused" in wrap else KVN_OK
    assert task.wait(0).status == expected
    assert queue.take() == []


def test_no_outcome_is_known_before_the_end_of_a_batch(host: Backend) -> None:
    case = scatter([LARGE] * 6)
    for backend in (host, striped([host] * 3, min_nbytes=1)):
        assert_no_outcome_before_its_end(backend, case.descriptors)


def test_a_held_task_is_queued_when_it_is_let_go_or_cancelled(host: Backend) -> None:
    held = hold(host)
    queue, executor = CompletionQueue(), Executor(held)
    tasks = [submit(executor, [INLINE]) for _ in range(3)]
    for task in tasks:
        queue.watch(task, task)
    assert not is_readable(queue)
    assert not tasks[1].ended
    assert tasks[1].cancel().status == KVN_CANCELLED
    assert taken(queue, 1) == [tasks[1]]
    let_go(held)
    assert taken(queue, 2) == [tasks[0], tasks[2]]
    assert tasks[0].wait(0).status == KVN_OK


@pytest.mark.parametrize("nbytes", [INLINE, LARGE])
def test_a_layered_task_is_queued_after_its_last_layer(host: Backend, nbytes: int) -> None:
    queue = CompletionQueue()
    task = layered(Executor(host), [nbytes] * 6)
    queue.watch(task, task)
    task.open(2)
    task.open(0)
    while LAYER_MOVING in task.states():
        pass
    assert not task.ended
    assert not is_readable(queue)
    task.open(1)
    assert taken(queue, 1) == [task]
    assert task.ended
    assert task.wait(0).status == KVN_OK


@pytest.mark.parametrize("nbytes", [INLINE, LARGE])
def test_a_failed_layer_is_queued_though_others_were_never_ready(
    host: Backend, nbytes: int
) -> None:
    queue = CompletionQueue()
    task = layered(Executor(fail_at(host, 4)), [nbytes] * 6)
    queue.watch(task, task)
    task.open(2)
    assert task in taken(queue, 1)
    assert task.done
    assert task.report.status == KVN_FAILED


@pytest.mark.parametrize("is_striped", [False, True], ids=["whole", "of the last stripe"])
def test_a_later_failure_is_queued_though_others_were_never_ready(
    host: Backend, is_striped: bool
) -> None:
    """No thread looks at the task when it fails."""
    held = hold(fail_at(host, 4))
    queue = CompletionQueue()
    backend = striped([held, host], min_nbytes=1) if is_striped else held
    task = layered(Executor(backend), [INLINE] * 6)
    queue.watch(task, task)
    task.open(2)
    assert not is_readable(queue)
    let_go(held)
    assert taken(queue, 1) == [task]
    assert task.wait(0).status == KVN_FAILED


def test_cancelled_layers_are_queued(host: Backend) -> None:
    queue = CompletionQueue()
    tasks = [layered(Executor(host), [INLINE] * 6) for _ in range(2)]
    for task in tasks:
        queue.watch(task, task)
    tasks[1].open(1)
    for task in tasks:
        assert queue.take() == []
        task.cancel()
        assert taken(queue, 1) == [task]


def test_a_forgotten_token_is_not_delivered(host: Backend) -> None:
    queue, executor = CompletionQueue(), Executor(host)
    task = submit(executor, [INLINE])
    queue.watch(task, "first")
    queue.watch(task, "second")
    assert not queue.forget(task, "first")
    assert queue.forget(task, "second")
    assert not queue.forget(task, "second")
    assert queue.take() == []
    with pytest.raises(ValueError, match="another queue"):
        CompletionQueue().watch(task, "third")
    with pytest.raises(TypeError):
        queue.watch(object(), "fourth")  # type: ignore[arg-type]


class Item:
    """An object for weak references."""


def test_a_task_that_is_dropped_leaves_the_queue_and_the_queue_its_items(host: Backend) -> None:
    queue, executor = CompletionQueue(), Executor(host)
    for _ in range(300):  # more than one call takes
        task = submit(executor, [INLINE])
        queue.watch(task, "settled")
        queue.forget(task, "settled")
        del task
    assert queue.take() == []
    item = Item()
    gone = weakref.ref(item)
    task = submit(executor, [INLINE])
    queue.watch(task, (item, queue, task))  # a cycle
    del item, task, queue
    gc.collect()
    assert gone() is None


def test_no_end_is_lost(host: Backend) -> None:
    """Tasks end on three kinds of threads, while others watch, wait for and cancel them."""
    queue = CompletionQueue()
    executor = Executor(limit_batch(host, 2))
    plain = Executor(host)
    rounds, threads = 150, 4
    given = [0] * threads

    def work(index: int) -> None:
        chance = random.Random(index)
        for number in range(rounds):
            sizes = [chance.choice([64, INLINE, LARGE]) for _ in range(3)]
            way = chance.choice([executor, plain])
            task: AnyTask
            if chance.random() < 0.3:
                task = opened = layered(way, sizes)
                queue.watch(task, (index, number, task))
                opened.open(1)
                opened.open(0)
            else:
                task = submit(way, sizes)
            if chance.random() < 0.3:
                task.cancel()
            elif chance.random() < 0.3:
                task.wait(chance.random(), give_up=False)
            queue.watch(task, (index, number, task))
            given[index] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    seen: set[tuple[int, int]] = set()
    poll = select.poll()
    poll.register(queue, select.POLLIN)
    while len(seen) < rounds * threads:
        assert poll.poll(DEADLINE_S * 1000), f"{len(seen)} of {sum(given)} have come"
        seen.update((index, number) for index, number, _ in queue.take())
    for worker in workers:
        worker.join(DEADLINE_S)
    assert given == [rounds] * threads


def use_in_child(queue: CompletionQueue, task: AnyTask) -> None:
    for call in (queue.take, lambda: queue.watch(task, "child")):
        with pytest.raises(NativeError, match="forked"):
            call()


def test_a_forked_child_is_refused(host: Backend) -> None:
    queue, executor = CompletionQueue(), Executor(host)
    task = submit(executor, [LARGE])
    child = multiprocessing.get_context("fork").Process(target=use_in_child, args=(queue, task))
    child.start()
    child.join(DEADLINE_S)
    assert child.exitcode == 0
    queue.watch(task, "parent")
    assert taken(queue, 1) == ["parent"]
