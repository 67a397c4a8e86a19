"""Which of several peers that write are waited for, and how long."""

from __future__ import annotations

import time

import pytest

from kvplan.transport import announced
from kvplan.transport.announced import Tickets, Writers


class Peer:
    """A peer that writes until a moment."""

    def __init__(self) -> None:
        self.ends_at = float("inf")

    def read(self) -> Tickets:
        return frozenset({(0, 1)} if time.monotonic() < self.ends_at else ())


def test_a_peer_that_goes_on_is_waited_for_beside_one_that_made_no_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writers, stopped, going = Writers(Peer.read), Peer(), Peer()
    monkeypatch.setattr(announced, "WRITER_TIMEOUT_S", 0.0)
    late = writers.wait([stopped])
    assert late is not None
    monkeypatch.setattr(announced, "WRITER_TIMEOUT_S", 3600.0)
    going.ends_at = stopped.ends_at = time.monotonic() + 10 * announced._STALLED_S
    assert writers.wait([stopped, going]) is None
    assert not late.are_writing()
