"""Calls of several threads at once, and memory that is registered again between calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvplan import hixl
from kvplan.hixl import TransferOp, TransferOpDesc, TransferStatus
from tests.hixl.conftest import MakeEngine
from tests.hixl.peer import Peer
from tests.hixl.places import Memory, Place, free_name, pattern, registered
from tests.hixl.test_faults import ended

LONG_MS = 30_000
BLOCK = 4096
pytestmark = pytest.mark.over_tcp


@pytest.fixture
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching_often")
def test_deregistering_while_others_transfer(
    connected: hixl.Hixl, memory: Memory, peer: Peer, place: Place
) -> None:
    stop = threading.Event()
    wrong: list[object] = []

    def move(number: int) -> None:
        at = number * BLOCK
        one = [TransferOpDesc(memory.address + at, peer.address + at, BLOCK)]
        while not stop.is_set():
            if status := connected.transfer_sync(peer.name, hixl.READ, one, LONG_MS):
                wrong.append(status)

    threads = [threading.Thread(target=move, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(500):
            other = registered(connected, place, BLOCK)
            assert connected.deregister_mem(other.handle) == hixl.SUCCESS
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.usefixtures("switching_often")
def test_requests_have_stopped_when_their_memory_is_deregistered(
    connected: hixl.Hixl, peer: Peer, place: Place
) -> None:
    stop = threading.Event()
    array, address = place.zeros()
    desc = hixl.MemDesc(address, len(array))
    moved = [
        TransferOpDesc(address + 2 * i * BLOCK, peer.address + i * BLOCK, BLOCK) for i in range(64)
    ]

    def submit() -> None:
        while not stop.is_set():
            connected.transfer_async(peer.name, hixl.READ, moved)
            connected.get_all_transfer_status(hixl.GetTransferStatusArgs(skip_waiting=True))

    threads = [threading.Thread(target=submit) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            status, handle = connected.register_mem(desc, place.mem_type)
            assert status == hixl.SUCCESS
            assert connected.deregister_mem(handle) == hixl.SUCCESS
            array[:] = 7
            assert (array == 7).all()  # no thread writes there any more
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert (array == 7).all()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_byte_moves_after_a_disconnect_from_a_peer_that_keeps_the_link(
    make_engine: MakeEngine,
    peer: Peer,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool,
) -> None:
    """Another thread has found the connection, but has not begun its transfer."""
    own = free_name()
    engine = make_engine(own)
    memory, datadist = registered(engine, place), engine.datadist
    assert engine.connect(peer.name, LONG_MS) == hixl.SUCCESS
    assert peer.run("result = engine.connect(name, 10_000)", name=own) == hixl.SUCCESS
    one = [TransferOpDesc(memory.address, peer.address, BLOCK)]
    peer.fill(5)
    found, goes_on = threading.Event(), threading.Event()

    def held(verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found.set()
            assert goes_on.wait(LONG_MS / 1000)
            return verb(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for verb in ("run", "submit"):
            patch.setattr(datadist, verb, held(getattr(datadist, verb)))
        with ThreadPoolExecutor(2) as threads:
            if asynchronous:
                moving = threads.submit(engine.transfer_async, peer.name, hixl.READ, one)
            else:
                moving = threads.submit(engine.transfer_sync, peer.name, hixl.READ, one, LONG_MS)
            assert found.wait(LONG_MS / 1000)
            early = engine.disconnect(peer.name, 50)
            ending = threads.submit(engine.disconnect, peer.name, LONG_MS)
            goes_on.set()
            assert early == hixl.TIMEOUT  # the peer is still connected
            assert ending.result() == hixl.SUCCESS
            memory.array[:] = 7
            moving.result()
    assert (memory.array == 7).all()
    assert engine.transfer_sync(peer.name, hixl.READ, one, LONG_MS) == hixl.NOT_CONNECTED
    assert peer.run("result = engine.disconnect(name, 10_000)", name=own) == hixl.SUCCESS


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("op", [hixl.READ, hixl.WRITE])
def test_memory_that_the_peer_has_registered_again_is_moved(
    connected: hixl.Hixl,
    memory: Memory,
    peer: Peer,
    place: Place,
    op: TransferOp,
    used_before: bool,
    asynchronous: bool,
) -> None:
    """A new registration covers the range, which the engine knew by an earlier one."""
    if asynchronous and place.name == "tcp":
        pytest.skip("docs/how-to/hixl.md: such a request may be FAILED: the peer is not asked")
    more = peer.run(
        """
        more = registered(engine, place, len(memory.array))
        result = more.address
        """
    )
    first = more if used_before else peer.address
    one = [TransferOpDesc(memory.address, first, BLOCK)]
    assert connected.transfer_sync(peer.name, op, one, LONG_MS) == hixl.SUCCESS
    if not used_before:  # known from the peer's answer, but never reached
        nothing = [TransferOpDesc(memory.address, 4096, BLOCK)]
        assert connected.transfer_sync(peer.name, op, nothing, LONG_MS) == hixl.PARAM_INVALID
    peer.run(
        """
        assert engine.deregister_mem(more.handle) == hixl.SUCCESS
        more.array[:] = pattern(len(more.array), 5)
        desc = hixl.MemDesc(more.address, len(more.array) // 2)
        assert engine.register_mem(desc, place.mem_type)[0] == hixl.SUCCESS
        """
    )
    moved = [TransferOpDesc(memory.address, more, BLOCK)]
    if asynchronous:
        status, request = connected.transfer_async(peer.name, op, moved)
        assert status == hixl.SUCCESS
        assert ended(connected, request) == (hixl.SUCCESS, TransferStatus.COMPLETED)
    else:
        assert connected.transfer_sync(peer.name, op, moved, LONG_MS) == hixl.SUCCESS
    if op is hixl.READ:
        assert (memory.array[:BLOCK] == pattern(seed=5)[:BLOCK]).all()
