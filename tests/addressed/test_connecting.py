"""Connections over links that the peer has made: the peer gets a message, or there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvplan import LlmDataDist, LLMException, LLMStatusCode
from kvplan.addressed.connections import Connections
from kvplan.control.endpoint import Endpoint
from kvplan.links import LinkState
from kvplan.system.logs import Log
from tests.addressed.test_disconnecting import CLUSTER, NAME, Link
from tests.support.refusals import refused


class Engine(LlmDataDist):
    """An engine whose links and notifications have given outcomes."""

    def __init__(self, phase: str, *failures: LLMException) -> None:
        self.link, self.failures = Link(), [*failures]
        self.link.phase = phase
        self.told = 0

    def notifications(self) -> Any:
        return []

    def _running(self) -> Any:
        peers = {CLUSTER: self.link}
        return SimpleNamespace(links=SimpleNamespace(peers=peers, get=peers.__getitem__))

    def _link_clusters(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(status=LLMStatusCode.LLM_SUCCESS, raise_for_status=lambda: None)

    def notify(self, *_: Any, **__: Any) -> None:
        self.told += 1
        if self.failures:
            raise self.failures.pop(0)


def connections_of(engine: Engine) -> Connections:
    return Connections(engine, lambda name: (Endpoint.parse(name), CLUSTER), Log("kvplan.test"))


@pytest.mark.parametrize(("phase", "told"), [("linked", 0), ("", 1)])
def test_a_peer_that_began_the_handshake_gets_a_message(phase: str, told: int) -> None:
    """Both ends link at once, so this call has made a link, too."""
    engine = Engine(phase)
    connections = connections_of(engine)
    connections.connect(NAME, 1000)
    assert (engine.told, connections.cluster_of(NAME)) == (told, CLUSTER)


def test_a_peer_that_gets_no_message_is_not_connected() -> None:
    failure = LLMException("no answer", status_code=LLMStatusCode.LLM_LINK_FAILED)
    engine = Engine("", *[failure] * 3)
    connections = connections_of(engine)
    with refused("LLM_FAILED", "no answer"):
        connections.connect(NAME, 60_000)
    assert engine.told == 3
    with refused("LLM_NOT_YET_LINK", "is not connected"):
        connections.cluster_of(NAME)
    connections.connect(NAME, 60_000)
    assert connections.cluster_of(NAME) == CLUSTER


def test_a_link_that_ends_before_the_message_arrives_is_made_again() -> None:
    engine = Engine("", LLMException("gone", status_code=LLMStatusCode.LLM_NOT_YET_LINK))
    connections = connections_of(engine)
    connections.connect(NAME, 60_000)
    assert (engine.told, engine.link.state) == (2, LinkState.LINKED)
    assert connections.cluster_of(NAME) == CLUSTER
