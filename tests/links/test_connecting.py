"""The connection of a link's transports: where, and what a failure leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.control.channel import Channel
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import Offer
from kvplan.links.local_engine import LocalEngine
from kvplan.links.peer_link import PeerLink
from kvplan.links.transitions import Transitions
from kvplan.status import message_of
from tests.support.refusals import refused

SESSION = bytes(16)


class Connecting:
    """Transports that record how they are connected, and a link that uses them in this order."""

    def __init__(self, *at_once: bool, fails: int | None = None) -> None:
        self.in_worker: list[bool] = []
        self.closed: list[tuple[int, str]] = []
        self.prepared: list[range] = []
        self.streams_closed = 0
        self._works, self._fails = False, fails
        self.transports = [self._transport(index, given) for index, given in enumerate(at_once)]

    def _transport(self, index: int, connects_at_once: bool) -> Any:
        def connect(metadata: bytes, **_: object) -> object:
            assert metadata == bytes([index])
            self.in_worker.append(self._works)
            if index == self._fails:
                raise LLMException("out of reach", status_code=LLMStatusCode.LLM_LINK_FAILED)
            return SimpleNamespace(close=lambda why: self.closed.append((index, message_of(why))))

        return SimpleNamespace(
            name=str(index),
            connects_at_once=connects_at_once,
            num_streams=lambda metadata: (1, 4, 2)[metadata[0]],
            connect=connect,
        )

    async def _in_worker(self, function: Callable[..., object], *args: object) -> object:
        self._works = True
        return function(*args)

    async def _prepare(self, indices: range, timeout_s: float) -> None:
        self.prepared.append(indices)

    def _close_streams(self) -> None:
        self.streams_closed += 1

    async def connect(self) -> dict[str, Any]:
        """Connect the transports, and return their links by name."""
        link = PeerLink(5, "", "", cast(ControlLoop, None), 1000)
        link.transports = tuple(transport.name for transport in self.transports)
        link.channel = cast(Channel, SimpleNamespace())
        streams = SimpleNamespace(dials=False, prepare=self._prepare, close_now=self._close_streams)
        link.streams = cast(Any, streams)
        engine = SimpleNamespace(
            transport=lambda name: self.transports[int(name)],
            registry=None,
            control=SimpleNamespace(in_worker=self._in_worker),
        )
        offers = [Offer(name, bytes([int(name)])) for name in reversed(link.transports)]
        Transitions(cast(LocalEngine, engine)).connect(link, offers, SESSION, 60.0)
        assert link.connecting is not None
        try:
            return await link.connecting
        finally:
            assert (link.streams, self.streams_closed) == (None, 1)


@pytest.mark.parametrize("at_once", [*product((False, True), repeat=3)])
def test_a_worker_connects_unless_every_transport_connects_at_once(
    at_once: tuple[bool, ...],
) -> None:
    """A transport that may wait for its peer would block the control thread."""
    connecting = Connecting(*at_once)
    assert [*asyncio.run(connecting.connect())] == ["0", "1", "2"]
    assert connecting.in_worker == [not all(at_once)] * 3
    assert connecting.prepared == [range(4)]  # as many as the transport with the most needs


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_transport_that_does_not_connect_closes_those_before_it(fails: int) -> None:
    connecting = Connecting(False, False, False, fails=fails)
    with refused("LLM_LINK_FAILED", f"^{fails}: out of reach"):
        asyncio.run(connecting.connect())
    assert connecting.closed == [(index, "out of reach") for index in range(fails)]
