"""A task has one outcome, for whoever asks, how often and from where."""

import multiprocessing
import os
import threading

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
from tests.support.refusals import refused
from tests.support.wrappers import fail_at

DESC = CacheDesc(2, (8, 100), DataType.DT_UINT8)
PLAN = kvplan.plan(Transfer(Rows(DESC, [0, 1]), Rows(DESC, [5, 3])), local="dst")


class Watched(HostMemory):
    """Memory that can be lost: its checks then do what `lose` was given."""

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


@pytest.mark.parametrize("side", ["src", "dst"])
class TestLostMemory:
    def test_before_the_transfer_nothing_is_copied(self, side):
        sides = {"src": watched(), "dst": watched()}
        sides[side].lost = gone
        with Transfers(wrap=lambda backend: fail_at(backend, 0)) as transfers:
            for call in (transfers.execute, transfers.submit):
                with pytest.raises(LLMException) as caught:
                    call(PLAN, **sides)
                assert str(caught.value) == "gone (LLM_KV_CACHE_NOT_EXIST)"

    def test_during_the_transfer_no_byte_counts_as_arrived(self, side):
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
def test_an_interrupted_check_is_no_success(interruption):
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
    """An interrupt may strike before the first line of what is called with the outcome."""
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
    assert outcomes == [None if begun else "not begun", caught.value]


def test_a_second_thread_does_not_overtake_the_check():
    """While one thread still checks the memory, no other may take the transfer for a success."""
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
    """It may fail, too: the error of the transfer says what has not arrived."""
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
    assert told == [caught.value if fails else None]


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

    def child(task, said):
        for call in (task.wait, task.explain, lambda: task.done):
            try:
                said.send(call())
            except Exception as error:
                said.send(str(error))

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
        said = [receiving.poll(30) and receiving.recv() for _ in range(3)]
        forked.set()
        thread.join()
        process.join()
    assert said == [None, f"{task.explain()}", True]
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
    # Nothing follows this task: a caller that polls in a loop must not wait for a thread that gets
    # the GIL only every 5 ms.
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
