"""The life of a layer task: the callback of its last layer, and the effect of dropping it."""

import contextlib
import gc
import multiprocessing
import random
import subprocess
import sys
import warnings
import weakref
from functools import partial
from pathlib import Path
from threading import Event, Thread
from unittest.mock import Mock

import pytest

import kvplan
from kvnative._backend import NativeError
from kvplan import LLMException, LLMStatusCode, Rows, Transfer, Transfers
from tests.execution.test_layer_task import DESC, PLAN, InParts, assert_equal, expected, filled
from tests.native.test_executor_concurrency import at_once
from tests.support.refusals import refused
from tests.support.wrappers import delay, fail_at, limit_batch


@pytest.fixture
def transfers():
    with Transfers(2) as made:
        yield made


def test_a_task_without_a_handle_keeps_no_memory(transfers, monkeypatch):
    """An interrupt may come between the native task and its handle."""
    source, target = filled(1), filled(2)
    freed = [weakref.ref(held) for held in (*source, *target)]
    monkeypatch.setattr("kvplan.execution.transfers.LayerTask", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        transfers.layered(PLAN, source, target)
    monkeypatch.undo()  # the mock holds its arguments
    del source, target
    transfers.execute(PLAN, filled(1), filled(2))
    gc.collect()
    assert all(held() is None for held in freed)


class TestOnLast:
    """`on_last` is called once: by the call that made the last layer ready, or found the end."""

    def test_the_last_layer_calls(self, transfers):
        called_for = []
        task = transfers.layered(PLAN, filled(1), filled(2), on_last=called_for.append)
        for layer in (4, 1, 3):
            task.ready(layer)
            assert called_for == []
        for _ in range(2):
            task.ready(2)
            task.wait()
            assert called_for == [task]

    def test_only_one_of_many_threads_calls(self, transfers):
        for turn in range(30):
            called_for = []
            task = transfers.layered(PLAN, filled(1), filled(2), on_last=called_for.append)

            def work(number, task=task, turn=turn):
                for layer in random.Random(turn * 10 + number).sample(task.layers, 4):
                    task.ready(layer)

            at_once(work, 4)
            assert called_for == [task]

    @pytest.mark.parametrize("end", ["cancel", "wait", "done", "ready", "explain"])
    def test_the_call_that_finds_the_end_calls(self, end):
        called_for, outcomes = [], []
        with Transfers(wrap=lambda backend: fail_at(limit_batch(backend, 1), 7)) as transfers:
            task = transfers.layered(PLAN, filled(1), filled(2), outcomes.append, called_for.append)
            if end == "cancel":
                task.cancel()
            elif end == "wait":
                with pytest.raises(LLMException):
                    task.wait(timeout_ms=0)
            else:
                task.ready(2)
                while not called_for:
                    if end == "ready":
                        task.ready(1)
                    else:
                        task.done if end == "done" else task.explain()
            assert called_for == [task]
            with pytest.raises(LLMException):
                task.wait()
            assert called_for == [task]

    @pytest.mark.parametrize("end", ["lost", "cancelled"])
    def test_the_callback_finds_the_reason(self, transfers, end):
        """An engine settles the task in the callback, and the outcome stays the same."""
        found = []

        def settle(task):
            with pytest.raises(LLMException) as caught:
                task.wait()
            found.append(caught.value)

        src = InParts.from_arrays(filled(1))
        task = transfers.layered(PLAN, src, filled(2), found.append, settle)
        if end == "lost":
            src.lost = range(6, 8)
            task.ready(3)
        else:
            task.cancel(LLMException("gone", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST))
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "gone") as caught:
            task.wait()
        assert [*map(str, found)] == [str(caught.value)] * 2

    def test_a_deadline_that_leaves_the_task_running_does_not_call(self, transfers):
        called_for = []
        task = transfers.layered(PLAN, filled(1), filled(2), on_last=called_for.append)
        with pytest.raises(LLMException):
            task.wait(timeout_ms=1, stop=False)
        assert called_for == []
        task.cancel()

    def test_an_error_of_the_callback_is_raised_in_the_caller(self, transfers):
        def on_last(_task):
            raise IndexError("mine")

        task = transfers.layered(PLAN, filled(1), filled(2), on_last=on_last)
        with pytest.raises(IndexError, match="mine"):
            task.cancel()
        task.cancel()


class TestDropped:
    def test_a_task_with_missing_layers_is_cancelled(self, transfers):
        outcomes, called_for = [], []
        src = filled(1)
        task = transfers.layered(PLAN, src, filled(2), outcomes.append, called_for.append)
        task.ready(2)
        with pytest.warns(
            ResourceWarning, match="dropped and so cancelled; layers 1, 3-4 were"
        ) as told_of:
            del task
        assert "done" not in str(told_of[0].message)
        (error,) = outcomes
        assert error.unconfirmed == ((0, 6), (12, 24))
        assert called_for == []
        assert "0 tasks in flight" in repr(transfers._executor)

    def test_a_task_whose_layers_are_all_ready_continues(self):
        outcomes = []
        with Transfers(wrap=lambda backend: delay(backend, 30)) as transfers:
            dst = filled(2)
            task = transfers.layered(PLAN, filled(1), dst, outcomes.append)
            for layer in task.layers:
                task.ready(layer)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                del task
                gc.collect()
        assert_equal(dst, expected(PLAN, filled(1), {1, 2, 3, 4}))

    def test_an_ended_task_gives_no_warning(self, transfers):
        task = transfers.layered(PLAN, filled(1), filled(2))
        task.cancel()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            del task
            gc.collect()
        assert said == []

    def test_a_forked_child_leaves_the_task_to_its_parent(self, transfers):
        dst = filled(2)
        task = transfers.layered(PLAN, filled(1), dst)
        task.ready(1)
        context = multiprocessing.get_context("fork")
        receiving, sending = context.Pipe(duplex=False)

        def child():
            nonlocal task
            said, unraisable = [], []
            sys.unraisablehook = lambda hooked: unraisable.append(str(hooked.exc_value))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ResourceWarning)
                for call in (task.wait, task.cancel, task.progress, partial(task.ready, 2)):
                    try:
                        call()
                    except NativeError as error:
                        said.append(str(error))
                del task, call
                gc.collect()
            sending.send((said, [str(item.message) for item in caught] + unraisable))

        process = context.Process(target=child)
        process.start()
        sending.close()
        said, caught = receiving.recv()
        process.join()
        assert (len(said), caught) == (4, [])
        assert f"process {process.pid} was forked" in said[0]
        for layer in task.layers:
            task.ready(layer)
        task.wait()
        assert_equal(dst, expected(PLAN, filled(1), {1, 2, 3, 4}))

    def test_a_forked_child_leaves_the_callback_to_its_parent(self, transfers):
        """A task may end before the fork, and be unsettled until a later call of the parent."""
        called_for = []
        plan = kvplan.plan(Transfer(Rows(DESC, []), Rows(DESC, [])), local="src")
        task = transfers.layered(plan, filled(1), filled(2), on_last=called_for.append)
        context = multiprocessing.get_context("fork")
        receiving, sending = context.Pipe(duplex=False)

        def child():
            for call in (lambda: task.done, lambda: task.ready(0), task.cancel, task.wait):
                with contextlib.suppress(NativeError):
                    call()
                sending.send(len(called_for))

        process = context.Process(target=child)
        process.start()
        sending.close()
        assert [receiving.recv() for _ in range(4)] == [0, 0, 0, 0]
        process.join()
        assert task.done
        assert called_for == [task]

    def test_exit_gives_no_warning(self):
        script = """
import contextlib, kvplan, threading
from tests.execution.test_layer_task import PLAN, filled
transfers = kvplan.Transfers(2)
half = transfers.layered(PLAN, filled(1), filled(2))
waited = transfers.layered(PLAN, filled(1), filled(2))
half.ready(2)
begun = threading.Event()
def wait():
    begun.set()
    with contextlib.suppress(kvplan.LLMException):
        waited.wait()
threading.Thread(target=wait, daemon=True).start()
begun.wait()
"""
        done = subprocess.run(
            [sys.executable, "-W", "error::ResourceWarning", "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=Path(__file__).parents[2],
        )
        assert (done.returncode, done.stderr) == (0, "")

    def test_a_task_is_not_dropped_while_a_thread_waits(self, transfers):
        task = transfers.layered(PLAN, filled(1), filled(2))
        begun, raised = Event(), []

        def wait(task):
            begun.set()
            try:
                task.wait()
            except LLMException as error:
                raised.append(error)

        thread = Thread(target=wait, args=(task,))
        thread.start()
        begun.wait()
        del task
        transfers.close()  # cancels the task, which has no other references
        thread.join()
        assert raised[0].status_code is LLMStatusCode.LLM_CANCELLED
