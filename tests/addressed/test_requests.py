"""Open requests of an interface of addresses: their numbers, their ends, and callers that poll."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from time import monotonic
from typing import cast

import numpy as np
import pytest

from kvplan.addressed.engine import AddressedEngine, Request, Requests
from kvplan.addressed.names import own_endpoint, where_named
from kvplan.engine.options import Options
from kvplan.engine.ranges import AddressRanges
from kvplan.execution import Transfers, TransferTask
from kvplan.status import LLMException, LLMStatusCode
from kvplan.system.logs import Log
from kvplan.types import Placement
from tests.support import forked
from tests.support.interrupts import Interrupts
from tests.support.refusals import refused
from tests.support.wrappers import delay

DEADLINE_S = 60.0
RANGES = AddressRanges(1, [1], [1], [1])


class Task:
    """A task that ends only while its caller waits, because no other thread has a core."""

    settled = False

    def wait_done(self, timeout_ms: float) -> bool:
        assert 0 < timeout_ms <= 1
        self.settled = True
        return True


def test_a_caller_that_polls_gives_way_to_the_threads_that_copy() -> None:
    task = Task()
    request = Request(cast(TransferTask, task), RANGES, "there", "READ")
    assert not request.has_ended()  # the first look never waits
    asked = next(number for number in count(1) if request.has_ended())
    assert asked >= 1
    assert task.settled


def test_a_request_is_taken_once() -> None:
    task, requests = Task(), Requests()
    number = requests.add(Request(cast(TransferTask, task), RANGES, "there", "READ"))
    assert requests.take(number) is None
    task.settled = True
    assert requests.numbers() == [number]
    assert requests.take(number) is not None
    with refused("LLM_PARAM_INVALID", f"request {number} is unknown"):
        requests.take(number)
    assert requests.numbers() == []


def interrupted_submits() -> int:
    """Interrupt `submit` at each place; a transfer goes on only if a request names it."""
    with Transfers(1, wrap=lambda backend: delay(backend, 600_000)) as transfers:
        engine = AddressedEngine(5, Options.of({}), where_named, Log("kvplan.hixl"), transfers)
        memory = np.zeros(64, np.uint8)
        engine.register(memory.ctypes.data, 64, Placement.HOST)
        ranges = AddressRanges(5, [memory.ctypes.data], [memory.ctypes.data + 32], [32])
        interrupts = Interrupts("/kvplan/addressed/engine.py")
        while interrupts.call(lambda: engine.submit(ranges, "here", "READ")):
            assert engine.requests.numbers() == [], interrupts.place
            deadline = monotonic() + DEADLINE_S
            while engine.datadist.metrics()["in_flight"]:
                assert monotonic() < deadline, interrupts.place
        assert len(engine.requests.numbers()) == 1
        transfers.close(cancel=True)
        engine.datadist.finalize()
    return interrupts.place


def test_an_interrupt_leaves_no_transfer_without_a_request() -> None:
    code = "from tests.addressed.test_requests import *; print(interrupted_submits())"
    done = forked.python(code, imported=("tests.addressed.test_requests",))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3


@pytest.fixture
def engine() -> Iterator[AddressedEngine]:
    engine = AddressedEngine(5, Options.of({}), where_named, Log("kvplan.hixl"))
    yield engine
    engine.datadist.finalize()


@pytest.mark.parametrize("port", ["", ":0", ":-1"])
def test_an_engine_that_does_not_listen_has_the_name_of_a_host(port: str) -> None:
    for host in ("10.0.0.7", "localhost", "[::1]"):
        assert own_endpoint(host + port) is None
    for other in ("[no address]", "[10.0.0.7]", "h/st", "\0", "10.0.0.7:1:2"):
        with refused("LLM_PARAM_INVALID"):
            own_endpoint(other + port)


@pytest.mark.parametrize("status", ["LLM_ALREADY_LINK", "LLM_LINK_FAILED"])
def test_a_connection_that_another_thread_has_just_made_is_used(
    engine: AddressedEngine, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    connections = engine.connections

    def connect(*_: object) -> None:
        raise LLMException("by another thread", status_code=LLMStatusCode[status])

    monkeypatch.setattr(connections, "connect", connect)
    monkeypatch.setattr(connections, "cluster_of", {"there": 7}.__getitem__)
    if status == "LLM_ALREADY_LINK":
        assert engine.connect("there", 1000) == 7
    else:
        with refused(status, "by another thread"):
            engine.connect("there", 1000)


def test_a_transfer_inside_of_one_engine_has_a_task(engine: AddressedEngine) -> None:
    memory = np.arange(64, dtype=np.uint8)
    engine.register(memory.ctypes.data, 64, Placement.HOST)
    ranges = AddressRanges(5, [memory.ctypes.data], [memory.ctypes.data + 32], [32])
    begun = list[TransferTask]()
    assert engine.begin(ranges, 32, begun.append)
    begun[0].wait()
    assert memory[:32].tolist() == [*range(32, 64)]
