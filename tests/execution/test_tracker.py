"""Trackers: the tasks that they stop, their order, and the behaviour without threads."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import CacheDesc, DataType, LLMException, Rows, Transfer, Transfers
from kvplan.execution.awaitable import AwaitableTask
from kvplan.execution.completion import Tracker
from tests.support import lone_user
from tests.support.holding import held_transfers
from tests.support.refusals import refused

WAIT_S = 20  # for results that come at once
DESC = CacheDesc(4, (8, 100), DataType.DT_UINT8)
PLAN = kvplan.plan(Transfer(Rows(DESC, [0, 1]), Rows(DESC, [5, 3])), local="src")
REASON = LLMException("the engine is finalized")


def tensors(value: int) -> list[np.ndarray]:
    return [np.full(DESC.tensor_nbytes, value, np.uint8) for _ in range(4)]


class Task(AwaitableTask):
    """A task that ends by `end`, or by its cancellation."""

    def __init__(self, name: str, cancelled: list[str]) -> None:
        super().__init__()
        self._name, self._cancelled, self._error = name, cancelled, None
        self._ended = Event()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_ms: float | None = None) -> None:
        assert self._ended.wait(WAIT_S)
        if self._error is not None:
            raise self._error

    def cancel(self, reason: LLMException | None = None) -> None:
        if not self.done:
            self._cancelled.append(self._name)
            self._error = reason
            self.end()

    def end(self) -> None:
        self._ended.set()
        self._note_settled()

    def _follow(self) -> None:
        pass


def test_the_latest_task_is_cancelled_first():
    """A task that waits for an earlier one would otherwise begin when that one ends."""
    cancelled, reported = [], SimpleQueue()
    tracker = Tracker()
    tasks = [Task(name, cancelled) for name in "abcd"]
    for task in tasks:
        tracker.track(task, reported)
    tasks[1].end()
    tracker.cancel(REASON)
    assert cancelled == ["d", "c", "a"]
    assert {reported.get(timeout=WAIT_S) for _ in tasks} == {*tasks}
    tracker.close(WAIT_S)


def test_a_task_after_the_cancellation_is_cancelled_too():
    cancelled = []
    tracker = Tracker()
    tracker.cancel(REASON)
    late = Task("late", cancelled)
    tracker.track(late)
    assert cancelled == ["late"]
    with refused("LLM_FAILED", "the engine is finalized"):
        late.wait()


@pytest.mark.parametrize("asked_to", ["track", "watch"])
def test_a_task_that_its_executor_stopped_has_the_reason_of_the_tracker(asked_to):
    """An engine that is finalized may stop a task before the tracker knows the task."""
    tracker, transfers = Tracker(), Transfers(1)
    task = transfers.layered(PLAN, tensors(1), tensors(2))
    tracker.cancel(REASON)
    transfers.close(cancel=True)
    assert task.done
    getattr(tracker, asked_to)(task)
    with refused("LLM_FAILED", "the engine is finalized"):
        task.wait()


def test_the_first_cancellation_determines_the_reason():
    """A caller that cancels a transfer gets its own reason, although the engine ends next."""
    tracker = Tracker()
    with Transfers(1) as transfers:
        task = transfers.layered(PLAN, tensors(1), tensors(2))
        task.cancel()
        tracker.cancel(REASON)
        tracker.watch(task)
        with refused("LLM_CANCELLED"):
            task.wait()


@pytest.mark.parametrize("order", ["before", "after"])
def test_layers_that_are_not_ready_are_cancelled(order):
    tracker = Tracker()
    with Transfers(1) as transfers:
        task = transfers.layered(PLAN, tensors(1), tensors(2))
        if order == "before":
            tracker.cancel(REASON)
        tracker.watch(task)
        if order == "after":
            assert not task.done
            tracker.cancel(REASON)
        assert task.done
        with refused("LLM_FAILED", "the engine is finalized"):
            task.wait()


def in_completion_thread(call: Callable[[], Any]) -> Any:
    """Return the result of `call` in the thread that settles tasks."""
    found: SimpleQueue[Any] = SimpleQueue()

    class Report:
        def put(self, task: Any) -> None:
            found.put((current_thread(), call()))

    with held_transfers() as (transfers, let):
        task = transfers.submit(PLAN, tensors(1), tensors(2))
        Tracker().track(task, Report())
        let()
        thread, result = found.get(timeout=WAIT_S)
    assert thread.name == "kvplan-completions"
    return result


def test_a_tracker_is_closed_in_the_thread_that_settles_tasks():
    """A callback may finalize its engine, which then does not wait for the callback."""
    ended = Event()

    def close() -> bool:
        Tracker().close(WAIT_S * 10)
        ended.set()
        return True

    thread = Thread(target=in_completion_thread, args=(close,))
    thread.start()
    assert ended.wait(WAIT_S)
    thread.join()


def test_a_slow_callback_in_the_background_delays_no_other():
    go_on, settled = Event(), SimpleQueue()
    with held_transfers() as (transfers, let):

        def slow(error: LLMException | None) -> None:
            assert go_on.wait(WAIT_S)

        held = [
            transfers.submit(PLAN, tensors(1), tensors(2), on_outcome=on_outcome)
            for on_outcome in (slow, None)
        ]
        for task, aside in zip(held, (True, False), strict=True):
            Tracker().track(task, settled, aside=aside)
        let()
        assert settled.get(timeout=WAIT_S) is held[1]
        go_on.set()
        assert settled.get(timeout=WAIT_S) is held[0]


def test_calls_without_a_thread_run_at_once_and_later_ones_get_threads():
    program = """
        import threading
        from queue import SimpleQueue
        from kvplan.execution.completion import run_aside
        from tests.support.lone_user import allow_threads, become

        become()
        allow_threads(1)
        ran_in = SimpleQueue()
        for _ in range(40):
            run_aside(lambda: ran_in.put(threading.current_thread()))
        assert {ran_in.get_nowait() for _ in range(40)} == {threading.main_thread()}
        allow_threads(None)
        run_aside(lambda: ran_in.put(threading.current_thread()))
        assert ran_in.get(timeout=20).name == "kvplan-aside"
    """
    lone_user.run(program)
