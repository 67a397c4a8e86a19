"""Submitting, waiting, deadlines, cancelling, and the lifetime of objects."""

import gc
import re
import signal
import time
import weakref

import numpy as np
import pytest

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_OK,
    KVN_PENDING,
    KVN_REVOKED,
    KVN_TIMEOUT,
    Backend,
    NativeError,
    ThreadPool,
    host_backend,
)
from kvnative._executor import Executor
from kvnative._layered import LayeredTask
from kvnative._lower import Descriptors, lower
from kvnative._report import Report
from kvnative._task import Revocable, Task, revoke
from tests.native.scatter import Scattered, indices, scatter
from tests.support.wrappers import delay, limit_bandwidth, limit_batch

MIB = 1 << 20
FOREVER_BYTES_PER_SECOND = 1e6  # 10 MB take 10 s


@pytest.fixture
def pool() -> ThreadPool:
    return ThreadPool(2)


@pytest.fixture
def executor(pool: ThreadPool) -> Executor:
    return Executor(host_backend(pool))


@pytest.fixture
def slow(pool: ThreadPool) -> Executor:
    return Executor(limit_bandwidth(host_backend(pool), FOREVER_BYTES_PER_SECOND))


def assert_only_confirmed_arrived(case: Scattered, report: Report) -> None:
    """Check that confirmed descriptors arrived, and at most one other one in part."""
    count = len(case.nbytes)
    unconfirmed = indices(report.unconfirmed)
    confirmed = set(range(count)) - unconfirmed
    assert report.descriptors_done == len(confirmed)
    assert all(case.arrived(index) for index in confirmed)
    moved = case.target != case.expected(confirmed)
    partial = report.bytes_done - sum(int(case.nbytes[index]) for index in confirmed)
    assert 0 <= partial < int(case.nbytes.max())
    assert np.count_nonzero(moved) <= partial


def test_submit_then_wait(executor: Executor) -> None:
    case = scatter([MIB + 1] * 20)
    task = executor.submit(case.descriptors)
    report = task.wait()
    assert (report.status, report.message, report.failed) == (KVN_OK, "", None)
    assert task.done
    assert task.report is task.wait(0) is task.cancel() is report
    case.assert_moved()


def test_a_small_transfer_is_done_when_submit_returns(executor: Executor) -> None:
    case = scatter([4096])
    task = executor.submit(case.descriptors)
    case.assert_moved()
    assert task.done


def test_polling_alone_sees_the_end(executor: Executor) -> None:
    case = scatter([MIB] * 8)
    task = executor.submit(case.descriptors)
    while not task.done:
        assert task.report.status in (KVN_PENDING, KVN_OK)
    assert task.report.bytes_done == case.total
    case.assert_moved()


def test_batches_of_any_size_make_one_transfer(pool: ThreadPool) -> None:
    for max_batch in (1, 2, 7, 100, 101):
        case = scatter([1000] * 90 + [200_000] * 10, seed=max_batch)
        executor = Executor(limit_batch(host_backend(pool), max_batch))
        task = executor.submit(case.descriptors)
        report = task.wait()
        assert (report.status, report.bytes_done) == (KVN_OK, case.total)
        case.assert_moved()


def test_polling_alone_drives_batches(pool: ThreadPool) -> None:
    case = scatter([300_000] * 9)
    task = Executor(limit_batch(host_backend(pool), 2)).submit(case.descriptors)
    while not task.done:
        pass
    case.assert_moved()


@pytest.mark.parametrize("size", [1000, 3_000_000])
def test_a_deadline_stops_a_transfer_of_ten_seconds(slow: Executor, size: int) -> None:
    case = scatter([size] * (10_000_000 // size))
    began = time.monotonic()
    report = slow.run(case.descriptors, timeout_ms=50)
    assert time.monotonic() - began < 8
    assert report.status == KVN_TIMEOUT
    assert report.message.startswith("the deadline passed: ")
    assert 0 < report.bytes_done < 5_000_000
    assert report.unconfirmed[-1][1] == len(case.nbytes)
    assert_only_confirmed_arrived(case, report)
    after = case.target.copy()
    other = scatter([2000])
    slow.run(other.descriptors)  # no byte of the abandoned rest arrives later
    assert np.array_equal(case.target, after)


def test_a_deadline_in_a_later_batch(pool: ThreadPool) -> None:
    limited = limit_batch(limit_bandwidth(host_backend(pool), 1e6), 10)
    case = scatter([1000] * 10_000)
    task = Executor(limited).submit(case.descriptors)
    while task.report.bytes_done < 10_000:
        task.wait(1, give_up=False)
    report = task.wait(timeout_ms=20)
    assert report.status == KVN_TIMEOUT
    assert report.descriptors_done >= 10
    assert_only_confirmed_arrived(case, report)


def test_a_deadline_that_is_met_changes_nothing(executor: Executor) -> None:
    case = scatter([MIB] * 4)
    assert executor.run(case.descriptors, timeout_ms=1e300).status == KVN_OK
    case.assert_moved()


def test_a_deadline_of_the_host_backend_itself(executor: Executor) -> None:
    case = scatter([MIB] * 64)
    report = executor.submit(case.descriptors).wait(timeout_ms=0)
    assert report.status in (KVN_TIMEOUT, KVN_OK)
    unconfirmed = indices(report.unconfirmed)
    assert all(case.arrived(index) for index in set(range(64)) - unconfirmed)
    assert (report.status == KVN_OK) == (not unconfirmed)


def test_a_cancelled_task_ends(slow: Executor) -> None:
    case = scatter([1000] * 10_000)
    task = slow.submit(case.descriptors)
    while task.report.bytes_done < 5000:
        pass
    report = task.cancel()
    assert report.status == KVN_CANCELLED
    assert report.message.startswith("cancelled: ")
    assert report.bytes_done >= 5000
    assert_only_confirmed_arrived(case, report)
    assert task.wait() is report


@pytest.mark.parametrize("bad", [-1.0, -0.001, float("nan")])
def test_a_deadline_must_be_a_time(executor: Executor, bad: float) -> None:
    case = scatter([10])
    with pytest.raises(ValueError, match=rf"timeout_ms = {bad}: expected None or a number >= 0"):
        executor.run(case.descriptors, timeout_ms=bad)
    case.assert_moved(set())


class Owner:
    """An object for weak references."""


def test_objects_of_a_task_live_until_its_outcome(slow: Executor) -> None:
    case = scatter([1000] * 10_000)
    keep, watched = Owner(), case.descriptors
    alive = weakref.ref(keep)
    task = slow.submit(case.descriptors, keep=(keep, case))
    del keep, case
    gc.collect()
    assert alive() is not None
    with pytest.raises(BufferError):
        lower(*[np.ones(1, np.uint64)] * 5, out=watched)
    task.cancel()
    assert alive() is None
    lower(*[np.ones(1, np.uint64)] * 5, out=watched)


class TestRevoking:
    """Memory of tasks that its owner revokes."""

    @pytest.mark.parametrize("how", ["itself", "a part", "a part of a part"])
    @pytest.mark.parametrize("layered", [False, True])
    def test_revoking_ends_tasks_in_flight(self, slow: Executor, how: str, layered: bool) -> None:
        case = scatter([1000] * 10_000)
        memory = Revocable()
        kept = memory
        if how != "itself":
            kept = Revocable((Revocable(), kept))
        if how == "a part of a part":
            kept = Revocable((kept, Revocable()))
        task: Task | LayeredTask
        if layered:
            task = slow.layered(case.descriptors, 5000, ("plan", kept))
            task.open(0)
        else:
            task = slow.submit(case.descriptors, ("plan", kept))
        assert not task.done
        revoke(memory, "it is needed")
        assert task.report.status == KVN_REVOKED
        assert re.match("its memory was revoked: .* of 10000 descriptors", task.report.message)
        assert_only_confirmed_arrived(case, task.report)
        assert memory.revoked == kept.revoked == "it is needed"

    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_memory_is_revoked_with_any_of_its_parts(self, which: int) -> None:
        parts = tuple(Revocable() for _ in range(3))
        whole = Revocable(parts)
        assert whole.revoked is None
        revoke(parts[which], "it goes")
        assert whole.revoked == "it goes"
        assert [part.revoked for part in parts].count(None) == 2

    def test_later_tasks_move_nothing(self, executor: Executor) -> None:
        case = scatter([4096] * 3)
        memory = Revocable()
        revoke(memory, "first")
        revoke(memory, "second")
        assert memory.revoked == "first"
        reports = [
            executor.submit(case.descriptors, ("plan", memory)).report,
            executor.run(case.descriptors, None, (memory,)),
        ]
        layered = executor.layered(case.descriptors, 1, (memory,))
        assert not layered.open(0)
        for report in (*reports, layered.report):
            assert (report.status, report.unconfirmed, report.bytes_done) == (
                KVN_REVOKED,
                ((0, 3),),
                0,
            )
        case.assert_moved(set())

    def test_revoking_ends_tasks_of_all_executors(self, pool: ThreadPool) -> None:
        cases = [scatter([1000] * 10_000) for _ in range(3)]
        slowly = [Executor(limit_bandwidth(host_backend(pool), 1e6)) for _ in cases]
        memory, other = Revocable(), Revocable()
        tasks = [
            slowly[0].submit(cases[0].descriptors, (other, memory)),
            slowly[1].submit(cases[1].descriptors, (memory,)),
            slowly[2].submit(cases[2].descriptors, (other,)),
        ]
        revoke(memory, "it goes")
        assert [task.done for task in tasks] == [True, True, False]
        tasks[2].cancel()

    def test_ended_tasks_keep_their_outcome(self, executor: Executor) -> None:
        case = scatter([MIB] * 4)
        memory = Revocable()
        task = executor.submit(case.descriptors, (memory,))
        while not task.done:
            pass
        revoke(memory, "it goes")
        assert task.report.status == KVN_OK


def test_a_dropped_handle_still_completes(executor: Executor) -> None:
    case = scatter([MIB] * 32)
    keep = Owner()
    alive = weakref.ref(keep)
    executor.submit(case.descriptors, keep=keep)
    del keep
    gc.collect()
    executor.close()
    case.assert_moved()
    assert alive() is None


def test_a_dropped_executor_still_completes(pool: ThreadPool) -> None:
    case = scatter([1000] * 50)
    held = Executor(delay(host_backend(pool), 1e9))
    task = held.submit(case.descriptors)
    del held
    gc.collect()
    assert task.report.status == KVN_PENDING
    assert task.cancel().status == KVN_CANCELLED


def test_finished_tasks_are_released_by_later_submits(executor: Executor) -> None:
    keep = Owner()
    alive = weakref.ref(keep)
    case = scatter([300_000] * 2)
    executor.submit(case.descriptors, keep=keep)
    del keep
    other = scatter([10])
    while alive() is not None:
        executor.submit(other.descriptors)
    case.assert_moved()


def test_finished_tasks_of_a_dropped_executor_are_released(
    pool: ThreadPool, executor: Executor
) -> None:
    keep = Owner()
    alive = weakref.ref(keep)
    case = scatter([300_000] * 2)
    dropped = Executor(host_backend(pool))
    dropped.submit(case.descriptors, keep=keep)
    del keep, dropped
    other = scatter([10])
    while alive() is not None:
        executor.submit(other.descriptors)
    case.assert_moved()


def test_a_reference_cycle_through_a_task_in_flight_is_not_collected(slow: Executor) -> None:
    case = scatter([1000] * 10_000)
    keep = Owner()
    keep.task = slow.submit(case.descriptors, keep=(keep, case))  # type: ignore[attr-defined]
    alive = weakref.ref(keep)
    del keep
    gc.collect()
    still = alive()
    assert still is not None
    still.task.cancel()  # type: ignore[attr-defined]
    del still
    gc.collect()
    assert alive() is None


def test_closing_waits_or_cancels_and_then_refuses(pool: ThreadPool) -> None:
    case = scatter([MIB] * 16)
    with Executor(host_backend(pool)) as executor:
        executor.submit(case.descriptors)
    case.assert_moved()
    with pytest.raises(NativeError, match="the executor is closed"):
        executor.run(case.descriptors)
    executor.close()
    never = Executor(delay(host_backend(pool), 1e9))
    task = never.submit(case.descriptors)
    never.close(cancel=True)
    assert task.report.status == KVN_CANCELLED


@pytest.mark.parametrize("kind", [Backend, Report, Task])
def test_handles_are_not_made_by_hand(kind: type) -> None:
    with pytest.raises(TypeError, match="comes from"):
        kind()


class Interrupted(Exception):  # noqa: N818
    """Raised by the signal handler."""


@pytest.mark.parametrize("how", ["run", "wait"])
def test_a_signal_ends_a_long_wait(slow: Executor, how: str) -> None:
    def interrupt(_signal: int, _frame: object) -> None:
        raise Interrupted

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        slow.run(case.descriptors) if how == "run" else slow.submit(case.descriptors).wait()

    case = scatter([1000] * 10_000)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupted):
            wait()
    finally:
        signal.signal(signal.SIGALRM, previous)
        slow.close(cancel=True)
    lower(*[np.ones(1, np.uint64)] * 5, out=case.descriptors)  # no task holds them any more


def test_descriptors_may_be_submitted_twice_at_once(executor: Executor) -> None:
    case = scatter([MIB] * 8)
    tasks = [executor.submit(case.descriptors) for _ in range(3)]
    assert [task.wait().status for task in tasks] == [KVN_OK] * 3
    case.assert_moved()


def test_an_unused_descriptor_array_is_empty(executor: Executor) -> None:
    assert executor.submit(Descriptors()).report.status == KVN_OK


def test_a_deadline_stops_a_waiter_that_copies_itself() -> None:
    """Copying 20 GB to one place takes seconds, so no piece ends by itself in time."""
    count, src, dst = 20_000, np.zeros(MIB, np.uint8), np.zeros(MIB, np.uint8)
    offsets, sizes = np.zeros(count, np.uint64), np.full(count, MIB, np.uint64)
    bases = [np.array([side.ctypes.data], np.uint64) for side in (src, dst)]
    with Executor(host_backend(ThreadPool(8))) as executor:
        report = executor.run(lower(offsets, offsets, sizes, *bases), 1)
    assert report.status == KVN_TIMEOUT
    assert report.bytes_done < count * MIB
