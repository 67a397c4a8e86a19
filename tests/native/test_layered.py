"""Layers, which open in any order and each move a slice; one outcome covers the whole array."""

import gc
import json
import os
import signal
import weakref
from threading import Thread

import numpy as np
import pytest

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_OK,
    KVN_PEER_GONE,
    KVN_PENDING,
    KVN_TIMEOUT,
    Backend,
    NativeError,
    ThreadPool,
    host_backend,
)
from kvnative._executor import Executor
from kvnative._layered import LAYER_DONE, LAYER_FAILED, LAYER_MOVING, LAYER_WAITING, LayeredTask
from kvnative._lower import Descriptors, lower
from tests.native.scatter import scatter
from tests.support.spare import assert_same
from tests.support.wrappers import delay, fail_at, hold, let_go, limit_bandwidth, limit_batch, trace

FOREVER_MS = 1e9


@pytest.fixture
def host() -> Backend:
    return host_backend(ThreadPool(2))


@pytest.fixture
def executor(host: Backend) -> Executor:
    return Executor(host)


def members(layers: list[int], size: int, count: int) -> set[int]:
    """Return the indices of the descriptors of some layers."""
    return {i for i in range(count) if i // size in layers}


@pytest.mark.parametrize(
    ("count", "size", "layers"), [(10, 3, 4), (9, 3, 3), (2, 3, 1), (5, 1, 5), (4, 2**63, 1)]
)
def test_the_array_is_cut_into_layers(
    executor: Executor, count: int, size: int, layers: int
) -> None:
    case = scatter([100] * count)
    task = executor.layered(case.descriptors, size)
    assert (task.num_layers, task.states()) == (layers, (LAYER_WAITING,) * layers)
    for layer in reversed(range(layers)):
        assert not task.done
        assert not task.sealed
        assert task.open(layer)
    assert task.sealed
    assert task.done
    assert task.report.status == KVN_OK
    case.assert_moved()


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_layers_that_have_ended_are_seen_beside_one_that_moves(host: Backend, slow: int) -> None:
    """In any order of opening, and without a waiting thread."""
    nbytes = [8] * 3
    nbytes[slow] = 32 << 20
    case = scatter(nbytes)
    task = Executor(limit_bandwidth(host, 1e6)).layered(case.descriptors, 1)
    expected = [LAYER_DONE] * 3
    expected[slow] = LAYER_MOVING
    for layer in range(3):
        assert task.open(layer)
    while task.states().count(LAYER_DONE) < 2:
        pass
    assert task.states() == tuple(expected)
    task.cancel()


def test_a_task_without_descriptors_has_no_layers(executor: Executor) -> None:
    task = executor.layered(Descriptors(), 7)
    assert (task.num_layers, task.states(), task.report.status) == (0, (), KVN_OK)
    assert task.sealed
    with pytest.raises(ValueError, match="layer = 0"):
        task.open(0)


def test_only_opened_layers_move(executor: Executor) -> None:
    case = scatter([100] * 10)
    task = executor.layered(case.descriptors, 3)
    case.assert_moved(set())
    opened = []
    for layer in (3, 0, 2):
        assert task.open(layer)
        opened.append(layer)
        case.assert_moved(members(opened, 3, 10))
        assert [task.states()[index] for index in opened] == [LAYER_DONE] * len(opened)
    assert task.states()[1] == LAYER_WAITING
    report = task.report
    assert (report.status, report.bytes_done, report.unconfirmed) == (KVN_PENDING, 700, ((0, 10),))


def test_a_layer_opens_once(executor: Executor) -> None:
    case = scatter([100] * 6)
    task = executor.layered(case.descriptors, 3)
    assert [task.open(0), task.open(0)] == [True, False]
    case.target[:] = 0
    assert not task.open(0)
    assert not case.target.any()
    assert task.open(1)
    assert [task.open(0), task.open(1)] == [False, False]


@pytest.mark.parametrize("layer", [-1, 2, 2**64])
def test_a_layer_that_does_not_exist_is_refused(executor: Executor, layer: int) -> None:
    case = scatter([100] * 6)
    task = executor.layered(case.descriptors, 3)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"layer = {layer}: expected 0 to 1"):
            task.open(layer)
        task.cancel()


def test_a_layer_has_descriptors(executor: Executor) -> None:
    case = scatter([100] * 6)
    for size in (0, -3):
        with pytest.raises(ValueError, match=f"layer_size = {size}: expected at least 1"):
            executor.layered(case.descriptors, size)
    lower(*[np.ones(1, np.uint64)] * 5, out=case.descriptors)  # no task holds them


@pytest.mark.parametrize("max_batch", [1, 2, 5, 8, 100])
@pytest.mark.parametrize("size", [100, 70_000])
def test_layers_of_several_batches(host: Backend, max_batch: int, size: int) -> None:
    case = scatter([size] * 30, seed=max_batch)
    task = Executor(limit_batch(host, max_batch)).layered(case.descriptors, 8)
    for layer in (2, 0, 3, 1):
        task.open(layer)
    report = task.wait()
    assert (report.status, report.bytes_done) == (KVN_OK, case.total)
    case.assert_moved()


def test_polling_alone_drives_batches_of_layers(host: Backend) -> None:
    case = scatter([300_000] * 12)
    task = Executor(limit_batch(host, 2)).layered(case.descriptors, 5)
    for layer in range(3):
        task.open(layer)
    while not task.done:
        pass
    case.assert_moved()


@pytest.mark.parametrize("max_batch", [1, 3, 100])
@pytest.mark.parametrize("index", [0, 4, 5, 9, 10, 11])
def test_a_fault_ends_the_task(host: Backend, max_batch: int, index: int) -> None:
    case = scatter([100] * 12, seed=index)
    backend = fail_at(limit_batch(host, max_batch), index, status=KVN_PEER_GONE, code=77)
    task = Executor(backend).layered(case.descriptors, 5)
    bad = index // 5
    good = [layer for layer in (2, 0) if layer != bad]
    assert all(task.open(layer) for layer in good)
    assert task.open(bad)
    report = task.wait()  # with larger batches the fault may come only now
    assert task.sealed
    assert (report.status, report.code, report.failed) == (KVN_PEER_GONE, 77, index)
    moved = members(good, 5, 12) | set(range(bad * 5, index))
    missing = sorted(set(range(12)) - moved)
    assert {i for first, last in report.unconfirmed for i in range(first, last)} == set(missing)
    assert report.descriptors_done == len(moved)
    assert report.bytes_done == 100 * len(moved)
    assert f"descriptor {index} was made to fail" in report.message
    assert task.states()[bad] == LAYER_FAILED
    case.assert_moved(moved)
    for layer in range(3):
        assert not task.open(layer)
    case.assert_moved(moved)
    assert task.report is report


def test_a_failure_waits_for_the_layers_in_flight(host: Backend) -> None:
    case = scatter([100] * 9)
    held = hold(host)
    task = Executor(fail_at(held, 0)).layered(case.descriptors, 3)
    assert task.open(1)
    assert task.open(0)
    assert task.states() == (LAYER_FAILED, LAYER_MOVING, LAYER_WAITING)
    assert not task.open(2)
    assert task.report.status == KVN_PENDING
    let_go(held)
    report = task.wait()
    assert (report.failed, report.unconfirmed) == (0, ((0, 3), (6, 9)))
    assert task.states() == (LAYER_FAILED, LAYER_DONE, LAYER_WAITING)


def test_the_first_failure_is_kept_when_the_rest_is_given_up(host: Backend) -> None:
    case = scatter([100] * 9)
    task = Executor(fail_at(delay(host, FOREVER_MS), 3)).layered(case.descriptors, 3)
    assert task.open(2)
    assert task.open(1)
    for report in (task.wait(timeout_ms=1), task.cancel()):
        assert (report.failed, report.unconfirmed) == (3, ((0, 9),))
    assert task.states() == (LAYER_WAITING, LAYER_FAILED, LAYER_FAILED)


def test_wrappers_see_indices_of_the_whole_array(host: Backend) -> None:
    read_fd, write_fd = os.pipe()
    case = scatter([100] * 8)
    task = Executor(limit_batch(trace(host, write_fd), 2)).layered(case.descriptors, 3)
    for layer in (2, 1):
        task.open(layer)
    while LAYER_MOVING in task.states():
        pass
    os.close(write_fd)
    with os.fdopen(read_fd) as lines:
        calls = [json.loads(line) for line in lines]
    batches = [(call["first"], call["count"]) for call in calls if call["call"] == "submit"]
    assert sorted(batches) == [(3, 2), (5, 1), (6, 2)]


def test_a_deadline_gives_up_layers_that_are_not_open(host: Backend, executor: Executor) -> None:
    case = scatter([100] * 9)
    task = executor.layered(case.descriptors, 3)
    task.open(1)
    while LAYER_MOVING in task.states():
        pass
    report = task.wait(timeout_ms=1)
    assert (report.status, report.unconfirmed) == (KVN_TIMEOUT, ((0, 3), (6, 9)))
    assert report.message == (
        "the deadline passed: 300 of 900 bytes were moved, 6 of 9 descriptors are not confirmed"
    )
    assert not task.open(0)
    case.assert_moved({3, 4, 5})
    slow = Executor(delay(host, FOREVER_MS)).layered(case.descriptors, 3)
    slow.open(0)
    assert slow.wait(timeout_ms=1).unconfirmed == ((0, 9),)
    assert slow.states() == (LAYER_FAILED, LAYER_WAITING, LAYER_WAITING)


def test_a_deadline_may_let_the_task_continue(host: Backend, executor: Executor) -> None:
    case = scatter([100] * 6)
    layered = executor.layered(case.descriptors, 3)
    held = hold(host)
    submitted = Executor(held).submit(case.descriptors)
    for task in (layered, submitted):
        report = task.wait(timeout_ms=0, give_up=False)
        assert (report.status, report.unconfirmed) == (KVN_PENDING, ((0, 6),))
    let_go(held)
    layered.open(0)
    while layered.wait(1, False).bytes_done != 300:
        pass
    layered.open(1)
    for task in (layered, submitted):
        assert task.wait(timeout_ms=1e6, give_up=False).status == KVN_OK


def test_cancel_stops_moving_layers_and_opens_no_more(host: Backend) -> None:
    case = scatter([1000] * 9000)
    task = Executor(limit_bandwidth(host, 1e6)).layered(case.descriptors, 3000)
    task.open(0)
    task.open(2)
    while task.report.bytes_done < 5000:
        pass
    report = task.cancel()
    assert report.status == KVN_CANCELLED
    assert report.message.startswith("cancelled: ")
    after = case.target.copy()
    assert not task.open(1)
    assert task.cancel() is task.wait() is task.report is report
    confirmed = set(range(9000)) - {i for a, b in report.unconfirmed for i in range(a, b)}
    assert confirmed
    assert all(case.arrived(index) for index in confirmed)
    assert members([1], 3000, 9000).isdisjoint(confirmed)
    assert_same(case.target, after)


def test_every_gap_is_reported(executor: Executor) -> None:
    case = scatter([10] * 600)
    task = executor.layered(case.descriptors, 2)
    for layer in range(0, 300, 2):
        task.open(layer)
    report = task.cancel()
    assert report.unconfirmed == tuple((4 * i + 2, 4 * i + 4) for i in range(150))
    assert report.descriptors_done == 300


def test_waiting_begins_before_anything_is_open(executor: Executor) -> None:
    case = scatter([400_000] * 12)
    task = executor.layered(case.descriptors, 3)
    reports = []
    threads = [Thread(target=lambda: reports.append(task.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for layer in (3, 1, 0, 2):
        task.open(layer)
    for thread in threads:
        thread.join()
    assert [report.status for report in reports] == [KVN_OK] * 3
    case.assert_moved()


class Owner:
    """An object for weak references."""


@pytest.mark.parametrize("end", ["open", "cancel", "close"])
def test_objects_of_a_layered_task_live_until_its_outcome(host: Backend, end: str) -> None:
    case = scatter([100] * 6)
    executor = Executor(host)
    keep, watched = Owner(), case.descriptors
    alive = weakref.ref(keep)
    task = executor.layered(watched, 3, keep=(keep, case))
    task.open(1)
    del keep, case
    gc.collect()
    assert alive() is not None
    with pytest.raises(BufferError):
        lower(*[np.ones(1, np.uint64)] * 5, out=watched)
    if end == "open":
        task.open(0)
    elif end == "cancel":
        task.cancel()
    else:
        executor.close()
    assert alive() is None
    lower(*[np.ones(1, np.uint64)] * 5, out=watched)


def test_closing_cancels_unopened_layers_and_waits_for_the_rest(host: Backend) -> None:
    case = scatter([400_000] * 6)
    with Executor(host) as executor:
        whole, part = (executor.layered(case.descriptors, 3) for _ in range(2))
        for task, layer in ((whole, 0), (part, 0), (whole, 1)):
            task.open(layer)
    assert whole.report.status == KVN_OK
    assert part.report.status == KVN_CANCELLED
    assert not part.open(1)
    with pytest.raises(NativeError, match="the executor is closed"):
        executor.layered(case.descriptors, 3)


def test_a_dropped_handle_still_completes(executor: Executor) -> None:
    case = scatter([400_000] * 6)
    keep = Owner()
    alive = weakref.ref(keep)
    task = executor.layered(case.descriptors, 3, keep=keep)
    task.open(1)
    task.open(0)
    del task, keep
    executor.close()
    case.assert_moved()
    assert alive() is None


class Interrupted(Exception):  # noqa: N818
    """Raised by the signal handler."""


def test_a_signal_ends_a_wait_and_nothing_else(executor: Executor) -> None:
    def interrupt(_signal: int, _frame: object) -> None:
        raise Interrupted

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        task.wait()

    case = scatter([100] * 6)
    task = executor.layered(case.descriptors, 3)
    task.open(0)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupted):
            wait()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert task.open(1)
    assert task.wait().status == KVN_OK
    case.assert_moved()


def test_a_layered_task_is_not_made_by_hand() -> None:
    with pytest.raises(TypeError, match="a LayeredTask comes from an Executor"):
        LayeredTask()
