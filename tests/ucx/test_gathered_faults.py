"""Requests that are given up, and peers that stop or die while they move."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

from kvnative._executor import (
    KVN_CANCELLED,
    KVN_OK,
    KVN_PEER_GONE,
    KVN_TIMEOUT,
    Executor,
    Report,
)
from kvnative._ucx import UcxEnd
from tests.ucx.peer import NBYTES, TIMEOUT_MS, Bytes, UcxPeer, blocks

DIRECTIONS = ["get", "put"]
SPANS = blocks(2000, 8192)


def check_unconfirmed(
    report: Report, direction: str, local: Bytes, peer: UcxPeer, before: Bytes
) -> None:
    """What is not in the spans has arrived."""
    confirmed = np.ones(len(SPANS), dtype=bool)
    for first, last in report.unconfirmed:
        confirmed[first:last] = False
    assert not confirmed.all()
    for (mine, theirs, nbytes), arrived in zip(SPANS, confirmed, strict=True):
        if arrived:
            source = (
                before[mine : mine + nbytes] if direction == "put" else local[mine : mine + nbytes]
            )
            np.testing.assert_array_equal(source, peer.memory[theirs : theirs + nbytes])


@pytest.mark.parametrize("direction", DIRECTIONS)
class TestGivingUp:
    @pytest.mark.parametrize("how", ["deadline", "cancel"])
    def test_while_the_peer_has_stopped(
        self, end: UcxEnd, peer: UcxPeer, local: Bytes, direction: str, how: str
    ) -> None:
        link = peer.link(end)
        peer.stop()
        with Executor(peer.backend(link, direction)) as executor:
            task = executor.submit(peer.descriptors(direction, local, SPANS))
            report = task.wait(50) if how == "deadline" else task.cancel()
        assert report.status == (KVN_TIMEOUT if how == "deadline" else KVN_CANCELLED)
        assert report.unconfirmed == ((0, len(SPANS)),)
        after = local.copy()
        peer.resume()
        if direction == "get":
            # What the peer sends for it is dropped, and the link goes on.
            small = np.zeros(4096, dtype=np.uint8)
            with Executor(peer.backend(link, "get")) as executor:
                report = executor.run(peer.descriptors("get", small, [(0, 0, 4096)]), TIMEOUT_MS)
            assert report.status == KVN_OK, report.message
            np.testing.assert_array_equal(small, peer.memory[:4096])
            np.testing.assert_array_equal(local, after)
        elif not link.connected:
            assert link.failure == (
                KVN_PEER_GONE,
                "a push was given up, and the peer did not take what was under way",
            )

    def test_in_the_middle(self, end: UcxEnd, peer: UcxPeer, local: Bytes, direction: str) -> None:
        link = peer.link(end)
        before = local.copy()
        with Executor(peer.backend(link, direction)) as executor:
            for _ in range(5):
                task = executor.submit(peer.descriptors(direction, local, SPANS))
                while not task.done and not task.report.bytes_done:
                    pass
                report = task.cancel()
                if report.status == KVN_OK:  # it was through
                    continue
                assert report.status == KVN_CANCELLED
                after = local.copy()
                check_unconfirmed(report, direction, local, peer, before)
                report = executor.run(peer.descriptors("get", local[:0], []), TIMEOUT_MS)
                np.testing.assert_array_equal(local, after)
            report = executor.run(peer.descriptors(direction, local, SPANS), TIMEOUT_MS)
        assert report.status == KVN_OK, report.message
        assert link.connected

    def test_one_of_many(self, end: UcxEnd, peer: UcxPeer, local: Bytes, direction: str) -> None:
        link = peer.link(end)
        backend = peer.backend(link, direction)
        with Executor(backend) as executor:
            tasks = [
                executor.submit(peer.descriptors(direction, local, SPANS[i::20])) for i in range(20)
            ]
            for task in tasks[::2]:
                assert task.cancel().status in (KVN_CANCELLED, KVN_OK)
            for task in tasks[1::2]:
                assert task.wait(TIMEOUT_MS).status == KVN_OK
        for i in range(1, 20, 2):
            for mine, theirs, nbytes in SPANS[i::20]:
                np.testing.assert_array_equal(
                    local[mine : mine + nbytes], peer.memory[theirs : theirs + nbytes]
                )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_peer_that_is_killed(end: UcxEnd, peer: UcxPeer, local: Bytes, direction: str) -> None:
    link = peer.link(end)
    with Executor(peer.backend(link, direction)) as executor:
        peer.stop()  # so that it is killed before it is through
        task = executor.submit(peer.descriptors(direction, local, SPANS))
        os.kill(peer.pid, signal.SIGKILL)
        report = task.wait(TIMEOUT_MS)
        assert report.status == KVN_PEER_GONE
        assert report.unconfirmed
        assert report.message
        assert not link.connected
        # And so it stays.
        report = executor.run(peer.descriptors(direction, local, SPANS), TIMEOUT_MS)
        assert report.status == KVN_PEER_GONE


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_link_that_is_closed_here(
    end: UcxEnd, peer: UcxPeer, local: Bytes, direction: str
) -> None:
    link = peer.link(end)
    with Executor(peer.backend(link, direction)) as executor:
        peer.stop()
        task = executor.submit(peer.descriptors(direction, local, SPANS))
        waiting = threading.Thread(target=task.wait, args=(TIMEOUT_MS,))
        waiting.start()
        link.close("the engine unlinked it")
        waiting.join()
        report = task.report
    peer.resume()
    assert (report.status, report.message) == (KVN_PEER_GONE, "the engine unlinked it")
    assert report.bytes_done < NBYTES
