"""An exchange, or its engine, that ends while requests are under way."""

from __future__ import annotations

import asyncio
import gc
import select
from collections.abc import Iterable
from itertools import count
from threading import Event, Thread
from typing import Any

import pytest

from kvplan import BlockLease, LlmDataDist, LLMException, LlmRole, LLMStatusCode, Transfers
from kvplan.engine.notifications import Notifications
from kvplan.serving import Compatibility, Exchange, PullResult, Target
from kvplan.serving.messages import Hello, encode
from tests.faults.gate import Gate
from tests.serving.test_exchange import MakeWorker, failed
from tests.serving.worker import INSTANCE, Worker, reference
from tests.support import lone_user
from tests.support.forked import python

NAME = "cmpl-11"
DEADLINE_S = 30.0


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


def test_open_requests_fail_and_are_not_written_any_more(pair: tuple[Worker, Worker]) -> None:
    producer, consumer = pair
    producer.step(11, [4, 9, 2], 0, 8, 21, NAME)
    consumer.exchange.close()
    (result,) = consumer.exchange.take_results()
    assert failed(result, "the exchange is closed")
    assert result.blocks == [7, 1, 30]
    assert consumer.engine.leases() == []
    assert not consumer.engine._running().leases._callbacks  # which would keep the request
    consumer.compute(13, [7, 1, 30], 21)
    producer.step(11, [4, 9, 2], 8, 21, 21, NAME)
    producer.exchange.close()
    assert consumer.has(13, [7, 1, 30], 0, 21)


class Stopped:
    """A transport whose peer is stopped in the middle of a write, until it `goes_on`."""

    goes_on = False

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        self._transport.end_leases(leases)
        if not Stopped.goes_on:
            raise LLMException("it is stopped", status_code=LLMStatusCode.LLM_TIMEOUT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def test_a_request_that_a_stopped_producer_may_write_fails_only_after_its_last_byte(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are not free when `close` returns, so no result says so."""
    _, consumer = pair
    leases = consumer.engine._running().leases
    transports = leases._words._transports
    monkeypatch.setattr(
        leases._words, "_transports", {name: Stopped(each) for name, each in transports.items()}
    )
    while not (held := consumer.engine.leases()):
        select.select([], [], [], 0.001)
    consumer.exchange.close()
    assert consumer.exchange.take_results() == []
    assert consumer.exchange.is_fetching
    monkeypatch.setattr(Stopped, "goes_on", True)
    with leases._changed:  # make the thread that ends leases try again at once
        leases._wake_at(held[0].lease_id, 1)
    assert consumer.exchange.wait(60_000)
    (result,) = consumer.exchange.take_results()
    assert failed(result, "the exchange is closed")
    assert not consumer.exchange.is_fetching
    assert leases._callbacks == {}


def test_the_end_of_the_engine_ends_the_wait_for_a_stopped_producer(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result comes when peers cannot reach the blocks any more."""
    _, consumer = pair
    words = consumer.engine._running().leases._words
    transports = words._transports
    stopped = {name: Stopped(each) for name, each in transports.items()}
    monkeypatch.setattr(words, "_transports", stopped)
    while not consumer.engine.leases():
        select.select([], [], [], 0.001)
    consumer.exchange.close()
    assert consumer.exchange.take_results() == []
    reached = []

    def released(*_: object) -> None:
        for transport in transports.values():
            with pytest.raises(LLMException, match="the transport is closed"):
                transport.begin_lease(0)
            reached.append(transport)

    consumer.engine.on_released(released)
    consumer.engine.finalize()
    (result,) = consumer.exchange.take_results()
    assert failed(result, "the exchange is closed")
    assert reached == list(transports.values())


def test_a_request_has_no_result_while_its_engine_drains(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Producers may write until the end of `finalize`."""
    _, consumer = pair
    monkeypatch.setattr("kvplan.serving.puller._RELEASE_S", 0.001)
    while not consumer.engine.leases():
        select.select([], [], [], 0.001)
    engine, release = consumer.engine._running(), consumer.engine.release
    refused = []

    def refuse(lease: BlockLease) -> None:
        with pytest.raises(LLMException, match="finalized") as error:
            release(lease)
        refused.append(lease)
        raise error.value

    def drain() -> None:
        consumer.exchange.cancel("mine")
        while len(refused) < 2 and not consumer.exchange.wait(1):
            pass
        assert consumer.exchange.take_results() == []

    monkeypatch.setattr(consumer.engine, "release", refuse)
    monkeypatch.setattr(engine, "drain", drain)
    consumer.engine.finalize()
    assert consumer.exchange.wait(60_000)
    (result,) = consumer.exchange.take_results()
    assert failed(result, "the exchange is closed")


def test_a_transfer_in_flight_has_its_own_result(make_worker: MakeWorker) -> None:
    """The transfer ends before `close` returns, and the request has only one result."""
    gate = Gate()
    producer, consumer = make_worker(1), make_worker(2, transfers=Transfers(1, gate.wrap))
    producer.finish(0, 11, [4, 9, 2], 21)
    consumer.exchange.fetch("mine", reference([producer.source], 0, 11, 21), Target([7, 1, 30]))
    closing, number = Thread(target=consumer.exchange.close), count()
    results: list[PullResult] = []
    try:
        gate.wait()
        closing.start()
        # `close` waits for the transfer when later requests are refused.
        late = reference([producer.source], 1, 12, 21, transfer="late")
        while not any(failed(item, "is closed") for item in results):
            consumer.exchange.fetch(f"late {next(number)}", late, Target([4]))
            consumer.exchange.wait(1)
            results += consumer.exchange.take_results()
        consumer.exchange.wait(50)  # for a result that comes too early
    finally:
        gate.open()
    closing.join(DEADLINE_S)
    results += consumer.exchange.take_results()
    (result,) = [item for item in results if item.request == "mine"]
    assert result.error is None
    assert consumer.has(11, [7, 1, 30], 0, 21)
    gate.close()


def test_messages_that_arrive_during_the_close_are_dropped(pair: tuple[Worker, Worker]) -> None:
    """An answer to one of them would be a task that never ends."""
    producer, consumer = pair
    arrived = Event()
    producer.exchange._call(arrived.wait)
    closing = Thread(target=producer.exchange.close)
    try:
        hello = encode(Hello({}, INSTANCE, answer=False))
        for _ in range(64):
            consumer.engine.notify(1, hello)
        closing.start()
    finally:
        arrived.set()
    closing.join(DEADLINE_S)
    tasks = [item for item in gc.get_objects() if isinstance(item, asyncio.Task)]
    assert tasks
    assert [task for task in tasks if task.get_loop().is_closed() and not task.done()] == []


def test_a_fetch_after_the_close_fails(pair: tuple[Worker, Worker]) -> None:
    producer, consumer = pair
    consumer.exchange.close()
    consumer.exchange.take_results()
    wanted = reference([producer.source], 0, 12, 21)
    assert failed(consumer.fetch(wanted, [7, 1, 30], name="late"), "the exchange is closed")


def test_an_engine_is_finalized_before_its_exchange(pair: tuple[Worker, Worker]) -> None:
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


def test_an_exchange_is_closed_right_after_it_was_made(make_worker: MakeWorker) -> None:
    for number in range(20):
        worker = make_worker(2 + number)
        worker.close()
        assert not worker.exchange.is_fetching


def test_an_exchange_that_cannot_start_a_thread_leaves_nothing_open() -> None:
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


FEW_DESCRIPTORS = """
from kvplan import LLMException
from kvplan.serving import Compatibility, Exchange
from tests.serving.worker import INSTANCE, Worker, reference
from tests.support.few_descriptors import spare_descriptors
from tests.support.held import Held

producer, other = Worker(1), Worker(2)
other.exchange.close()
made = other.engine, other.cache, Compatibility({"model": "tiny", "layers": "2"}), INSTANCE
held = Held.now()
for spare in range(3):
    with spare_descriptors(spare):
        try:
            Exchange(*made)
        except LLMException as error:
            print(error)
    held.check_nothing_new()
other.exchange = Exchange(*made)
producer.finish(0, 11, [4, 9, 2], 21)
assert other.fetch(reference([producer.source], 0, 11, 21), [7, 1, 30]).error is None
assert other.has(11, [7, 1, 30], 0, 21)
other.close()
producer.close()
print("fetched")
"""


def test_an_exchange_that_finds_no_descriptor_can_be_made_later() -> None:
    done = python(FEW_DESCRIPTORS, imported=("tests.serving.worker",))
    *refusals, last = done.stdout.splitlines()
    assert (len(refusals), last, done.returncode) == (3, "fetched", 0), done.stderr
    for text in refusals:
        assert text.startswith("the exchange cannot start: Too many open files: RLIMIT_NOFILE")
        assert text.endswith("(ulimit -n) (LLM_OUT_OF_MEMORY)")


class Failing(LlmDataDist):
    """An engine whose notifications cannot be read: the error comes when the test allows."""

    fails = Event()

    def notifications(self) -> Notifications:
        assert self.fails.wait(60)
        raise OSError("as the test says")


def test_requests_of_an_exchange_whose_thread_fails_have_a_result(
    make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make_worker(1)
    wanted = reference([producer.source], 0, 11, 21)
    with Failing(2, LlmRole.MIX) as engine:
        engine.initialize()
        cache = engine.allocate_blocks_cache(producer.cache.cache_desc)
        exchange = Exchange(engine, cache, Compatibility({}), INSTANCE)
        exchange.fetch("early", wanted, Target([7, 1, 30]))
        engine.fails.set()
        assert exchange.wait(60_000)
        exchange.close()
        exchange.fetch("late", wanted, Target([4]))
        results = exchange.take_results()
        assert [(item.request, item.blocks) for item in results] == [
            ("early", [7, 1, 30]),
            ("late", [4]),
        ]
        for item in results:
            assert failed(item, "the exchange is closed")
        assert not exchange.is_fetching
        assert not exchange._thread.is_alive()
        assert engine.leases() == []
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert line.getMessage() == "the exchange has ended"
    assert line.exc_info is not None
    assert str(line.exc_info[1]) == "as the test says"


def test_a_fetch_without_a_thread_is_not_moved_after_its_result() -> None:
    program = """
        from tests.serving.worker import Worker, reference
        from tests.support.lone_user import allow_threads, become

        producer, consumer = Worker(1), Worker(2)
        for number, blocks in enumerate(([4, 9, 2], [5, 6, 7])):
            producer.finish(number, 11 + number, blocks, 21)
        first, second = (reference([producer.source], i, 11 + i, 21) for i in range(2))
        consumer.exchange.expect("mine", first)
        while not (pull := consumer.exchange._puller.pulls.get("mine")) or not pull.handles:
            pass  # until both are linked
        become()
        allow_threads(1)
        consumer.fetch(first, [7, 1, 30])
        consumer.compute(13, [7, 1, 30], 21)  # the blocks are another request's
        allow_threads(None)
        assert consumer.fetch(second, [12, 13, 14]).error is None
        assert consumer.has(12, [12, 13, 14], 0, 21)
        assert consumer.has(13, [7, 1, 30], 0, 21)
        assert not consumer.exchange.take_results()
        consumer.close()
        producer.close()
    """
    lone_user.run(program)


def test_requests_expire_although_a_thread_could_not_start() -> None:
    program = """
        from tests.serving.worker import Worker
        from tests.support.lone_user import allow_threads, become

        producer = Worker(1, lease_ttl_ms=100)
        producer.engine.lease_blocks(producer.cache, [1], ttl_ms=1e6)  # starts the engine's thread
        become()
        allow_threads(1)
        producer.enter(0, 11, [4, 9, 2], 21)
        assert producer.freed() == {"request-11"}
        producer.close()
    """
    lone_user.run(program)
