"""Peers that still write: which of them a deregistration waits for, and how long."""

from __future__ import annotations

import threading
import time

import pytest

from kvplan.transport import announced
from kvplan.transport.announced import Tickets, Writers


class Peer:
    """A peer with writes that last until given moments."""

    def __init__(self) -> None:
        self.ends_at = [float("inf")]

    def read(self) -> Tickets:
        now = time.monotonic()
        return frozenset({(number, 1) for number, end in enumerate(self.ends_at) if now < end})


def test_a_running_peer_is_waited_for_beside_a_stopped_one(
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


def test_a_new_write_is_waited_for_beside_a_stopped_write_of_the_same_peer(
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


def test_a_long_wait_reads_the_table_less_often() -> None:
    """Reading the table of a device or of another process takes a while."""
    reads = 0

    def read(peer: Peer) -> Tickets:
        nonlocal reads
        reads += 1
        return peer.read()

    assert Writers(read).wait([Peer()]) is not None
    assert reads < 300


def test_the_total_wait_for_peers_that_do_not_answer_is_limited() -> None:
    """After a network failure, each read ends with a timeout."""
    reads, never = 0, threading.Event()

    def read(peer: Peer) -> None:
        nonlocal reads
        reads += 1
        never.wait(0.05)

    peers = [Peer() for _ in range(200)]
    late = Writers(read).wait(peers)
    assert late is not None
    assert late.names == f"{reads} peers"
    assert reads < 150
    assert late.are_writing()


def test_unread_peers_are_not_writers_and_are_read_first_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Peer] = []
    cut, idle, other = peers = [Peer() for _ in range(3)]
    idle.ends_at = []

    def read(peer: Peer) -> Tickets | None:
        asked.append(peer)
        return peer.read() if peer is idle else None

    writers = Writers(read)
    for limit in ("WRITER_TIMEOUT_S", "_STALLED_S"):
        monkeypatch.setattr(announced, limit, 0.0)  # one read takes longer than that
    found = []
    for _ in range(4):
        late = writers.wait(peers)
        assert late is not None
        found.append((late.names, asked.copy()))
        asked.clear()
    assert found == [
        ("1 peer", [cut]),
        ("1 peer", [idle, other]),
        ("1 peer", [idle, cut]),
        ("1 peer", [idle, cut]),
    ]
