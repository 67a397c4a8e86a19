"""The life of a `Transfers`: what it refuses once closed, or in a forked child."""

import multiprocessing

import numpy as np
import pytest

import kvplan
from kvplan import CacheDesc, DataType, LLMException, LLMStatusCode, Transfers
from kvplan.transport.local import LocalTransport

DESC = CacheDesc(1, (4, 100), DataType.DT_UINT8)
PLAN = kvplan.plan_pull_blocks(DESC, DESC, [0], [3])


def tensors() -> list[np.ndarray]:
    return [np.zeros(DESC.tensor_nbytes, np.uint8)]


@pytest.mark.parametrize("call", [Transfers.submit, Transfers.execute])
class TestUnusable:
    def test_closed(self, call):
        transfers = Transfers(1)
        transfers.close()
        transfers.close()
        with pytest.raises(LLMException, match="closed") as caught:
            call(transfers, PLAN, tensors(), tensors())
        assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED

    def test_closed_before_it_met_a_peer(self, call):
        """Never falls back to copying a peer's addresses as if they were this process's."""
        src = tensors()
        transfers = Transfers(1)
        with LocalTransport() as transport:
            base = transport.register(src[0]).address
            with transport.connect(transport.metadata()) as link:
                memory = link.memory([base], DESC.tensor_nbytes)
                transfers.close()
                with pytest.raises(LLMException, match="closed") as caught:
                    call(transfers, PLAN, memory, tensors())
        assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED

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


def test_errors_keep_what_they_say_between_processes():
    """As `multiprocessing` sends them: status, origin and what is not confirmed."""
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(LLMException) as caught:
        pool.apply(failing)
    assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
    assert caught.value.origin == PLAN.origin(0)
    assert caught.value.unconfirmed == ((0, 1),)


def failing():
    raise LLMException(
        "late",
        status_code=LLMStatusCode.LLM_TIMEOUT,
        origin=PLAN.origin(0),
        unconfirmed=((0, 1),),
    )
