"""Links of several lanes, between two processes: what is large goes by all of them."""

from __future__ import annotations

import hashlib
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvnative._executor import (
    KVN_OK,
    KVN_PEER_GONE,
    KVN_TIMEOUT,
    KVN_UNMAPPED,
    Executor,
    Report,
    ThreadPool,
)
from kvnative._lower import Descriptors
from kvplan.execution.memory import HostMemory
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.ucx.link import UcxLink
from kvplan.transport.ucx.memory import UcxPeerMemory
from kvplan.transport.ucx.modes import MAX_LANES
from kvplan.transport.ucx.transport import UcxTransport
from tests.transport.owner import Owner
from tests.transport.owner_process import pattern

pytestmark = pytest.mark.usefixtures("ucx")

LANES, MORE, MANY, MOST = 3, 4, 8, MAX_LANES
BLOCK, NUM_BLOCKS = 32 << 10, 512
NBYTES = BLOCK * NUM_BLOCKS
TIMEOUT_MS = 20_000
FAREWELL_S = 0.2  # what an end waits for peers to be told that it closes
TIMES = 64  # over all of it: long enough to act meanwhile
SESSION = b"of lanes"
DIRECTIONS = ["get", "put"]

Bytes = NDArray[np.uint8]


class LanesOwner(Owner):
    """Has an array, registered; and one lane more than this process."""

    script = Path(__file__).with_name("lanes_process.py")

    def __init__(self, lanes: int) -> None:
        super().__init__(arguments=[str(lanes)])
        self.base: int = self.run(
            f"""
            memory = pattern(1, {NBYTES})
            registration = transport.register(memory)
            result = memory.ctypes.data
            """
        )

    def link(self, transport: UcxTransport, *, knows_address: bool = True) -> UcxLink:
        if knows_address:
            self.run("transport.ready()")
        else:
            transport.ready()
        theirs = self.metadata()
        self.run(
            f"""
            def connect():
                global link
                link = transport.connect(
                    {transport.metadata(())!r}, timeout_ms={TIMEOUT_MS}, session={SESSION!r})
            connecting = threading.Thread(target=connect)
            connecting.start()
            """
        )
        link = transport.connect(theirs, timeout_ms=TIMEOUT_MS, session=SESSION)
        self.run("connecting.join()")
        return link


@pytest.fixture
def transport(ucx: object) -> Iterator[UcxTransport]:
    with UcxTransport(mode="gathered", devices="lo", lanes=LANES) as transport:
        yield transport


@pytest.fixture
def owner(ucx: object) -> Iterator[LanesOwner]:
    owner = LanesOwner(MORE)
    yield owner
    owner.close()


@pytest.fixture
def link(transport: UcxTransport, owner: LanesOwner) -> Iterator[UcxLink]:
    with owner.link(transport) as link:
        yield link


def whole(link: UcxLink, owner: LanesOwner) -> UcxPeerMemory:
    return link.memory([owner.base], NBYTES, writable=True, metadata=owner.metadata())


def executor(remote: UcxPeerMemory, local: Bytes, direction: str) -> Executor:
    memory = HostMemory.from_arrays([local])
    return Executor(remote.backend(ThreadPool(1), "get" if direction == "get" else "put", memory))


def descriptors(
    owner: LanesOwner, local: Bytes, direction: str, order: NDArray[np.int64], times: int = 1
) -> Descriptors:
    """Block order[i] there, and block i here."""
    offsets = np.arange(len(order), dtype=np.uint64) * np.uint64(BLOCK)
    here = np.tile(np.uint64(local.ctypes.data) + offsets, times)
    there = np.tile(np.uint64(owner.base) + order.astype(np.uint64) * np.uint64(BLOCK), times)
    dst, src = (here, there) if direction == "get" else (there, here)
    return Descriptors.from_columns(dst, src, np.full(len(here), BLOCK, np.uint64))


def begun(
    link: UcxLink, owner: LanesOwner, local: Bytes, direction: str
) -> tuple[Executor, object]:
    """A long transfer, as soon as something of it has moved."""
    order = np.arange(NUM_BLOCKS)
    moving = executor(whole(link, owner), local, direction)
    task = moving.submit(descriptors(owner, local, direction, order, TIMES))
    while not task.done and not task.report.bytes_done:
        pass
    assert not task.done
    return moving, task


@pytest.mark.parametrize("knows_address", [True, False], ids=["they are ready", "we are"])
def test_both_ways(transport: UcxTransport, owner: LanesOwner, knows_address: bool) -> None:
    link = owner.link(transport, knows_address=knows_address)
    order = np.random.default_rng(3).permutation(NUM_BLOCKS)
    local = np.zeros(NBYTES, np.uint8)
    remote = whole(link, owner)
    with executor(remote, local, "get") as moving:
        report = moving.run(descriptors(owner, local, "get", order), TIMEOUT_MS)
        assert (report.status, report.bytes_done) == (KVN_OK, NBYTES)
        np.testing.assert_array_equal(
            local.reshape(-1, BLOCK), pattern(1, NBYTES).reshape(-1, BLOCK)[order]
        )
    local[:] = pattern(2, NBYTES)
    with executor(remote, local, "put") as moving:
        assert moving.run(descriptors(owner, local, "put", order), TIMEOUT_MS).status == KVN_OK
    expected = np.empty((NUM_BLOCKS, BLOCK), np.uint8)
    expected[order] = local.reshape(-1, BLOCK)
    there = owner.run("import hashlib; result = hashlib.sha256(memory).hexdigest()")
    assert there == hashlib.sha256(expected.tobytes()).hexdigest()
    assert link.way == f"gathered over tcp/lo, {LANES} lanes"
    link.close()


def test_what_is_small_goes_by_one(link: UcxLink, owner: LanesOwner) -> None:
    local = np.zeros(4 * BLOCK, np.uint8)
    with executor(whole(link, owner), local, "get") as moving:
        moving.run(descriptors(owner, local, "get", np.arange(4)), TIMEOUT_MS)
    np.testing.assert_array_equal(local, pattern(1, NBYTES)[: 4 * BLOCK])
    assert owner.run("result = [it.counters['parts'] > 0 for it in transport._ends.natives]") == [
        True,
        *[False] * (MORE - 1),
    ]


def test_all_lanes_of_the_end_with_fewer_are_used(link: UcxLink, owner: LanesOwner) -> None:
    local = np.zeros(NBYTES, np.uint8)
    with executor(whole(link, owner), local, "get") as moving:
        moving.run(descriptors(owner, local, "get", np.arange(NUM_BLOCKS)), TIMEOUT_MS)
    sent = owner.run("result = [it.counters['pulled_nbytes'] for it in transport._ends.natives]")
    assert sum(sent) == NBYTES
    assert sent[LANES:] == [0] * (MORE - LANES)
    assert min(sent[:LANES]) >= NBYTES // LANES - BLOCK


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_peer_is_killed(link: UcxLink, owner: LanesOwner, direction: str) -> None:
    local = pattern(2, NBYTES)
    moving, task = begun(link, owner, local, direction)
    owner.kill()
    report = task.wait(TIMEOUT_MS)
    moving.close()
    assert report.status == KVN_PEER_GONE, report.message
    assert report.unconfirmed
    assert link.death_fd is not None
    assert select.select([link.death_fd], [], [], 10)[0]
    with pytest.raises(LLMException) as caught:
        link.check()
    assert caught.value.status_code is LLMStatusCode.LLM_LINK_FAILED


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_memory_is_deregistered(link: UcxLink, owner: LanesOwner, direction: str) -> None:
    """When that returns nothing is read or written by any lane."""
    local = pattern(2, NBYTES)
    moving, task = begun(link, owner, local, direction)
    owner.run("transport.deregister(registration); memory[:] = 77")
    report = task.wait(TIMEOUT_MS)
    moving.close()
    assert report.status == KVN_UNMAPPED, report.message
    if direction == "put":
        assert owner.run("result = bool((memory == 77).all())")
    else:
        assert ((local == pattern(1, NBYTES)) | (local == pattern(2, NBYTES))).all()
    link.check()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_peer_stops_until_the_deadline(ucx: object, direction: str) -> None:
    """All lanes are given up at the same time: a push takes half a second for that."""
    local = pattern(2, NBYTES)
    with UcxTransport(mode="gathered", devices="lo", lanes=MANY) as transport:
        owner = LanesOwner(MANY)
        link = owner.link(transport)
        owner.stop()
        began = time.monotonic()
        with executor(whole_of(link, owner), local, direction) as moving:
            work = descriptors(owner, local, direction, np.arange(NUM_BLOCKS), TIMES)
            report = moving.run(work, 100)
        assert time.monotonic() - began < 0.1 + MANY * 0.5 / 2
        assert report.status == KVN_TIMEOUT, report.message
        assert report.message.startswith("the deadline passed: ")
        owner.resume()
        if direction == "get":
            check_that_it_works(link, owner)
        owner.close()


def test_closing_while_the_peer_stops(ucx: object) -> None:
    """All ends wait at the same time: one after another would take MOST times as long."""
    with UcxTransport(mode="gathered", devices="lo", lanes=MOST) as transport:
        owner = LanesOwner(MOST)
        link = owner.link(transport)
        local = pattern(2, NBYTES)
        owner.stop()
        moving = executor(whole_of(link, owner), local, "put")
        task = moving.submit(descriptors(owner, local, "put", np.arange(NUM_BLOCKS), TIMES))
        began = time.monotonic()
        transport.close()
        took = time.monotonic() - began
        assert FAREWELL_S <= took < MOST * FAREWELL_S / 2
        assert task.wait(TIMEOUT_MS).status == KVN_PEER_GONE
        moving.close()
        owner.resume()
        owner.close()


def test_a_lane_is_lost(link: UcxLink, owner: LanesOwner) -> None:
    """It takes the link with it, as the transfer cannot go on."""
    local = np.zeros(NBYTES, np.uint8)
    moving, task = begun(link, owner, local, "get")
    for it in tcp_sockets():  # until it is one that the transfer needs
        it.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + 0.1
        while not task.done and time.monotonic() < until:
            pass
        if task.done:
            break
    assert task.report.status == KVN_PEER_GONE, task.report.message
    moving.close()
    assert link.death_fd is not None
    assert select.select([link.death_fd], [], [], 10)[0]
    with pytest.raises(LLMException) as caught:
        link.check()
    assert caught.value.status_code is LLMStatusCode.LLM_LINK_FAILED


def tcp_sockets() -> Iterator[socket.socket]:
    """Copies of this process's connections, which are UCX's."""
    for file in list(Path("/proc/self/fd").iterdir()):
        with ExitStack() as held:
            if not file.is_socket():
                continue
            it = held.enter_context(socket.socket(fileno=os.dup(int(file.name))))
            if it.family != socket.AF_INET:
                continue
            with suppress(OSError):
                it.getpeername()  # a listener has none
                yield it


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_descriptor_that_is_nowhere(link: UcxLink, owner: LanesOwner, direction: str) -> None:
    """It is in the last stripe: those before it are given up."""
    local = np.zeros(NBYTES, np.uint8)
    order = np.arange(NUM_BLOCKS)
    order[-1] = NUM_BLOCKS
    with executor(whole(link, owner), local, direction) as moving:
        report = moving.run(descriptors(owner, local, direction, order), TIMEOUT_MS)
    assert (report.status, report.failed) == (KVN_UNMAPPED, NUM_BLOCKS - 1)
    assert report.unconfirmed == ((0, NUM_BLOCKS),)
    if direction == "get":
        check_that_it_works(link, owner)


def test_too_few_descriptors_are_left(transport: UcxTransport, owner: LanesOwner) -> None:
    """Now: later there may be enough."""
    said = owner.run(
        """
        import os, resource
        from kvplan.status import LLMException
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        result = []
        for left in (0, 10, 20, 40, 60):
            used = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + left, hard))
            try:
                transport.ready()
            except LLMException as error:
                result.append((error.status_code.name, str(error)))
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        """
    )
    assert {status for status, _ in said} == {"LLM_LINK_FAILED"}
    assert all("raise the limit (ulimit -n)" in text for _, text in said)
    with owner.link(transport) as link:
        check_that_it_works(link, owner)


def whole_of(link: UcxLink, owner: LanesOwner) -> UcxPeerMemory:
    """As `whole`, with what the link was made with: the peer need not answer."""
    return link.memory([owner.base], NBYTES, writable=True)


def check_that_it_works(link: UcxLink, owner: LanesOwner) -> Report:
    local = np.zeros(NBYTES, np.uint8)
    with executor(whole_of(link, owner), local, "get") as moving:
        report = moving.run(descriptors(owner, local, "get", np.arange(NUM_BLOCKS)), TIMEOUT_MS)
    assert report.status == KVN_OK, report.message
    np.testing.assert_array_equal(local, pattern(1, NBYTES))
    return report


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_closing(transport: UcxTransport, owner: LanesOwner) -> None:
    """All lanes end, and the peer is told by each."""
    transport.ready()
    for count in range(3):
        link = owner.link(transport)
        check_that_it_works(link, owner)
        if count == 0:  # UCX keeps some from the first one on
            held = num_files()
        link.close()
        assert link.death_fd is None
        owner.run(
            """
            import select
            assert select.select([link.death_fd], [], [], 10)[0]
            assert link.closed_by_peer
            link.close()
            """
        )
        assert num_files() < held - LANES


def test_how_many_there_can_be() -> None:
    for lanes in (0, 17):
        with pytest.raises(LLMException, match=rf"lanes={lanes} is out of range \[1, 16\]"):
            UcxTransport(mode="gathered", lanes=lanes)
    with UcxTransport(mode="one_sided", lanes=4) as transport:
        assert transport.lanes == 1
