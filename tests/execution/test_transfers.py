"""The life of a `Transfers`: what it stops when closed, and refuses then or in a forked child."""

import multiprocessing
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvplan
from kvplan import CacheDesc, DataType, LLMException, LLMStatusCode, Rows, Transfer, Transfers
from kvplan.transport.local import LocalTransport
from tests.support.lines import interrupted
from tests.support.refusals import refused
from tests.support.wrappers import delay, limit_bandwidth

DESC = CacheDesc(1, (4, 100), DataType.DT_UINT8)
PLAN = kvplan.plan(Transfer(Rows(DESC, [0]), Rows(DESC, [3])), local="dst")
FOR_EVER_MS = 600_000


def tensors() -> list[np.ndarray]:
    return [np.zeros(DESC.tensor_nbytes, np.uint8)]


@pytest.mark.parametrize("call", [Transfers.submit, Transfers.execute])
class TestUnusable:
    def test_closed(self, call):
        transfers = Transfers(1)
        transfers.close()
        transfers.close()
        with refused(LLMStatusCode.LLM_ENGINE_FINALIZED, "closed"):
            call(transfers, PLAN, tensors(), tensors())

    def test_closed_before_it_met_a_peer(self, call):
        """Never falls back to copying a peer's addresses as if they were this process's."""
        src = tensors()
        transfers = Transfers(1)
        with LocalTransport() as transport:
            base = transport.register(src[0]).address
            with transport.connect(transport.metadata()) as link:
                memory = link.memory([base], DESC.tensor_nbytes)
                transfers.close()
                with refused(LLMStatusCode.LLM_ENGINE_FINALIZED, "closed"):
                    call(transfers, PLAN, memory, tensors())

    def test_closed_after_it_met_a_peer(self, call):
        transfers = Transfers(1)
        with LocalTransport() as transport:
            src = tensors()
            base = transport.register(src[0]).address
            with transport.connect(transport.metadata()) as link:
                memory = link.memory([base], DESC.tensor_nbytes)
                transfers.execute(PLAN, memory, tensors())
                transfers.close()
                for source in (memory, tensors()):
                    with refused(LLMStatusCode.LLM_ENGINE_FINALIZED, "closed"):
                        call(transfers, PLAN, source, tensors())

    def test_forked(self, call):
        transfers = Transfers(1)
        context = multiprocessing.get_context("fork")
        receiving, sending = context.Pipe(duplex=False)

        def child():
            try:
                call(transfers, PLAN, tensors(), tensors())
            except LLMException as error:
                sending.send(error)

        process = context.Process(target=child)
        process.start()
        sending.close()  # so that a child without an answer is an EOFError
        process.join()
        error = receiving.recv()
        assert error.status_code is LLMStatusCode.LLM_FAILED
        assert f"process {process.pid} was forked" in str(error)


@pytest.mark.parametrize("call", [Transfers.submit, Transfers.layered, Transfers.execute])
@pytest.mark.parametrize("plan", [None, DESC, PLAN.to_dict()], ids=["nothing", "a cache", "a dict"])
def test_what_is_no_plan_is_refused(call, plan):
    with Transfers(1) as transfers, pytest.raises(TypeError, match="plan="):
        call(transfers, plan, tensors(), tensors())


def test_closing_ends_what_is_in_flight_to_peers_and_inside():
    transfers = Transfers(1, lambda backend: delay(backend, FOR_EVER_MS))
    with LocalTransport() as transport:
        src = tensors()
        base = transport.register(src[0]).address
        with transport.connect(transport.metadata()) as link:
            memory = link.memory([base], DESC.tensor_nbytes)
            tasks = [transfers.submit(PLAN, value, tensors()) for value in (memory, tensors())]
            transfers.close(cancel=True)
            assert [task.done for task in tasks] == [True, True]
            for task in tasks:
                with pytest.raises(LLMException, match="cancelled"):
                    task.wait()


@pytest.mark.parametrize("line", [1, 8])
def test_a_submit_that_is_interrupted_leaves_nothing_in_flight(line):
    """Its caller has no handle: `close`, which waits for what is in flight, returns."""

    def interrupt():
        raise KeyboardInterrupt

    transfers = Transfers(1, lambda backend: delay(backend, FOR_EVER_MS))
    making = {kvplan.TransferTask.__init__.__code__}
    with pytest.raises(KeyboardInterrupt):
        interrupted(line, lambda: transfers.submit(PLAN, tensors(), tensors()), interrupt, making)
    closing = threading.Thread(target=transfers.close)
    closing.start()
    closing.join(20)
    was_closed = not closing.is_alive()
    transfers.close(cancel=True)
    closing.join()
    assert was_closed


LARGE = CacheDesc(1, (64, 1 << 20), DataType.DT_UINT8)
ROWS = list(range(64))
LARGE_PLAN = kvplan.plan(
    Transfer(Rows(LARGE, ROWS), Rows(LARGE, ROWS), coalesce=False), local="dst"
)


class TestExecuteIsStopped:
    """`execute` in one thread, `close(cancel=True)` in another."""

    @pytest.fixture
    def thread(self):
        with ThreadPoolExecutor(1) as pool:
            yield pool

    def close_under(self, closing: Transfers, using: Transfers, thread) -> None:
        src, dst = np.full(LARGE.nbytes, 1, np.uint8), np.zeros(LARGE.nbytes, np.uint8)
        call = thread.submit(using.execute, LARGE_PLAN, [src], [dst])
        while not dst[0]:  # until it moves; it takes 0.6 s in all
            assert not call.done(), call.result()
        closing.close(cancel=True)
        arrived = dst.copy()
        with refused(LLMStatusCode.LLM_FAILED, r"stopped because .* closed") as caught:
            call.result(10)
        assert np.array_equal(arrived, dst), "bytes were written after close had returned"
        missing = {i for first, last in caught.value.unconfirmed for i in range(first, last)}
        for row in set(ROWS) - missing:
            assert dst.reshape(64, -1)[row].all()
        assert missing

    def test_by_their_close(self, thread):
        with Transfers(2, lambda backend: limit_bandwidth(backend, 1e8)) as transfers:
            self.close_under(transfers, transfers, thread)

    def test_by_the_close_of_a_share(self, thread):
        """And what shares the threads goes on."""
        with Transfers(2, lambda backend: limit_bandwidth(backend, 1e8)) as transfers:
            share = transfers.share()
            self.close_under(share, share, thread)
            dst = tensors()
            transfers.execute(PLAN, [np.full(DESC.tensor_nbytes, 3, np.uint8)], dst)
            assert dst[0][300:].all()

    def test_with_what_they_share(self, thread):
        transfers = Transfers(2, lambda backend: limit_bandwidth(backend, 1e8))
        self.close_under(transfers, transfers.share(), thread)
        with pytest.raises(LLMException, match="closed"):
            transfers.share()

    def test_while_others_begin_to_share_them(self):
        """Whoever comes with a share meanwhile has it closed too."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(2) as threads:
                for _ in range(5):
                    transfers = Transfers(1)
                    made = [transfers.share() for _ in range(200)]

                    def share(transfers=transfers, made=made) -> None:
                        while True:
                            made.append(transfers.share())

                    calls = [threads.submit(share) for _ in range(2)]
                    transfers.close(cancel=True)
                    for call in calls:
                        with pytest.raises(LLMException, match="closed"):
                            call.result(10)
                    assert all("closed" in repr(item) for item in made)
        finally:
            sys.setswitchinterval(interval)

    def test_between_any_two_steps(self, thread):
        """Small copies all the time, on their own thread: none comes after `close`."""
        src, dst = np.zeros(DESC.tensor_nbytes, np.uint8), np.zeros(DESC.tensor_nbytes, np.uint8)
        with Transfers(1) as transfers:
            for number in range(1, 201):
                share, begun = transfers.share(), threading.Event()

                def copy(share=share, begun=begun) -> None:
                    while True:
                        share.execute(PLAN, [src], [dst])
                        begun.set()

                src[:] = number
                call = thread.submit(copy)
                assert begun.wait(10)
                share.close(cancel=True)
                dst[:] = 0
                with pytest.raises(LLMException, match="closed"):
                    call.result(10)
                assert not dst.any(), f"round {number}"


def test_errors_keep_what_they_say_between_processes():
    """As `multiprocessing` sends them: status, origin and what is not confirmed."""
    with (
        multiprocessing.get_context("fork").Pool(1) as pool,
        refused(LLMStatusCode.LLM_TIMEOUT) as caught,
    ):
        pool.apply(failing)
    assert caught.value.origin == PLAN.origin(0)
    assert caught.value.unconfirmed == ((0, 1),)


def failing():
    raise LLMException(
        "late",
        status_code=LLMStatusCode.LLM_TIMEOUT,
        origin=PLAN.origin(0),
        unconfirmed=((0, 1),),
    )
