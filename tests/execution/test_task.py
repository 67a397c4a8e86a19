"""A task has one outcome, for whoever asks, how often and from where."""

import threading

import numpy as np
import pytest

import kvplan
from kvnative._executor import fail_at
from kvplan import CacheDesc, DataType, HostMemory, LLMException, LLMStatusCode, Transfers

DESC = CacheDesc(2, (8, 100), DataType.DT_UINT8)
PLAN = kvplan.plan_pull_blocks(DESC, DESC, [0, 1], [5, 3])


class Watched(HostMemory):
    """Memory that can be lost: its checks then do what `lose` was told."""

    lost = None

    def check(self):
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
            with pytest.raises(LLMException, match="gone; no descriptor is confirmed") as caught:
                task.wait()
            assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
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

    threads = [threading.Thread(target=wait, args=(it,)) for it in (lambda: None, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [LLMStatusCode.LLM_KV_CACHE_NOT_EXIST] * 2


def test_asking_again_does_not_hold_those_who_asked_before():
    with Transfers(wrap=lambda backend: fail_at(backend, 0)) as transfers:
        task = transfers.submit(PLAN, watched(), watched())
        depths = []
        for _ in range(3):
            with pytest.raises(LLMException) as caught:
                task.wait()
            depths.append(len(caught.traceback))
    assert len(set(depths)) == 1
