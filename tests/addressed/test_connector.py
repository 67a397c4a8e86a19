"""Background tasks of several remote engines, compared with a model: order, bounds and states."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvplan.addressed.connections import _HEAD, read_frame
from kvplan.addressed.connector import Connector
from kvplan.hixl.running import CONNECT_STATES, DISCONNECT_STATES
from kvplan.hixl.values import AsyncConnectStatus
from kvplan.system.logs import Log
from tests.support import lone_user
from tests.support.refusals import refused

DEADLINE_S = 30.0  # reached only by a task that never begins or ends
NAMES = ["a", "b", "c"]
CAPACITY = 3


class Tasks(RuleBasedStateMachine):
    """A connector with one thread: the order of the calls decides which task runs."""

    @initialize()
    def begin(self) -> None:
        self.connector = Connector(1, CAPACITY, "test", Log("kvplan.hixl"))
        self.begun: queue.Queue[int] = queue.Queue()
        self.end: queue.Queue[object] = queue.Queue()
        self.number = 0
        # The model: running and waiting tasks, by remote engine in the order of their first task.
        self.running: tuple[str, bool, int] | None = None
        self.waiting: dict[str, list[tuple[bool, int]]] = {}
        self.states: dict[str, AsyncConnectStatus] = {}

    @rule(name=st.sampled_from(NAMES), connects=st.booleans())
    def submit(self, name: str, connects: bool) -> None:
        number = self.number = self.number + 1

        def run() -> bool:
            self.begun.put(number)
            outcome = self.end.get(timeout=DEADLINE_S)
            if isinstance(outcome, Exception):
                raise outcome
            return bool(outcome)

        if sum(map(len, self.waiting.values())) >= CAPACITY:
            with refused("LLM_LINK_BUSY", f"{CAPACITY} asynchronous connects are waiting; at most"):
                self.connector.submit(name, (DISCONNECT_STATES, CONNECT_STATES)[connects], run)
            return
        self.connector.submit(name, (DISCONNECT_STATES, CONNECT_STATES)[connects], run)
        self.waiting.setdefault(name, []).append((connects, number))
        pending = AsyncConnectStatus.CONNECT_PENDING, AsyncConnectStatus.DISCONNECT_PENDING
        self.states[name] = pending[not connects]
        if self.running is None:
            self.begin_next(name)
        self.check_states()

    @precondition(lambda self: self.running is not None)
    @rule(outcome=st.sampled_from([True, False, ValueError("a mistake")]))
    def end_task(self, outcome: object) -> None:
        assert self.running is not None
        name, connects, _ = self.running
        self.running = None
        self.end.put(outcome)
        if name in self.waiting:  # the next one of the same engine, whichever engines wait
            self.begin_next(name)
        else:
            done = outcome is True
            if connects:
                ended = AsyncConnectStatus.CONNECTED if done else AsyncConnectStatus.CONNECT_FAILED
                self.states[name] = ended
            elif done:
                del self.states[name]
            else:
                self.states[name] = AsyncConnectStatus.NOT_CONNECT
            if self.waiting:
                self.begin_next(next(iter(self.waiting)))
            else:
                self.connector.join()
        self.check_states()

    def begin_next(self, name: str) -> None:
        connects, number = self.waiting[name].pop(0)
        if not self.waiting[name]:
            del self.waiting[name]
            running = AsyncConnectStatus.CONNECTING, AsyncConnectStatus.DISCONNECTING
            self.states[name] = running[not connects]
        self.running = name, connects, number
        assert self.begun.get(timeout=DEADLINE_S) == number

    def check_states(self) -> None:
        assert self.connector.states() == self.states

    def teardown(self) -> None:
        if not hasattr(self, "connector"):
            return
        self.connector.stop()
        with refused("LLM_ENGINE_FINALIZED"):
            self.connector.submit("a", CONNECT_STATES, lambda: True)
        if self.running is not None:
            self.end.put(True)
        self.connector.join()
        assert self.begun.empty()  # a waiting task has not begun


TestTasks = Tasks.TestCase
TestTasks.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """An event that ends all tasks that wait for it."""
    held = threading.Event()
    yield held
    held.set()


def test_engines_wait_for_each_other_only_if_threads_are_short(held: threading.Event) -> None:
    connector = Connector(2, 8, "test", Log("kvplan.hixl"))
    begun: queue.Queue[str] = queue.Queue()
    for name in NAMES:

        def run(name: str = name) -> bool:
            begun.put(name)
            return held.wait(DEADLINE_S)

        connector.submit(name, CONNECT_STATES, run)
    assert {begun.get(timeout=DEADLINE_S) for _ in range(2)} == {"a", "b"}
    assert begun.empty()
    assert connector.states()["c"] is AsyncConnectStatus.CONNECT_PENDING
    held.set()
    assert begun.get(timeout=DEADLINE_S) == "c"
    connector.join()
    assert connector.states() == dict.fromkeys(NAMES, AsyncConnectStatus.CONNECTED)


def test_a_task_without_a_thread_delays_no_later_one() -> None:
    program = """
        from queue import SimpleQueue
        from kvplan import LLMException
        from kvplan.addressed.connector import Connector
        from kvplan.system.logs import Log
        from tests.support.lone_user import allow_threads, become

        become()
        connector, ran = Connector(2, 8, "test", Log("kvplan.hixl")), SimpleQueue()
        for room in (1, None):
            allow_threads(room)
            try:
                connector.submit("a", range(4), lambda: ran.put(True) or True)
            except LLMException as error:
                assert room == 1 and error.status_code.name == "LLM_OUT_OF_MEMORY", error
                assert connector.states() == {}
        assert ran.get(timeout=20)
    """
    lone_user.run(program)


@pytest.mark.parametrize("length", range(6))
def test_the_name_of_a_message_ends_within_the_message(length: int) -> None:
    """A peer may send anything: the name does not end behind the message."""
    found = read_frame(_HEAD.pack(b"N", 0, length) + b"abcd")
    if length > 4:
        assert found is None
    else:
        assert found == (b"N", 0, b"abcd"[:length], b"abcd"[length:])
    assert read_frame(_HEAD.pack(b"X", 0, length) + b"abcd") is None
    # a piece that belongs to no message
    assert read_frame(_HEAD.pack(b"P", 0, length) + b"abcd") is None
    assert read_frame(_HEAD.pack(b"F", 0, length) + b"abcd") is None
    assert read_frame(_HEAD.pack(b"N", 0, length)[:-1]) is None
