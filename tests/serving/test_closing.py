"""An exchange, or its engine, that ends while requests are on their way."""

from __future__ import annotations

import pytest

from kvplan.serving import Target
from tests.serving.test_exchange import MakeWorker, failed
from tests.serving.worker import Worker, reference
from tests.support import lone_user

NAME = "cmpl-11"


@pytest.fixture
def pair(make_worker: MakeWorker) -> tuple[Worker, Worker]:
    """A producer, and a consumer that waits for a transfer."""
    producer, consumer = make_worker(1, push=True), make_worker(2, push=True)
    consumer.exchange.fetch(
        "mine", reference([producer.source], 0, 11, 21, transfer=NAME), Target([7, 1, 30])
    )
    producer.wait_asked(NAME)
    consumer.exchange.expect("later", reference([producer.source], 0, 12, 21, transfer="later"))
    return producer, consumer


def test_what_has_not_ended_fails_and_is_not_written_to(pair: tuple[Worker, Worker]) -> None:
    producer, consumer = pair
    producer.step(11, [4, 9, 2], 0, 8, 21, NAME)
    consumer.exchange.close()
    (result,) = consumer.exchange.take_results()
    assert failed(result, "the exchange is closed")
    assert result.blocks == [7, 1, 30]
    assert consumer.engine.leases() == []
    consumer.compute(13, [7, 1, 30], 21)
    producer.step(11, [4, 9, 2], 8, 21, 21, NAME)
    producer.exchange.close()
    assert consumer.has(13, [7, 1, 30], 0, 21)


def test_what_is_fetched_afterwards_fails(pair: tuple[Worker, Worker]) -> None:
    producer, consumer = pair
    consumer.exchange.close()
    consumer.exchange.take_results()
    wanted = reference([producer.source], 0, 12, 21)
    assert failed(consumer.fetch(wanted, [7, 1, 30], name="late"), "the exchange is closed")


def test_an_engine_that_is_finalized_before(pair: tuple[Worker, Worker]) -> None:
    producer, consumer = pair
    consumer.engine.finalize()
    assert consumer.exchange.wait(60_000)
    (result,) = consumer.exchange.take_results()
    assert result.error is not None
    wanted = reference([producer.source], 0, 12, 21)
    assert failed(consumer.fetch(wanted, [7, 1, 30], name="late"), "the exchange is closed")
    consumer.exchange.close()
    producer.engine.finalize()
    handle = producer.exchange.enter("request-11", [4, 9, 2], bytes(16), NAME)
    assert producer.exchange.take_freed() == {handle}
    producer.exchange.close()


def test_close_right_after_it_was_made(make_worker: MakeWorker) -> None:
    for number in range(20):
        worker = make_worker(2 + number)
        worker.close()
        assert not worker.exchange.is_fetching


def test_an_exchange_that_finds_no_thread_leaves_nothing_open() -> None:
    program = """
        from kvplan import CacheDesc, DataType, LlmDataDist, LLMException, LlmRole
        from kvplan.serving import Compatibility, Exchange
        from tests.support.held import Held
        from tests.support.lone_user import allow_threads, become

        become()
        engine = LlmDataDist(1, LlmRole.MIX)
        engine.initialize({})
        cache = engine.allocate_blocks_cache(CacheDesc(1, (8, 4), DataType.DT_FLOAT))
        allow_threads(1)
        held = Held.now()
        try:
            Exchange(engine, cache, Compatibility({}), b"of a process")
        except LLMException as error:
            assert error.status_code.name == "LLM_OUT_OF_MEMORY", error
            held.check_nothing_new()  # while the error is held
        else:
            raise AssertionError("there was a thread")
    """
    lone_user.run(program)
