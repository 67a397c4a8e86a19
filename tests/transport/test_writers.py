"""Which of several peers that write are waited for, and how long."""

from __future__ import annotations

import time

import pytest

from kvplan.transport import announced
from kvplan.transport.announced import Tickets, Writers


class Peer:
    """A peer whose writes last until a moment each."""

    def __init__(self) -> None:
        self.ends_at = [float("inf")]

    def read(self) -> Tickets:
        now = time.monotonic()
        return frozenset({(number, 1) for number, end in enumerate(self.ends_at) if now < end})


def test_a_peer_that_goes_on_is_waited_for_beside_one_that_made_no_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writers, stopped, going = Writers(Peer.read), Peer(), Peer()
    monkeypatch.setattr(announced, "WRITER_TIMEOUT_S", 0.0)
    late = writers.wait([stopped])
    assert late is not None
    monkeypatch.setattr(announced, "WRITER_TIMEOUT_S", 3600.0)
    going.ends_at = stopped.ends_at = [time.monotonic() + 10 * announced._STALLED_S]
    assert writers.wait([stopped, going]) is None
    assert not late.are_writing()


def test_a_new_write_is_waited_for_beside_one_of_the_same_peer_that_made_no_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writers, peer = Writers(Peer.read), Peer()
    monkeypatch.setattr(announced, "WRITER_TIMEOUT_S", 0.0)
    assert writers.wait([peer]) is not None
    monkeypatch.setattr(announced, "WRITER_TIMEOUT_S", 3600.0)
    peer.ends_at.append(time.monotonic() + 10 * announced._STALLED_S)
    late = writers.wait([peer])
    assert peer.read() == {(0, 1)}
    assert late is not None
    assert late.are_writing()
    peer.ends_at.clear()
    assert not late.are_writing()


def test_the_longer_a_wait_takes_the_less_often_it_looks() -> None:
    """Reading the table of a device or of another process takes a while."""
    reads = 0

    def read(peer: Peer) -> Tickets:
        nonlocal reads
        reads += 1
        return peer.read()

    assert Writers(read).wait([Peer()]) is not None
    assert reads < 300
