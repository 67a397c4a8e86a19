"""Links and services that close while bytes move: every transfer has an outcome."""

from __future__ import annotations

import gc
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from kvnative._backend import KVN_OK, KVN_PEER_GONE, NativeError
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._tcp import TcpNativeLink, TcpService
from tests.tcp.frames import attack
from tests.tcp.peer import (
    DIRECTIONS,
    TIMEOUT_MS,
    Bytes,
    Span,
    TcpPeer,
    backend_of,
    blocks,
    descriptors,
    link_within,
)

SPANS = blocks(2000, 8192)
directions = pytest.mark.parametrize("direction", DIRECTIONS)


def wait_for_failure(link: TcpNativeLink) -> str:
    assert select.select([link.death_fd], [], [], TIMEOUT_MS / 1000)[0], "the link did not fail"
    assert link.failure is not None
    assert not link.is_up
    status, message = link.failure
    assert status == KVN_PEER_GONE
    return message


@directions
class TestByThePeer:
    @pytest.mark.parametrize("connections", [1, 3])
    def test_a_killed_peer_ends_the_transfer(
        self, service: TcpService, peer: TcpPeer, local: Bytes, direction: str, connections: int
    ) -> None:
        link = peer.link(service, connections=connections)
        with Executor(peer.backend(link, direction)) as executor:
            peer.stop()  # so that it dies before the transfer has ended
            task = executor.submit(peer.descriptors(direction, local, SPANS))
            os.kill(peer.pid, signal.SIGKILL)
            report = task.wait(TIMEOUT_MS)
            assert report.status == KVN_PEER_GONE
            assert report.unconfirmed
            assert report.message
            # The failure stays.
            report = executor.run(peer.descriptors(direction, local, SPANS), TIMEOUT_MS)
            assert report.status == KVN_PEER_GONE
        wait_for_failure(link)

    def test_a_link_that_the_peer_closes_ends_the_transfer(
        self, service: TcpService, steady_peer: TcpPeer, local: Bytes, direction: str
    ) -> None:
        link = steady_peer.link(service)
        with Executor(steady_peer.backend(link, direction)) as executor:
            task = executor.submit(steady_peer.descriptors(direction, local, SPANS * 4))
            steady_peer.send("links[-1].close('enough')")
            report = task.wait(TIMEOUT_MS)
        steady_peer.answer()
        assert report.status in (KVN_OK, KVN_PEER_GONE)
        assert wait_for_failure(link)

    def test_an_idle_link_fails_with_its_peer(
        self, service: TcpService, steady_peer: TcpPeer, local: Bytes, direction: str
    ) -> None:
        link = steady_peer.link(service)
        steady_peer.run("links[-1].close('enough')")
        assert wait_for_failure(link) == "the peer has closed the connection"
        with Executor(steady_peer.backend(link, direction)) as executor:
            report = executor.run(steady_peer.descriptors(direction, local, SPANS), TIMEOUT_MS)
        assert report.status == KVN_PEER_GONE
        assert report.unconfirmed == ((0, len(SPANS)),)


@directions
@pytest.mark.parametrize("index", range(3))
def test_a_link_that_this_end_closes_ends_what_each_of_its_connections_moves(
    service: TcpService, peer: TcpPeer, local: Bytes, direction: str, index: int
) -> None:
    """The transfer has ended when `close` returns, although the peer is stopped."""
    link = peer.link(service, connections=3)
    with Executor(
        backend_of(link, direction, peer.base, peer.memory.nbytes, index=index)
    ) as executor:
        peer.stop()
        task = executor.submit(peer.descriptors(direction, local, SPANS))
        link.close("this end has closed the link")
        report = task.wait(0)
        assert (report.status, report.message) == (KVN_PEER_GONE, "this end has closed the link")


def test_the_end_of_one_connection_ends_all(service: TcpService, steady_peer: TcpPeer) -> None:
    link = steady_peer.link(service, connections=3)
    steady_peer.run("result = links[-1].connections")
    steady_peer.run(
        """
        import socket
        for file in files[2:3]:
            with socket.socket(fileno=file) as it:
                it.shutdown(socket.SHUT_RDWR)
                it.detach()
        """
    )
    wait_for_failure(link)
    assert link.connections == 3
    link.close("it has failed")
    assert not link.is_up


class Pair:
    """Two services of this process, a link between them, and memory of both sides."""

    SIZE = 8 << 20

    def __init__(self, connections: int = 1) -> None:
        self.asker, self.owner = TcpService(2, max_ranges=1), TcpService(2, max_ranges=1)
        self.memory = np.full(self.SIZE, 0x11, dtype=np.uint8)
        self.local = np.full(self.SIZE, 0x22, dtype=np.uint8)
        self.owner.add_range(0, self.memory.ctypes.data, self.SIZE, True, 1)
        self.near, self.far = link_within(self.asker, self.owner, connections)

    def executor(self, direction: str, index: int = 0) -> Executor:
        return Executor(
            backend_of(self.near, direction, self.memory.ctypes.data, self.SIZE, index=index)
        )

    def descriptors(self, direction: str, spans: list[Span]) -> Descriptors:
        return descriptors(direction, self.local.ctypes.data, self.memory.ctypes.data, spans)

    def close(self) -> None:
        self.asker.close()
        self.owner.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


PIECES: list[Span] = [(at, at, 8192) for at in range(0, Pair.SIZE, 8192)]


@directions
@pytest.mark.parametrize("what", ["near", "far", "asker", "owner"])
def test_nothing_is_touched_after_the_close(direction: str, what: str) -> None:
    """Either end closes a link or a service while other threads wait for transfers."""
    interrupted = rounds = 0
    while interrupted < 3:
        rounds += 1
        assert rounds < 50, "it is never in the middle"
        pair = Pair(connections=2)
        executors = [pair.executor(direction, index) for index in range(2)]
        halves = [PIECES[: len(PIECES) // 2] * 20, PIECES[len(PIECES) // 2 :] * 20]
        tasks = [
            executor.submit(pair.descriptors(direction, spans))
            for executor, spans in zip(executors, halves, strict=True)
        ]
        waits = [threading.Thread(target=task.wait, args=(TIMEOUT_MS,)) for task in tasks]
        for thread in waits:
            thread.start()
        while rounds % 2 and not any(task.done or task.report.bytes_done for task in tasks):
            pass
        if what in ("near", "far"):
            getattr(pair, what).close("enough")
        else:
            getattr(pair, what).close()
        # Memory of this end belongs to other code now.
        mine, theirs = (
            (pair.local, pair.memory) if what in ("near", "asker") else (pair.memory, pair.local)
        )
        mine[:] = 0x77
        for thread in waits:
            thread.join()
        reports = [task.report for task in tasks]
        assert all(report.status in (KVN_OK, KVN_PEER_GONE) for report in reports)
        interrupted += any(report.status == KVN_PEER_GONE for report in reports)
        if what == "near" and any(report.status == KVN_PEER_GONE for report in reports):
            assert "enough" in [report.message for report in reports]
        pair.close()
        assert (mine == 0x77).all()
        assert not (theirs == 0x77).any()


class TestAfterwards:
    def test_calls_after_the_end_of_a_link_fail(self, pair: Pair) -> None:
        executor = pair.executor("get")
        pair.near.close("enough")
        pair.near.close("again")
        assert pair.near.death_fd == -1
        assert pair.near.failure is None
        report = executor.run(pair.descriptors("get", PIECES), TIMEOUT_MS)
        assert report.status == KVN_PEER_GONE
        assert wait_for_failure(pair.far) == "the peer has closed the connection"

    def test_calls_after_the_end_of_a_service_fail(self, pair: Pair) -> None:
        executor = pair.executor("get")
        pair.asker.close()
        pair.asker.close()
        report = executor.run(pair.descriptors("get", PIECES), TIMEOUT_MS)
        assert report.status == KVN_PEER_GONE
        for call in (
            lambda: pair.asker.add_range(0, 1, 1, True, 1),
            lambda: pair.asker.remove_range(0),
            lambda: attack(pair.asker),
            lambda: pair.near.connections,
            lambda: pair.executor("get"),
        ):
            with pytest.raises(NativeError, match="the service is closed"):
                call()
        pair.near.close("nothing happens")

    def test_no_object_holds_the_link(self, pair: Pair) -> None:
        far = pair.far
        del pair.near
        gc.collect()
        assert wait_for_failure(far) == "the peer has closed the connection"

    def test_no_object_holds_the_service(self) -> None:
        pair = Pair()
        far = pair.far
        del pair.asker, pair.near
        gc.collect()
        assert wait_for_failure(far) == "the peer has closed the connection"
        pair.owner.close()


def error_of(call: Callable[[], object], started: threading.Barrier) -> str:
    """Return the error of a call after the end."""
    started.wait()
    while True:
        try:
            call()
        except NativeError as error:
            return str(error)


def test_closing_at_the_same_time_as_everything_else() -> None:
    """Threads that make links, ranges and transfers only get errors of a closed service."""

    def change_ranges(pair: Pair) -> None:
        pair.asker.add_range(0, 4096, 4096, True, 1)
        pair.asker.remove_range(0)

    def make_links(pair: Pair) -> None:
        attack(pair.asker).close()

    def transfer(pair: Pair) -> None:
        pair.executor("get").run(pair.descriptors("get", PIECES[:9]), TIMEOUT_MS)

    with ThreadPoolExecutor(3) as threads:
        for _ in range(10):
            pair, started = Pair(), threading.Barrier(4)
            errors = [
                threads.submit(error_of, partial(call, pair), started)
                for call in (change_ranges, make_links, transfer)
            ]
            started.wait()
            pair.asker.close()
            assert {error.result() for error in errors} == {"the service is closed"}
            pair.close()


def test_a_service_that_is_closed_by_its_collection() -> None:
    """A link is freed in the same collection, after the service."""

    class Transport:
        def __init__(self) -> None:
            self.service, self.owner = TcpService(1, max_ranges=1), TcpService(1, max_ranges=1)
            self.link, self.far = link_within(self.service, self.owner)
            self.myself = self

        def __del__(self) -> None:
            self.service.close()

    far = Transport().far
    gc.collect()
    assert wait_for_failure(far) == "the peer has closed the connection"
