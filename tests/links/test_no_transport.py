"""Transports that one of the ends cannot use, and the reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvplan import LLMException, LLMStatusCode
from kvplan.transport.local import LocalTransport
from kvplan.transport.tcp.transport import TcpTransport
from tests.links.end import End

MakeEnd = Callable[..., End]


class _Unreachable(LocalTransport):
    """A transport that refuses every peer."""

    def refusal(self, metadata: bytes) -> str | None:
        return "the cable is missing"


class _Talkative(LocalTransport):
    """A transport that refuses every peer in many words."""

    def refusal(self, metadata: bytes) -> str | None:
        return 1000 * "alas "


class _Unconnectable(LocalTransport):
    """A transport that refuses no peer, but cannot connect."""

    def refusal(self, metadata: bytes) -> None:
        return None

    def connect(self, metadata: bytes, **timeout: Any) -> Any:
        raise LLMException("no route", status_code=LLMStatusCode.LLM_LINK_FAILED)


def test_engines_without_a_common_transport_are_refused(make_end: MakeEnd, end: End) -> None:
    other = make_end(2, transports=[_Unreachable()])
    why = "no transport between cluster 2 and cluster 1: local: cluster 2: the cable is missing"
    end.check_link_fails(other.cluster, LLMStatusCode.LLM_LINK_FAILED, why)
    assert other.links.live() == 0


def test_long_reasons_of_both_ends_against_a_transport_are_cut(make_end: MakeEnd) -> None:
    one, two = (make_end(i, transports=[_Talkative(), TcpTransport()]) for i in (1, 2))
    one.link(two.cluster)
    for status in (one.status(2), two.status(1)):
        assert status.transport == "tcp"
        assert status.passed_over[0].startswith("local: cluster 1: alas alas")


def test_the_peer_cannot_reach_back(make_end: MakeEnd, end: End) -> None:
    other = make_end(2, transports=[_Unconnectable()])
    why = "confirm: cluster 2 cannot reach cluster 1: local: no route"
    end.check_link_fails(other.cluster, LLMStatusCode.LLM_LINK_FAILED, why)
    assert "no route" in other.wait_for(1, "UNLINKED")
    assert (end.state(2), other.state(1)) == (None, None)


def test_the_initiator_cannot_reach_the_peer(make_end: MakeEnd, end: End) -> None:
    one = make_end(3, transports=[_Unconnectable()])
    why = "transport: local: no route"
    one.check_link_fails(end.cluster, LLMStatusCode.LLM_LINK_FAILED, why)
    # Only one end has a caller that learns of the failure.
    lines = one.wait_for(1, "UNLINKED"), end.wait_for(3, "UNLINKED")
    assert ["no route" in line for line in lines] == [True, True]
    assert [line.partition(" ")[0] for line in lines] == ["INFO", "WARNING"]
    assert (one.state(1), end.state(3)) == (None, None)
