"""The name of an engine while its link cannot be ended, or its end is interrupted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvplan import LlmDataDist, LLMException, LLMStatusCode
from kvplan.addressed.connections import Connections
from kvplan.control.endpoint import Endpoint
from kvplan.links import LinkState
from kvplan.system.logs import Log
from tests.support import forked
from tests.support.interrupts import Interrupts
from tests.support.refusals import refused

ROOT = Path(__file__).parents[2]
NAME, CLUSTER = "127.0.0.1:9", 7
DEADLINE_S = 30.0


class Link:
    """A link that this end has made."""

    cluster_id, state, phase = CLUSTER, LinkState.LINKED, "linked"


class Engine:
    """An engine whose link is busy a given number of times."""

    reason: tuple[str, ...] = ("busy",)

    def __init__(self) -> None:
        self.busy = 1
        self.peers = {CLUSTER: Link()}

    def notifications(self) -> list[Any]:
        return []

    def _running(self) -> Any:
        return SimpleNamespace(links=SimpleNamespace(peers=self.peers, get=self.peers.__getitem__))

    def unlink_clusters(self, clusters: list[int], timeout_ms: int) -> Any:
        self.busy -= 1
        if self.busy >= 0:
            raise LLMException(*self.reason, status_code=LLMStatusCode.LLM_LINK_BUSY)
        return SimpleNamespace(raise_for_status=lambda: None)


class Shared(Engine):
    """An engine whose link the peer has made and uses."""

    def __init__(self) -> None:
        super().__init__()
        self.peers[CLUSTER].phase = ""
        self.is_left = False

    def _running(self) -> Any:
        found = super()._running()
        found.links.drain = lambda *_: None
        return found

    def notify(self, *_: Any, **__: Any) -> None:
        self.is_left = True


def interrupted() -> int:
    """Interrupt `disconnect` at each place: the peer knows of its end, or it can be repeated."""
    interrupts, goes_on = Interrupts("/kvplan/addressed/"), True
    while goes_on:
        engine = Shared()
        connections = connections_of(engine)
        goes_on = interrupts.call(lambda: connections.disconnect(NAME, 1000))  # noqa: B023
        if not engine.is_left:
            connections.disconnect(NAME, 1000)
        assert engine.is_left
    return interrupts.place


def refused_and_interrupted() -> int:
    """Interrupt a `disconnect` whose link is busy at each place: the engine stays connected."""
    interrupts, goes_on = Interrupts("/kvplan/addressed/"), True
    while goes_on:
        connections = connections_of(Engine())

        def disconnect(connections: Connections = connections) -> None:
            with suppress(LLMException):
                connections.disconnect(NAME, 1000)

        goes_on = interrupts.call(disconnect)
        assert connections.cluster_of(NAME) == CLUSTER
    return interrupts.place


def test_a_call_of_the_same_thread_is_not_waited_for() -> None:
    """An exception that a handler keeps may keep the call."""
    engine = Shared()
    connections = connections_of(engine)
    with connections.use(NAME):
        connections.disconnect(NAME, 1000)
    assert engine.is_left


def test_a_call_of_another_thread_is_named_by_its_engine() -> None:
    connections = connections_of(Shared())
    begun, goes_on = Event(), Event()

    def call() -> None:
        with connections.use(NAME):
            begun.set()
            goes_on.wait(DEADLINE_S)

    with ThreadPoolExecutor(1) as threads:
        calling = threads.submit(call)
        assert begun.wait(DEADLINE_S)
        with refused(LLMStatusCode.LLM_TIMEOUT, f"a call of another thread with {NAME} goes on"):
            connections.disconnect(NAME, 1)
        goes_on.set()
        calling.result(DEADLINE_S)


def test_a_call_waits_for_another_one_with_its_engine_for_its_own_timeout() -> None:
    """The unit is milliseconds: a thousand times the timeout is longer than the deadline."""
    connections = connections_of(Shared())
    with ThreadPoolExecutor(1) as threads, connections._one_call(NAME, NAME, 1000):
        disconnecting = threads.submit(connections.disconnect, NAME, 100)
        with refused(LLMStatusCode.LLM_TIMEOUT, "another call has been .* for 100 ms"):
            disconnecting.result(DEADLINE_S)


@pytest.mark.parametrize("name", ["interrupted", "refused_and_interrupted"])
def test_a_disconnect_that_was_interrupted_can_be_repeated(name: str) -> None:
    code = f"from tests.addressed.test_disconnecting import {name} as run; print(run())"
    done = forked.python(code, imported=("tests.addressed.test_disconnecting",))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def connections_of(engine: Engine) -> Connections:
    connections = Connections(
        cast(LlmDataDist, engine), lambda name: (Endpoint.parse(name), CLUSTER), Log("kvplan.test")
    )
    connections._add(NAME, NAME, cast(Any, engine.peers[CLUSTER]))
    return connections


def test_an_engine_whose_link_is_busy_stays_connected_and_can_be_disconnected_later() -> None:
    engine = Engine()
    connections = connections_of(engine)
    with refused("LLM_TIMEOUT", "busy"):
        connections.disconnect(NAME, 1000)
    assert connections.cluster_of(NAME) == CLUSTER
    connections.disconnect(NAME, 1000)
    with refused("LLM_NOT_YET_LINK", "is not connected"):
        connections.cluster_of(NAME)


def test_an_error_of_the_link_may_have_no_text() -> None:
    engine = Engine()
    engine.reason = ()
    with refused("LLM_TIMEOUT"):
        connections_of(engine).disconnect(NAME, 1000)


def test_an_engine_that_was_never_reached_leaves_nothing_behind() -> None:
    """A long-lived program may ask for a new address each minute."""

    def where(name: str) -> tuple[Endpoint, int]:
        return Endpoint.parse(name), CLUSTER

    connections = Connections(cast(LlmDataDist, Engine()), where, Log("kvplan.test"))
    for port in range(1, 100):
        with refused("LLM_NOT_YET_LINK", "is not connected"):
            connections.disconnect(f"127.0.0.1:{port}", 1000)
    assert not connections._busy
