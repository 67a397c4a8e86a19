"""Peers that die or stop, memory that goes, engines that end: statuses agree with the events."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvplan import LinkState, hixl
from kvplan.addressed.connections import Connections
from kvplan.hixl import TransferOp, TransferOpDesc, TransferStatus
from tests.faults.gate import Gate
from tests.hixl.conftest import MakeEngine, MakePeer
from tests.hixl.peer import Peer
from tests.hixl.places import MIB, Memory, Place, pattern, registered

LONG_MS = 30_000
HALF = MIB // 2
BLOCK = 16 << 10
ops = pytest.mark.parametrize("op", [hixl.READ, hixl.WRITE])


def free_pages(address: int, nbytes: int) -> None:
    """Unmap the pages. The addresses stay reserved, or a thread's stack might be mapped there."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(address, nbytes, 0) == 0


FREE = """
    import ctypes
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(memory.address, len(memory.array), 0) == 0
"""


def blocks(memory: Memory, peer: Peer, count: int = 8) -> list[TransferOpDesc]:
    """Return ranges of which no two can be merged."""
    order = range(count)
    return [
        TransferOpDesc(memory.address + i * BLOCK, peer.address + (count - 1 - i) * BLOCK, BLOCK)
        for i in order
    ]


def ended(engine: hixl.Hixl, request: int) -> tuple[int, TransferStatus]:
    while (told := engine.get_transfer_status(request))[1] == TransferStatus.WAITING:
        pass
    return told


def skipping(count: int = 100) -> hixl.GetTransferStatusArgs:
    return hixl.GetTransferStatusArgs(count, skip_waiting=True)


def until_broken(engine: hixl.Hixl) -> None:
    while any(link.state is LinkState.LINKED for link in engine.datadist.links()):
        pass


def in_thread(call: Callable[[], int]) -> tuple[threading.Thread, list[int]]:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


class TestKilled:
    """The peer ends by SIGKILL, at each step of a program."""

    @pytest.mark.over_tcp
    def test_before_and_after_connecting(
        self, engine: hixl.Hixl, memory: Memory, make_peer: MakePeer
    ) -> None:
        peer = make_peer()
        peer.kill()
        assert engine.connect(peer.name, LONG_MS) == hixl.FAILED
        peer = make_peer()
        assert engine.connect(peer.name, LONG_MS) == hixl.SUCCESS
        peer.kill()
        moved = blocks(memory, peer)
        for op in (hixl.READ, hixl.WRITE):
            assert engine.transfer_sync(peer.name, op, moved, LONG_MS) == hixl.NOT_CONNECTED
        assert engine.transfer_async(peer.name, hixl.READ, moved) == (hixl.NOT_CONNECTED, 0)
        message = hixl.NotifyDesc("a", "b")
        assert engine.send_notify(peer.name, message, LONG_MS) == hixl.NOT_CONNECTED
        assert not memory.array.any()
        assert engine.disconnect(peer.name, LONG_MS) == hixl.SUCCESS
        assert engine.disconnect(peer.name, LONG_MS) == hixl.NOT_CONNECTED

    @pytest.mark.over_tcp
    @pytest.mark.over_hccl
    @ops
    def test_during_a_call(
        self,
        gated: hixl.Hixl,
        place: Place,
        peer: Peer,
        gate: Gate,
        op: TransferOp,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        memory = registered(gated, place)
        assert gated.connect(peer.name, LONG_MS) == hixl.SUCCESS
        call, found = in_thread(
            lambda: gated.transfer_sync(peer.name, op, blocks(memory, peer), LONG_MS)
        )
        gate.wait()
        peer.kill()
        until_broken(gated)
        with caplog.at_level(logging.WARNING, "kvplan.hixl"):
            gate.open()
            call.join()
        assert found == [hixl.NOT_CONNECTED]
        (said,) = [record.getMessage() for record in caplog.records if record.name == "kvplan.hixl"]
        assert peer.name in said
        assert "not confirmed: local [0x" in said

    @pytest.mark.over_tcp(only=True)
    @ops
    def test_during_requests(
        self, connected: hixl.Hixl, memory: Memory, peer: Peer, op: TransferOp
    ) -> None:
        peer.stop()  # so that no request ends
        status, request = connected.transfer_async(peer.name, op, blocks(memory, peer))
        assert status == hixl.SUCCESS
        assert connected.get_transfer_status(request) == (hixl.SUCCESS, TransferStatus.WAITING)
        assert connected.get_all_transfer_status(skipping())[1] == []
        ((waiting),) = connected.get_all_transfer_status()[1]
        assert (waiting.req, waiting.status) == (request, TransferStatus.WAITING)
        peer.kill()
        assert ended(connected, request) == (hixl.NOT_CONNECTED, TransferStatus.FAILED)
        assert connected.get_transfer_status(request)[0] == hixl.PARAM_INVALID

    def test_the_peer_is_killed_while_connecting(self, engine: hixl.Hixl, peer: Peer) -> None:
        peer.stop()
        call, found = in_thread(lambda: engine.connect(peer.name, LONG_MS))
        while not engine.datadist.links():
            assert call.is_alive()
        peer.kill()
        call.join()
        assert found == [hixl.FAILED]

    @pytest.mark.over_tcp
    def test_the_peer_is_killed_while_disconnecting(self, connected: hixl.Hixl, peer: Peer) -> None:
        peer.stop()
        call, found = in_thread(lambda: connected.disconnect(peer.name, LONG_MS))
        while any(link.state is LinkState.LINKED for link in connected.datadist.links()):
            assert call.is_alive()
        peer.kill()
        call.join()
        assert found == [hixl.SUCCESS]
        assert connected.disconnect(peer.name, LONG_MS) == hixl.NOT_CONNECTED

    @pytest.mark.over_tcp(only=True)
    def test_the_peer_is_killed_during_a_message(self, connected: hixl.Hixl, peer: Peer) -> None:
        peer.stop()
        message = hixl.NotifyDesc("a", "b")
        call, found = in_thread(lambda: connected.send_notify(peer.name, message, LONG_MS))
        while not any(link.in_flight for link in connected.datadist.links()):
            assert call.is_alive()
        peer.kill()
        call.join()
        assert found == [hixl.NOT_CONNECTED]

    def test_a_peer_of_the_same_name_can_be_connected(
        self, engine: hixl.Hixl, memory: Memory, peer: Peer, make_peer: MakePeer
    ) -> None:
        assert engine.connect(peer.name, LONG_MS) == hixl.SUCCESS
        peer.kill()
        other = make_peer()
        other.run(
            """
            engine.finalize()
            engine = hixl.Hixl()
            assert engine.initialize(name, place.options) == hixl.SUCCESS
            memory = registered(engine, place)
            """,
            name=peer.name,
        )
        other.fill(3)
        address = other.run("result = memory.address")
        moved = [TransferOpDesc(memory.address, address, MIB)]
        assert engine.transfer_sync(peer.name, hixl.READ, moved) == hixl.NOT_CONNECTED
        assert engine.connect(peer.name, LONG_MS) == hixl.SUCCESS
        assert engine.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS
        np.testing.assert_array_equal(memory.array, pattern(seed=3))

    def test_auto_connect_connects_with_a_new_peer(
        self, make_engine: MakeEngine, place: Place, make_peer: MakePeer
    ) -> None:
        engine = make_engine(AutoConnect="1")
        memory = registered(engine, place)
        peer = make_peer()
        moved = blocks(memory, peer)
        assert engine.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS
        peer.run("engine.finalize()")
        until_broken(engine)
        assert engine.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.FAILED
        address = peer.run(
            """
            engine = hixl.Hixl()
            assert engine.initialize(name, place.options) == hixl.SUCCESS
            memory = registered(engine, place)
            result = memory.address
            """
        )
        moved = [TransferOpDesc(memory.address, address, MIB)]
        assert engine.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS


@pytest.mark.over_tcp(only=True)
@ops
def test_a_stopped_peer_is_a_timeout_and_moves_no_later_byte(
    connected: hixl.Hixl, memory: Memory, peer: Peer, op: TransferOp
) -> None:
    moved = blocks(memory, peer)
    assert connected.transfer_sync(peer.name, op, moved, LONG_MS) == hixl.SUCCESS
    peer.fill(4)
    peer.stop()
    status = connected.transfer_sync(peer.name, op, moved, 200)
    assert status == hixl.TIMEOUT
    before = memory.array.copy()
    peer.resume()
    peer.run("pass")
    np.testing.assert_array_equal(memory.array, before)


@pytest.mark.over_tcp
class TestRemovedMemory:
    @ops
    def test_deregistered_there_and_registered_again(
        self, connected: hixl.Hixl, memory: Memory, peer: Peer, op: TransferOp
    ) -> None:
        moved = blocks(memory, peer)
        assert connected.transfer_sync(peer.name, op, moved, LONG_MS) == hixl.SUCCESS
        peer.run("assert engine.deregister_mem(memory.handle) == hixl.SUCCESS")
        assert connected.transfer_sync(peer.name, op, moved, LONG_MS) == hixl.PARAM_INVALID
        assert connected.transfer_async(peer.name, op, moved) == (hixl.PARAM_INVALID, 0)
        peer.run(
            """
            desc = hixl.MemDesc(memory.address, len(memory.array))
            assert engine.register_mem(desc, place.mem_type)[0] == hixl.SUCCESS
            """
        )
        assert connected.transfer_sync(peer.name, op, moved, LONG_MS) == hixl.SUCCESS

    @pytest.mark.parametrize("at_peer", [True, False])
    @ops
    def test_memory_freed_without_deregistering(
        self,
        connected: hixl.Hixl,
        memory: Memory,
        peer: Peer,
        at_peer: bool,
        op: TransferOp,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        moved = blocks(memory, peer)
        assert connected.transfer_sync(peer.name, op, moved, LONG_MS) == hixl.SUCCESS
        if at_peer:
            peer.run(FREE)
        else:
            free_pages(memory.address, MIB)
        with caplog.at_level(logging.WARNING, "kvplan.hixl"):
            status = connected.transfer_sync(peer.name, op, moved, LONG_MS)
            assert status in (hixl.FAILED, hixl.NOT_CONNECTED), status
            submitted, request = connected.transfer_async(peer.name, op, moved)
            if submitted == hixl.SUCCESS:
                assert ended(connected, request)[1] == TransferStatus.FAILED
        said = [record.getMessage() for record in caplog.records if record.name == "kvplan.hixl"]
        assert any("not confirmed: local [0x" in item for item in said), said

    @ops
    def test_deregistered_there_during_a_call(
        self, gated: hixl.Hixl, place: Place, peer: Peer, gate: Gate, op: TransferOp
    ) -> None:
        memory = registered(gated, place)
        assert gated.connect(peer.name, LONG_MS) == hixl.SUCCESS
        call, found = in_thread(
            lambda: gated.transfer_sync(peer.name, op, blocks(memory, peer), LONG_MS)
        )
        gate.wait()
        peer.run("assert engine.deregister_mem(memory.handle) == hixl.SUCCESS")
        gate.open()
        call.join()
        assert found == [hixl.PARAM_INVALID]  # the peer was asked again, and has no such memory

    def test_deregistering_waits_for_a_call_in_another_thread(
        self, gated: hixl.Hixl, place: Place, peer: Peer, gate: Gate
    ) -> None:
        memory = registered(gated, place)
        peer.fill(6)
        assert gated.connect(peer.name, LONG_MS) == hixl.SUCCESS
        moved = blocks(memory, peer)
        call, status = in_thread(lambda: gated.transfer_sync(peer.name, hixl.READ, moved, LONG_MS))
        gate.wait()
        ending, found = in_thread(lambda: gated.deregister_mem(memory.handle))
        while gated.datadist.caches():
            pass
        assert found == []  # the call has not ended
        gate.open()
        ending.join()
        memory.array[:] = 7
        call.join()
        assert found == [hixl.SUCCESS]
        # the transfer may have been complete before
        assert status in ([hixl.FAILED], [hixl.SUCCESS])
        assert (memory.array == 7).all()

    def test_disconnecting_waits_for_a_call_in_another_thread_if_the_peer_keeps_the_link(
        self, gated: hixl.Hixl, place: Place, peer: Peer, gate: Gate
    ) -> None:
        memory, own = registered(gated, place), str(gated.datadist.listen_address)
        assert gated.connect(peer.name, LONG_MS) == hixl.SUCCESS
        assert peer.run("result = engine.connect(name, 10_000)", name=own) == hixl.SUCCESS
        moved = blocks(memory, peer)
        call, status = in_thread(lambda: gated.transfer_sync(peer.name, hixl.READ, moved, LONG_MS))
        gate.wait()
        assert gated.disconnect(peer.name, 100) == hixl.TIMEOUT  # the peer is still connected
        ending, found = in_thread(lambda: gated.disconnect(peer.name, LONG_MS))
        gate.open()
        ending.join()
        memory.array[:] = 7
        call.join()
        assert (found, status) == ([hixl.SUCCESS], [hixl.SUCCESS])
        assert (memory.array == 7).all()
        assert gated.transfer_sync(peer.name, hixl.READ, moved) == hixl.NOT_CONNECTED
        assert peer.run("result = engine.disconnect(name, 10_000)", name=own) == hixl.SUCCESS


@pytest.mark.over_tcp(only=True)
class TestStoppedRequests:
    """The peer is stopped, so no request ends by itself."""

    @pytest.fixture
    def request_of(self, connected: hixl.Hixl, memory: Memory, peer: Peer) -> int:
        peer.fill(7)
        peer.stop()
        status, request = connected.transfer_async(peer.name, hixl.READ, blocks(memory, peer))
        assert status == hixl.SUCCESS
        return request

    @pytest.fixture
    def unchanged(self, memory: Memory, peer: Peer) -> Callable[[], None]:
        """A check that no byte was written since the call, whatever the peer did."""

        def check() -> None:
            before = memory.array.copy()
            peer.resume()
            peer.run("pass")
            np.testing.assert_array_equal(memory.array, before)

        return check

    def test_a_waiting_request_is_not_among_the_ended_ones(
        self, request_of: int, connected: hixl.Hixl, memory: Memory, make_peer: MakePeer
    ) -> None:
        """The oldest request, the only one that is asked for, waits; one with another peer ends."""
        other = make_peer()
        assert connected.connect(other.name, LONG_MS) == hixl.SUCCESS
        _, request = connected.transfer_async(other.name, hixl.WRITE, blocks(memory, other))
        deadline = time.monotonic() + LONG_MS / 1000
        while not (found := connected.get_all_transfer_status(skipping(1))[1]):
            assert time.monotonic() < deadline
        assert [result.req for result in found] == [request]
        (oldest,) = connected.get_all_transfer_status(hixl.GetTransferStatusArgs(1))[1]
        assert (oldest.req, oldest.status) == (request_of, TransferStatus.WAITING)

    def test_finalize_stops_requests(
        self, connected: hixl.Hixl, request_of: int, unchanged: Callable[[], None]
    ) -> None:
        connected.finalize()
        unchanged()
        assert connected.get_transfer_status(request_of) == (hixl.FAILED, TransferStatus.FAILED)

    def test_disconnect_stops_requests(
        self,
        connected: hixl.Hixl,
        memory: Memory,
        peer: Peer,
        request_of: int,
        unchanged: Callable[[], None],
    ) -> None:
        assert connected.disconnect(peer.name, 200) == hixl.TIMEOUT
        assert connected.get_transfer_status(request_of) == (hixl.SUCCESS, TransferStatus.FAILED)
        unchanged()
        moved = blocks(memory, peer)
        assert connected.transfer_sync(peer.name, hixl.READ, moved) == hixl.NOT_CONNECTED
        assert connected.connect(peer.name, LONG_MS) == hixl.SUCCESS
        assert connected.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS

    def test_deregistering_here_stops_requests(
        self,
        connected: hixl.Hixl,
        memory: Memory,
        place: Place,
        peer: Peer,
        request_of: int,
        unchanged: Callable[[], None],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        other = registered(connected, place)
        status, unlike = connected.transfer_async(peer.name, hixl.READ, blocks(other, peer))
        assert status == hixl.SUCCESS
        assert connected.deregister_mem(memory.handle) == hixl.SUCCESS
        with caplog.at_level(logging.WARNING, "kvplan.hixl"):
            told = connected.get_transfer_status(request_of)
        assert told == (hixl.SUCCESS, TransferStatus.FAILED)
        assert f"this engine has unregistered cache {memory.handle} " in caplog.text
        unchanged()
        assert ended(connected, unlike) == (hixl.SUCCESS, TransferStatus.COMPLETED)
        moved = blocks(memory, peer)
        assert connected.transfer_sync(peer.name, hixl.READ, moved) == hixl.PARAM_INVALID
        assert connected.deregister_mem(memory.handle) == hixl.SUCCESS


def test_in_a_forked_child_calls_fail(connected: hixl.Hixl, memory: Memory, peer: Peer) -> None:
    moved = blocks(memory, peer)
    child = os.fork()
    if child == 0:
        status = connected.transfer_sync(peer.name, hixl.READ, moved)
        os._exit(0 if status == hixl.FAILED else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert connected.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS


class SlowToConnect:
    """Connections of an engine that uses all of the time of a call to connect."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.over = 0.0

    def linked_cluster(self, _: str) -> None:
        return None

    def connect(self, _: str, timeout_ms: int) -> None:
        threading.Event().wait(timeout_ms / 1000)
        self.over = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connections, name)


@pytest.mark.over_tcp(only=True)
def test_the_time_to_connect_counts_for_the_transfer(
    make_engine: MakeEngine, place: Place, peer: Peer
) -> None:
    engine = make_engine(AutoConnect="1")
    memory = registered(engine, place)
    assert engine.connect(peer.name, LONG_MS) == hixl.SUCCESS
    peer.stop()  # so that no transfer ends by itself
    running: Any = engine._running
    slow = running.connections = SlowToConnect(running.connections)
    limit_ms, spent = 400, []
    for _ in range(3):
        status = engine.transfer_sync(peer.name, hixl.READ, blocks(memory, peer), limit_ms)
        spent.append(time.monotonic() - slow.over)
        assert status == hixl.TIMEOUT
    assert min(spent) < limit_ms / 2000, "a busy machine holds up some of them, and not each"
