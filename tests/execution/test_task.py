"""A task has one outcome for all callers and threads, however often they ask."""

import gc
import multiprocessing
import os
import threading
import time

import numpy as np
import pytest

import kvplan
from kvnative._backend import NativeError
from kvplan import (
    CacheDesc,
    DataType,
    HostMemory,
    LayerTask,
    LLMException,
    LLMStatusCode,
    Rows,
    Transfer,
    Transfers,
)
from kvplan.execution.completion import Tracker, run_aside
from kvplan.status import without_frames
from tests.support.refusals import refused
from tests.support.wrappers import fail_at

DESC = CacheDesc(2, (8, 100), DataType.DT_UINT8)
PLAN = kvplan.plan(Transfer(Rows(DESC, [0, 1]), Rows(DESC, [5, 3])), local="dst")


class Watched(HostMemory):
    """Memory that can be lost: after `lose`, its checks call the given function."""

    lost = None

    def check(self, tensors=None):
        if self.lost is not None:
            self.lost()


def watched() -> Watched:
    memory = Watched.from_arrays([np.zeros(DESC.tensor_nbytes, np.uint8) for _ in range(2)])
    assert isinstance(memory, Watched)
    return memory


def gone() -> None:
    raise LLMException("gone", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)


class Entered:
    """A native task that notes when a wait reaches it."""

    def __init__(self, native):
        self._native = native

    def wait(self, *arguments):
        self.at = time.perf_counter()
        return self._native.wait(*arguments)

    def __getattr__(self, name):
        return getattr(self._native, name)


def test_the_steps_after_the_copies_share_their_time(monkeypatch):
    """The time of a wait begins before the wait for the copies."""
    with Transfers(1) as transfers:
        task = transfers.submit(PLAN, watched(), watched())
        native = task.native = Entered(task.native)
        ends = []
        monkeypatch.setattr(task, "_settles_by", lambda end: ends.append(end) or True)
        task.wait(60_000)
        (end,) = ends
        assert end - 60 <= native.at


@pytest.mark.parametrize("side", ["src", "dst"])
class TestLostMemory:
    def test_memory_that_is_lost_before_the_transfer_is_not_copied(self, side):
        sides = {"src": watched(), "dst": watched()}
        sides[side].lost = gone
        with Transfers(wrap=lambda backend: fail_at(backend, 0)) as transfers:
            for call in (transfers.execute, transfers.submit):
                with pytest.raises(LLMException) as caught:
                    call(PLAN, **sides)
                assert str(caught.value) == "gone (LLM_KV_CACHE_NOT_EXIST)"

    def test_memory_that_is_lost_during_the_transfer_confirms_no_byte(self, side):
        sides = {"src": watched(), "dst": watched()}
        task = kvplan.submit(PLAN, **sides)
        sides[side].lost = gone
        for _ in range(2):
            with refused(
                LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "gone; no descriptor is confirmed"
            ) as caught:
                task.wait()
            assert caught.value.unconfirmed == ((0, PLAN.num_descriptors),)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_an_interrupted_check_is_not_a_success(interruption):
    def interrupt():
        raise interruption

    src = watched()
    task = kvplan.submit(PLAN, src, watched())
    src.lost = interrupt
    with pytest.raises(interruption):
        task.wait()
    src.lost = gone
    with pytest.raises(LLMException, match="gone"):
        task.wait()


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupted_outcome_is_delivered_again_as_a_failure(begun):
    """An interrupt may occur before the first line of the callback."""
    outcomes = []

    def on_outcome(error):
        if not outcomes:
            outcomes.append(error if begun else "not begun")
            raise KeyboardInterrupt
        outcomes.append(error)

    with Transfers() as transfers:
        task = transfers.submit(PLAN, watched(), watched(), on_outcome)
        with pytest.raises(KeyboardInterrupt):
            task.wait()
        for _ in range(2):
            with refused(LLMStatusCode.LLM_FAILED, "interrupted after the last byte") as caught:
                task.wait()
    assert outcomes[:1] == [None if begun else "not begun"]
    assert [str(error) for error in outcomes[1:]] == [str(caught.value)]


def test_a_second_thread_does_not_overtake_the_check():
    """Another thread must not report success while one thread still checks the memory."""
    checking, second_waits = threading.Event(), threading.Event()

    def slow():
        checking.set()
        assert second_waits.wait(30)
        gone()

    src = watched()
    task = kvplan.submit(PLAN, src, watched())
    src.lost = slow
    outcomes = []

    def wait(before):
        before()
        try:
            task.wait()
            outcomes.append(LLMStatusCode.LLM_SUCCESS)
        except LLMException as error:
            outcomes.append(error.status_code)

    def second():
        assert checking.wait(30)
        second_waits.set()

    threads = [threading.Thread(target=wait, args=(value,)) for value in (lambda: None, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [LLMStatusCode.LLM_KV_CACHE_NOT_EXIST] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_callback_that_raises_does_not_replace_the_failure(fails):
    """The error of the transfer names the unconfirmed bytes, even if the callback fails, too."""
    told = []

    def on_outcome(error):
        told.append(error)
        gone()

    with Transfers(wrap=lambda backend: fail_at(backend, 0) if fails else backend) as transfers:
        task = transfers.submit(PLAN, watched(), watched(), on_outcome)
        for _ in range(2):
            with pytest.raises(LLMException) as caught:
                task.wait()
            assert caught.value.unconfirmed == (((0, PLAN.num_descriptors),) if fails else ())
    assert [repr(error) for error in told] == [repr(caught.value) if fails else "None"]


def test_a_callback_can_ask_for_the_outcome_of_its_own_task():
    """A signal handler may run during the callback, and wait for the same task."""
    found = []

    def on_outcome(error):
        task.wait()
        found.append((task.settled, error))

    with Transfers() as transfers:
        task = transfers.submit(PLAN, watched(), watched(), on_outcome)
        waiting = threading.Thread(target=task.wait, daemon=True)
        waiting.start()
        waiting.join(20)
    assert found == [(True, None)]


def test_a_later_wait_does_not_delay_earlier_ones():
    with Transfers(wrap=lambda backend: fail_at(backend, 0)) as transfers:
        task = transfers.submit(PLAN, watched(), watched())
        depths = []
        for _ in range(3):
            with pytest.raises(LLMException) as caught:
                task.wait()
            depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_child_that_is_forked_during_a_completion_callback_does_not_run_it(by_layer):
    calling_back, forked = threading.Event(), threading.Event()
    outcomes = []

    def on_outcome(error):
        outcomes.append(error)
        calling_back.set()
        assert forked.wait(30)

    def child(task, results):
        for call in (task.wait, task.explain, lambda: task.done):
            try:
                results.send(call())
            except Exception as error:
                results.send(str(error))

    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    with Transfers() as transfers:
        begin = transfers.layered if by_layer else transfers.submit
        task = begin(PLAN, watched(), watched(), on_outcome)
        if isinstance(task, LayerTask):
            for layer in task.layers:
                task.ready(layer)
        thread = threading.Thread(target=task.wait)
        thread.start()
        assert calling_back.wait(30)
        process = context.Process(target=child, args=(task, sending))
        process.start()
        results = [receiving.poll(30) and receiving.recv() for _ in range(3)]
        forked.set()
        thread.join()
        process.join()
    assert results == [None, f"{task.explain()}", True]
    assert outcomes == [None]


def test_a_child_does_not_find_the_outcome_for_its_parent():
    outcomes = []
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def child(task):
        try:
            task.wait()
        except NativeError as error:
            sending.send(str(error))
        sending.send(len(outcomes))

    with Transfers() as transfers:
        task = transfers.submit(PLAN, watched(), watched(), outcomes.append)
        while not task.done:
            pass
        process = context.Process(target=child, args=(task,))
        process.start()
        process.join()
        assert f"the task belongs to process {os.getpid()}" in receiving.recv()
        assert receiving.recv() == 0
        task.wait()
    assert outcomes == [None]


def test_a_poll_finds_the_end_without_another_thread():
    # Without a later task, a caller that polls in a loop must not depend on a thread that gets the
    # GIL only every 5 ms.
    ended = []
    with Transfers() as transfers:
        task = transfers.submit(PLAN, watched(), watched(), ended.append)
        assert task.wait_done(20_000)
        assert not ended
        assert task.settled
        assert ended == [None]


def test_a_poll_finds_a_failure_and_does_not_raise_it():
    memory = watched()
    with Transfers() as transfers:
        task = transfers.submit(PLAN, memory, watched())
        memory.lost = gone
        assert task.wait_done(20_000)
        assert task.settled
        with pytest.raises(LLMException, match="gone"):
            task.wait()


def test_a_check_of_memory_may_fail_without_a_text():
    """Its error is a program's own."""

    def nameless():
        raise LLMException(status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)

    src = watched()
    task = kvplan.submit(PLAN, src, watched())
    src.lost = nameless
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "no descriptor is confirmed"):
        task.wait()


@pytest.fixture
def crowd():
    """Hold all threads that run slow calls aside; return the event that ends their calls."""
    ended = threading.Event()
    for _ in range(40):
        run_aside(ended.wait)
    yield ended
    ended.set()


def test_a_limited_wait_is_not_delayed_by_slow_steps_of_other_tasks(crowd):
    tracker = Tracker()
    with Transfers() as transfers:
        task = transfers.submit(PLAN, watched(), watched(), lambda _: None)
        task.settles_aside = True
        tracker.track(task, aside=True)
        task.wait(20_000)
        assert task.settled
        assert not crowd.is_set()
        crowd.set()
        tracker.close(20)


def test_steps_that_end_with_another_exception_settle_the_task(caplog):
    def on_outcome(error):
        if error is None:
            raise MemoryError

    tracker = Tracker()
    with Transfers() as transfers:
        task = transfers.submit(PLAN, watched(), watched(), on_outcome)
        task.settles_aside = True
        tracker.track(task, aside=True)
        for _ in range(2):
            with refused(LLMStatusCode.LLM_FAILED, "interrupted after the last byte"):
                task.wait(5000)
        assert task.settled
        tracker.close(20)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_a_timeout_of_any_real_type_is_a_number(kind):
    tracker = Tracker()
    with Transfers() as transfers:
        task = transfers.submit(PLAN, watched(), watched(), lambda _: None)
        task.settles_aside = True
        tracker.track(task, aside=True)
        task.wait(kind(20_000))
        assert task.settled
        tracker.close(20)


def test_a_limited_wait_in_a_child_does_not_wait_for_threads_of_its_parent():
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def child(task):
        try:
            task.wait(20_000)
        except NativeError as error:
            sending.send(str(error))

    with Transfers() as transfers:
        task = transfers.submit(PLAN, watched(), watched())
        task.settles_aside = True
        assert task.wait_done(20_000)
        process = context.Process(target=child, args=(task,))
        process.start()
        assert receiving.poll(10)
        assert f"the task belongs to process {os.getpid()}" in receiving.recv()
        process.join()
        task.wait()


def test_limited_waits_that_end_leave_nothing_behind():
    hold, objects, tracker = threading.Event(), [], Tracker()
    with Transfers() as transfers:
        task = transfers.submit(PLAN, watched(), watched(), lambda _: hold.wait(30))
        task.settles_aside = True
        tracker.track(task, aside=True)
        assert task.wait_done(20_000)
        for _ in range(3):
            for _ in range(20):
                with refused(LLMStatusCode.LLM_TIMEOUT, "the transfer goes on"):
                    task.wait(0)
            gc.collect()
            objects.append(sum(isinstance(o, threading.Event) for o in gc.get_objects()))
        hold.set()
        tracker.close(20)
    assert objects[1] == objects[2]


def test_an_error_without_frames_has_notes_of_its_own():
    class Own(LLMException):
        def __new__(cls):
            return super().__new__(cls, "own")

        def __init__(self):
            super().__init__("own")

    error = Own()
    error.add_note("first")
    equal = without_frames(error)
    equal.add_note("second")
    assert (type(equal), equal.args, error.__notes__) == (Own, ("own",), ["first"])
