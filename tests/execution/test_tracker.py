"""Trackers: the tasks that they stop, their order, and the behaviour without threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any

import numpy as np
import pytest

import kvplan
from kvnative._backend import Backend
from kvplan import CacheDesc, DataType, LLMException, Rows, Transfer, Transfers
from kvplan.execution.awaitable import AwaitableTask
from kvplan.execution.completion import Tracker
from tests.support import lone_user
from tests.support.holding import held_transfers
from tests.support.lines import interrupted
from tests.support.refusals import refused
from tests.support.wrappers import fail_at, hold, let_go

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


def test_a_task_that_begins_when_another_one_is_cancelled_is_cancelled_too():
    """The callback of a transfer that was stopped may submit another transfer."""
    cancelled = []
    tracker = Tracker()
    late = Task("late", cancelled)

    class First(Task):
        def end(self) -> None:
            super().end()
            tracker.track(late)

    tracker.track(First("first", cancelled))
    tracker.cancel(REASON)
    assert cancelled == ["first", "late"]


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


def test_the_end_of_the_last_task_ends_close():
    """Close begins before any line of that end; its limit is an hour."""
    for at in count(1):
        tracker, task = Tracker(), Task("last", [])
        tracker.track(task)
        closing = Thread(target=tracker.close, args=(3600,), daemon=True)

        def close(closing: Thread = closing) -> None:
            closing.start()
            closing.join(0.02)  # until it waits, most likely

        if not interrupted(at, task.end, close, {Tracker._forget.__code__}):
            break
        closing.join(WAIT_S)
        assert not closing.is_alive()
    assert at > 1


def test_a_call_is_made_once_at_whichever_step_of_the_end_it_is_added():
    for at in count(1):
        task, called = Task("ending", []), []
        add = partial(task.when_settled, partial(called.append, at))
        if not interrupted(at, task.end, add, {AwaitableTask._note_settled.__code__}):
            break
        assert called == [at]
    assert at > 2


def test_a_task_with_a_failed_layer_is_settled_when_its_other_layers_have_ended():
    """The failure is reported to the tracker while other layers still move."""
    held: list[Backend] = []
    settled: SimpleQueue[Any] = SimpleQueue()

    def wrap(backend: Backend) -> Backend:
        held.append(hold(backend))
        return fail_at(held[0], 0, at_submit=True)

    with Transfers(1, wrap=wrap) as failing, held_transfers() as (transfers, let):
        task = failing.layered(PLAN, tensors(1), tensors(2))
        Tracker().track(task, settled)
        for layer in reversed(task.layers):
            task.ready(layer)
        later = transfers.submit(PLAN, tensors(1), tensors(2))
        Tracker().track(later, settled)
        let()
        first, failed, was_done = settled.get(timeout=WAIT_S), task.progress().failed, task.done
        let_go(held[0])
        assert (first, failed, was_done) == (later, (0,), False)
        assert settled.get(timeout=WAIT_S) is task


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
