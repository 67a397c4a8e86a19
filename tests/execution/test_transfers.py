"""The life of a `Transfers`: `close` ends its tasks, and later calls or forked children fail."""

import multiprocessing
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import CacheDesc, DataType, LLMException, LLMStatusCode, Rows, Transfer, Transfers
from kvplan.execution.memory import memory_of
from kvplan.transport.local import LocalTransport
from tests.support.lines import interrupted
from tests.support.refusals import refused
from tests.support.wrappers import delay, fail_at, limit_bandwidth

DESC = CacheDesc(1, (4, 100), DataType.DT_UINT8)
PLAN = kvplan.plan(Transfer(Rows(DESC, [0]), Rows(DESC, [3])), local="dst")
FOR_EVER_MS = 600_000


@pytest.mark.parametrize("wrong", [-1, float("nan")])
@pytest.mark.parametrize("call", [Transfers.execute, Transfers.verify])
def test_a_wrong_timeout_is_refused_by_every_call(call, wrong):
    src = tensors()
    with Transfers(1) as transfers, LocalTransport() as transport:
        base = transport.register(src[0]).address
        with transport.connect(transport.metadata()) as link:
            memory = link.memory([base], DESC.tensor_nbytes)
            for source in (memory, memory_of("src", src)):
                with pytest.raises(ValueError, match=r"^timeout_ms=.* must be >= 0 or None"):
                    call(transfers, PLAN, source, memory_of("dst", tensors()), timeout_ms=wrong)


class Asked:
    """Memory of a peer that records how its backend is asked for."""

    def __init__(self, memory: Any) -> None:
        self._memory, self.asked = memory, list[tuple[str, float | None]]()

    def backend(self, pool: Any, direction: Any, other: Any, timeout_ms: float | None) -> Any:
        self.asked.append((direction, timeout_ms))
        return self._memory.backend(pool, direction, other, timeout_ms)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


@pytest.mark.parametrize("direction", ["get", "put"])
def test_a_connection_has_the_time_of_the_transfer_in_each_direction(direction):
    mine = tensors()
    with Transfers(1) as transfers, LocalTransport() as transport:
        base = transport.register(mine[0]).address
        with transport.connect(transport.metadata()) as link:
            there = Asked(link.memory([base], DESC.tensor_nbytes, writable=True))
            sides = (there, tensors()) if direction == "get" else (tensors(), there)
            for timeout_ms in (5000.0, None):
                transfers.execute(PLAN, *sides, timeout_ms=timeout_ms)
    assert there.asked == [(direction, 5000.0), (direction, None)]


def tensors() -> list[np.ndarray]:
    return [np.zeros(DESC.tensor_nbytes, np.uint8)]


@pytest.mark.parametrize("call", [Transfers.submit, Transfers.execute])
class TestUnusable:
    def test_closed_transfers_are_refused(self, call):
        transfers = Transfers(1)
        transfers.close()
        transfers.close()
        with refused(LLMStatusCode.LLM_ENGINE_FINALIZED, "closed"):
            call(transfers, PLAN, tensors(), tensors())

    def test_transfers_closed_before_their_first_peer_are_refused(self, call):
        """Addresses of a peer must never be copied as addresses of this process."""
        src = tensors()
        transfers = Transfers(1)
        with LocalTransport() as transport:
            base = transport.register(src[0]).address
            with transport.connect(transport.metadata()) as link:
                memory = link.memory([base], DESC.tensor_nbytes)
                transfers.close()
                with refused(LLMStatusCode.LLM_ENGINE_FINALIZED, "closed"):
                    call(transfers, PLAN, memory, tensors())

    def test_transfers_closed_after_their_first_peer_are_refused(self, call):
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

    def test_a_forked_child_is_refused(self, call):
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
def test_a_value_that_is_not_a_plan_is_refused(call, plan):
    with Transfers(1) as transfers, pytest.raises(TypeError, match="plan="):
        call(transfers, plan, tensors(), tensors())


def test_a_wrapper_sees_the_reads_of_a_verification():
    src = tensors()
    with (
        Transfers(1, lambda backend: fail_at(backend, 0)) as transfers,
        LocalTransport() as transport,
    ):
        base = transport.register(src[0]).address
        with transport.connect(transport.metadata()) as link:
            memory = link.memory([base], DESC.tensor_nbytes)
            memory.in_process = False  # as memory of another process
            with refused(LLMStatusCode.LLM_FAILED, "was made to fail"):
                transfers.verify(PLAN, memory, memory_of("dst", tensors()))


def test_closing_ends_transfers_to_peers_and_inside():
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
    """The caller has no handle, so `close`, which waits for tasks in flight, must still return."""

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


LARGE = CacheDesc(1, (64, 1 << 18), DataType.DT_UINT8)
ROWS = list(range(64))
LARGE_PLAN = kvplan.plan(
    Transfer(Rows(LARGE, ROWS), Rows(LARGE, ROWS), coalesce=False), local="dst"
)


class TestExecuteIsStopped:
    """`execute` runs in one thread, and `close(cancel=True)` in another."""

    @pytest.fixture
    def thread(self):
        with ThreadPoolExecutor(1) as pool:
            yield pool

    def close_under(self, closing: Transfers, using: Transfers, thread) -> None:
        src, dst = np.full(LARGE.nbytes, 1, np.uint8), np.zeros(LARGE.nbytes, np.uint8)
        call = thread.submit(using.execute, LARGE_PLAN, [src], [dst])
        while not dst[0]:  # until bytes move; the copy takes 0.6 s
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

    def test_close_stops_execute(self, thread):
        with Transfers(2, lambda backend: limit_bandwidth(backend, 2.5e7)) as transfers:
            self.close_under(transfers, transfers, thread)

    def test_the_close_of_a_share_stops_execute(self, thread):
        """Other users of the shared threads continue."""
        with Transfers(2, lambda backend: limit_bandwidth(backend, 2.5e7)) as transfers:
            share = transfers.share()
            self.close_under(share, share, thread)
            dst = tensors()
            transfers.execute(PLAN, [np.full(DESC.tensor_nbytes, 3, np.uint8)], dst)
            assert dst[0][300:].all()

    def test_the_close_of_the_shared_threads_stops_execute(self, thread):
        transfers = Transfers(2, lambda backend: limit_bandwidth(backend, 2.5e7))
        self.close_under(transfers, transfers.share(), thread)
        with pytest.raises(LLMException, match="closed"):
            transfers.share()

    def test_shares_that_begin_during_the_close_are_closed(self):
        """A share that is made during the close is closed, too."""
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

    def test_no_copy_comes_after_the_close(self, thread):
        """A thread makes small copies all the time, and none of them comes after `close`."""
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


def test_errors_keep_their_fields_between_processes():
    """Errors keep their status, origin and unconfirmed bytes when `multiprocessing` sends them."""
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


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ({0: 1}, r"nodes\[0\]=1 must be"),
        ({"a": [0]}, "a key of nodes='a' must"),
        ({0: ["x"]}, "='x' must"),
    ],
)
def test_nodes_of_wrong_types_are_named(nodes, text):
    with pytest.raises(TypeError, match=text):
        Transfers(1, nodes=nodes)
