"""Abandoned transfers: their memory is not touched any more, and the link still works."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvnative._backend import KVN_CANCELLED, KVN_OK, KVN_PEER_GONE, KVN_TIMEOUT
from kvnative._executor import Executor
from kvnative._report import Report
from kvnative._tcp import TcpNativeLink, TcpService
from tests.support.spare import copy_of, is_same
from tests.tcp.peer import DIRECTIONS, TIMEOUT_MS, Bytes, TcpPeer, blocks, both

MEMORY_NBYTES = 13 << 20  # per side: copying and comparing it takes most of the time
SPANS = blocks(1500, 8192, total=MEMORY_NBYTES)
directions = pytest.mark.parametrize("direction", DIRECTIONS)
hows = pytest.mark.parametrize("how", ["deadline", "cancel"])


@pytest.fixture(autouse=True)
def _as_it_was(steady_peer: TcpPeer) -> Iterator[None]:
    yield
    steady_peer.fill()


def check_confirmed(report: Report, here: Bytes, there: Bytes) -> None:
    """Check that confirmed descriptors have arrived."""
    ((first, last),) = report.unconfirmed
    assert last == len(SPANS)
    assert report.descriptors_done == first
    for mine, theirs, nbytes in SPANS[:first]:
        assert np.array_equal(here[mine:][:nbytes], there[theirs:][:nbytes])


def check_that_the_link_works(peer: TcpPeer, link: TcpNativeLink) -> None:
    small = np.zeros(4096, dtype=np.uint8)
    with Executor(peer.backend(link, "get")) as executor:
        report = executor.run(peer.descriptors("get", small, [(0, 0, 4096)]), TIMEOUT_MS)
    assert report.status == KVN_OK, report.message
    assert np.array_equal(small, peer.memory[:4096])


@directions
class TestInTheMiddle:
    def test_the_link_continues(
        self,
        service: TcpService,
        steady_peer: TcpPeer,
        local: Bytes,
        direction: str,
        secret: bytes | None,
    ) -> None:
        link = steady_peer.link(service, secret=secret)
        sides = both(steady_peer.memory, direction, local, SPANS)
        given_up = 0
        with Executor(steady_peer.backend(link, direction)) as executor:
            for _ in range(100):
                if given_up == 3:
                    break
                task = executor.submit(steady_peer.descriptors(direction, local, SPANS))
                while not task.done and not task.report.bytes_done:
                    pass
                report = task.cancel()
                if report.status == KVN_OK:  # it was faster
                    continue
                assert report.status == KVN_CANCELLED
                given_up += 1
                after_here, after_there = copy_of(local), copy_of(steady_peer.memory)
                check_confirmed(report, local, steady_peer.memory)
                # After the rest of the other transfer on the connection:
                check_that_the_link_works(steady_peer, link)
                assert is_same(local, after_here)
                assert is_same(steady_peer.memory, after_there)
            report = executor.run(steady_peer.descriptors(direction, local, SPANS), TIMEOUT_MS)
        assert report.status == KVN_OK, report.message
        assert given_up == 3
        assert link.failure is None
        assert is_same(local, sides[0])
        assert is_same(steady_peer.memory, sides[1])

    def test_abandoning_one_transfer_does_not_disturb_others(
        self, service: TcpService, steady_peer: TcpPeer, local: Bytes, direction: str
    ) -> None:
        """Its requests are between those of other transfers, which are not disturbed."""
        link = steady_peer.link(service)
        kept = [span for i in range(1, 20, 2) for span in SPANS[i::20]]
        sides = both(steady_peer.memory, direction, local, kept)
        with Executor(steady_peer.backend(link, direction)) as executor:
            tasks = [
                executor.submit(steady_peer.descriptors(direction, local, SPANS[i::20]))
                for i in range(20)
            ]
            for task in tasks[::2]:
                assert task.cancel().status in (KVN_CANCELLED, KVN_OK)
            for task in tasks[1::2]:
                report = task.wait(TIMEOUT_MS)
                assert report.status == KVN_OK, report.message
        assert link.failure is None
        for mine, theirs, nbytes in kept:
            here, there = local[mine:][:nbytes], steady_peer.memory[theirs:][:nbytes]
            assert np.array_equal(here, sides[0][mine:][:nbytes])
            assert np.array_equal(there, sides[1][theirs:][:nbytes])

    def test_several_connections_continue(
        self, service: TcpService, steady_peer: TcpPeer, local: Bytes, direction: str
    ) -> None:
        link = steady_peer.link(service, connections=3)
        with Executor(steady_peer.backend(link, direction)) as executor:
            for _ in range(4):
                task = executor.submit(steady_peer.descriptors(direction, local, SPANS))
                while not task.done and not task.report.bytes_done:
                    pass
                assert task.cancel().status in (KVN_CANCELLED, KVN_OK)
                after_here, after_there = copy_of(local), copy_of(steady_peer.memory)
                check_that_the_link_works(steady_peer, link)
                assert is_same(local, after_here)
                assert is_same(steady_peer.memory, after_there)
        assert link.failure is None


class TestAStoppedPeer:
    @hows
    def test_the_link_survives_an_abandoned_pull(
        self, service: TcpService, steady_peer: TcpPeer, local: Bytes, how: str
    ) -> None:
        """Bytes that the peer sends later are dropped, and the link continues."""
        link = steady_peer.link(service)
        steady_peer.stop()
        with Executor(steady_peer.backend(link, "get")) as executor:
            task = executor.submit(steady_peer.descriptors("get", local, SPANS))
            report = task.wait(30) if how == "deadline" else task.cancel()
        assert report.status == (KVN_TIMEOUT if how == "deadline" else KVN_CANCELLED)
        assert report.unconfirmed == ((0, len(SPANS)),)
        after = copy_of(local)
        steady_peer.resume()
        check_that_the_link_works(steady_peer, link)
        assert is_same(local, after)

    @hows
    def test_an_abandoned_push_ends_the_link(
        self, service: TcpService, steady_peer: TcpPeer, local: Bytes, how: str
    ) -> None:
        """The link ends, because bytes on the wire cannot be called back in another way."""
        link = steady_peer.link(service)
        before = copy_of(steady_peer.memory)
        steady_peer.stop()
        with Executor(steady_peer.backend(link, "put")) as executor:
            task = executor.submit(
                steady_peer.descriptors("put", local, [(0, 0, MEMORY_NBYTES)] * 2)
            )
            report = task.wait(30) if how == "deadline" else task.cancel()
            assert report.status == (KVN_TIMEOUT if how == "deadline" else KVN_CANCELLED)
            assert link.failure is not None
            assert link.failure[0] == KVN_PEER_GONE
            assert "aborted push" in link.failure[1]
        local[:] = 0x5A  # now the caller's memory again
        steady_peer.resume()
        check_that_the_link_works(steady_peer, steady_peer.link(service))
        steady_peer.run("links[-2].close('by now it has taken what it could')")
        assert not ((steady_peer.memory == 0x5A) & (before != 0x5A)).any()

    @directions
    def test_a_peer_that_answers_in_time_after_all(
        self, service: TcpService, steady_peer: TcpPeer, local: Bytes, direction: str
    ) -> None:
        link = steady_peer.link(service)
        sides = both(steady_peer.memory, direction, local, SPANS)
        steady_peer.stop()
        with Executor(steady_peer.backend(link, direction)) as executor:
            task = executor.submit(steady_peer.descriptors(direction, local, SPANS))
            assert task.wait(20, give_up=False).status not in (KVN_OK, KVN_TIMEOUT)
            steady_peer.resume()
            report = task.wait(TIMEOUT_MS)
        assert report.status == KVN_OK, report.message
        assert is_same(local, sides[0])
        assert is_same(steady_peer.memory, sides[1])


@directions
def test_memory_that_is_unmapped_after_an_abandoned_transfer(
    service: TcpService, steady_peer: TcpPeer, direction: str
) -> None:
    """Half of the pages of an abandoned transfer are unmapped, and no thread touches them."""
    link = steady_peer.link(service)
    with Executor(steady_peer.backend(link, direction)) as executor:
        for round_number in range(20):
            local = np.zeros(8 << 20, dtype=np.uint8)
            spans = [(at, at, 1 << 20) for at in range(0, local.nbytes, 1 << 20)]
            task = executor.submit(steady_peer.descriptors(direction, local, spans))
            while round_number % 2 and not task.done and not task.report.bytes_done:
                pass
            assert task.cancel().status in (KVN_CANCELLED, KVN_OK)
            del task, local
        check_that_the_link_works(steady_peer, link)
    assert link.failure is None
