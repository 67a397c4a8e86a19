"""Transfers over TCP between two processes: whatever ends one, no byte moves that should not."""

from __future__ import annotations

import hashlib
import select
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from kvnative._backend import KVN_OK, KVN_PEER_GONE, KVN_TIMEOUT, KVN_UNMAPPED, ThreadPool
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._task import Task
from kvplan.execution.memory import HostMemory
from kvplan.lease import BlockLease, LeaseWord
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.tcp.link import TcpLink, TcpPeerMemory
from kvplan.transport.tcp.transport import TcpTransport
from tests.support.refusals import refused
from tests.transport.owner_process import pattern
from tests.transport.tcp.peer import TIMEOUT_MS, TcpPeer, linked
from tests.transport.tcp.streams import Dialled, Recorded

CONNECTIONS = 3
BLOCK, NUM_BLOCKS = 32 << 10, 512
NBYTES = BLOCK * NUM_BLOCKS
TIMES = 64  # over all of it: long enough to act meanwhile
DIRECTIONS = ["get", "put"]
BOTH = pytest.mark.parametrize("direction", DIRECTIONS)

Bytes = NDArray[np.uint8]


class Owner(TcpPeer):
    """Has an array, registered; and more connections than this process."""

    def __init__(self) -> None:
        super().__init__(CONNECTIONS + 1)
        self.base: int = self.run(
            f"""
            memory = pattern(1, {NBYTES})
            registration = transport.register(memory)
            result = memory.ctypes.data
            """
        )

    def digest(self) -> str:
        return str(self.run("import hashlib; result = hashlib.sha256(memory).hexdigest()"))


@pytest.fixture(
    params=[
        (1, False),
        pytest.param((CONNECTIONS, False), marks=pytest.mark.slow),
        (CONNECTIONS, True),
    ],
    ids=["one connection", "three", "three, encrypted"],
)
def transport(request: pytest.FixtureRequest) -> Iterator[TcpTransport]:
    connections, encrypt = request.param
    with TcpTransport(connections=connections, encrypt=encrypt) as transport:
        yield transport


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


@pytest.fixture
def link(transport: TcpTransport, owner: Owner) -> Iterator[TcpLink]:
    link = owner.link(transport)
    yield link
    link.close()


def whole(link: TcpLink, owner: Owner) -> TcpPeerMemory:
    """As the link was made with: the peer need not answer."""
    return link.memory([owner.base], NBYTES, writable=True)


def executor(remote: TcpPeerMemory, local: Bytes, direction: str) -> Executor:
    memory = HostMemory.from_arrays([local])
    return Executor(remote.backend(ThreadPool(1), "get" if direction == "get" else "put", memory))


def descriptors(
    base: int, local: Bytes, direction: str, order: NDArray[np.int64], times: int = 1
) -> Descriptors:
    """Block order[i] there, and block i here."""
    offsets = np.arange(len(order), dtype=np.uint64) * np.uint64(BLOCK)
    here = np.tile(np.uint64(local.ctypes.data) + offsets, times)
    there = np.tile(np.uint64(base) + order.astype(np.uint64) * np.uint64(BLOCK), times)
    dst, src = (here, there) if direction == "get" else (there, here)
    return Descriptors.from_columns(dst, src, np.full(len(here), BLOCK, np.uint64))


def begun(link: TcpLink, owner: Owner, local: Bytes, direction: str) -> tuple[Executor, Task]:
    """A long transfer, as soon as something of it has moved."""
    moving = executor(whole(link, owner), local, direction)
    work = descriptors(owner.base, local, direction, np.arange(NUM_BLOCKS), TIMES)
    task = moving.submit(work)
    while not task.done and not task.report.bytes_done:
        pass
    assert not task.done
    return moving, task


def check_that_it_works(link: TcpLink, owner: Owner) -> None:
    local = np.zeros(NBYTES, np.uint8)
    with executor(whole(link, owner), local, "get") as moving:
        work = descriptors(owner.base, local, "get", np.arange(NUM_BLOCKS))
        report = moving.run(work, TIMEOUT_MS)
    assert report.status == KVN_OK, report.message
    assert hashlib.sha256(local).hexdigest() == owner.digest()


def test_scattered_blocks_both_ways(link: TcpLink, owner: Owner) -> None:
    order = np.random.default_rng(3).permutation(NUM_BLOCKS)
    local = np.zeros(NBYTES, np.uint8)
    remote = whole(link, owner)
    with executor(remote, local, "get") as moving:
        report = moving.run(descriptors(owner.base, local, "get", order), TIMEOUT_MS)
        assert (report.status, report.bytes_done) == (KVN_OK, NBYTES)
        np.testing.assert_array_equal(
            local.reshape(-1, BLOCK), pattern(1, NBYTES).reshape(-1, BLOCK)[order]
        )
    local[:] = pattern(2, NBYTES)
    with executor(remote, local, "put") as moving:
        report = moving.run(descriptors(owner.base, local, "put", order), TIMEOUT_MS)
        assert (report.status, report.bytes_done) == (KVN_OK, NBYTES)
    expected = np.empty((NUM_BLOCKS, BLOCK), np.uint8)
    expected[order] = local.reshape(-1, BLOCK)
    assert owner.digest() == hashlib.sha256(expected.tobytes()).hexdigest()


def test_both_ends_pull_at_the_same_time(
    transport: TcpTransport, link: TcpLink, owner: Owner
) -> None:
    """Each asks over connections of its own."""
    ours = pattern(5, NBYTES)
    registration = transport.register(ours)
    owner.send(
        f"""
        from kvnative._backend import ThreadPool
        from kvnative._executor import Executor
        from kvnative._lower import Descriptors
        from kvplan.execution.memory import HostMemory
        into = np.zeros({NBYTES}, np.uint8)
        remote = link.memory(
            [{ours.ctypes.data}], {NBYTES}, metadata={transport.metadata([registration])!r})
        backend = remote.backend(ThreadPool(1), "get", HostMemory.from_arrays([into]))
        columns = [
            np.array([it], np.uint64) for it in (into.ctypes.data, {ours.ctypes.data}, {NBYTES})]
        with Executor(backend) as moving:
            statuses = {{moving.run(Descriptors.from_columns(*columns), {TIMEOUT_MS}).status
                         for _ in range(8)}}
        result = [list(statuses), bool((into == pattern(5, {NBYTES})).all())]
        """
    )
    local = np.zeros(NBYTES, np.uint8)
    with executor(whole(link, owner), local, "get") as moving:
        work = descriptors(owner.base, local, "get", np.arange(NUM_BLOCKS))
        for _ in range(8):
            assert moving.run(work, TIMEOUT_MS).status == KVN_OK
    np.testing.assert_array_equal(local, pattern(1, NBYTES))
    assert owner.answer() == [[KVN_OK], True]
    transport.deregister(registration)


def test_large_batches_use_all_connections_and_small_ones_use_one() -> None:
    there, here = pattern(1, NBYTES), np.zeros(NBYTES, np.uint8)
    recorded: list[Recorded] = []

    def dialled(port: int) -> Dialled:
        recorded.append(Recorded(port))
        return recorded[0]

    def passed() -> list[int]:
        """By connection over which the end that has dialled asks."""
        return [len(recorded[0].passed[number]) for number in range(0, 2 * CONNECTIONS, 2)]

    with TcpTransport(connections=CONNECTIONS) as one, TcpTransport(connections=4) as two:
        two.register(there)
        link, _other = linked(one, two, dialled)
        remote = link.memory([there.ctypes.data], NBYTES)
        with executor(remote, here, "get") as moving:
            small = descriptors(there.ctypes.data, here, "get", np.arange(4))
            assert moving.run(small, TIMEOUT_MS).status == KVN_OK
            assert sorted(item > 4 * BLOCK for item in passed()) == [False, False, True]
            large = descriptors(there.ctypes.data, here, "get", np.arange(NUM_BLOCKS))
            assert moving.run(large, TIMEOUT_MS).status == KVN_OK
            assert min(passed()) > NBYTES / (CONNECTIONS + 1)
    np.testing.assert_array_equal(here, there)


class Overheard(Dialled):
    """The handshake was not encrypted."""

    private = False


@pytest.mark.parametrize("demands", [(True, False), (False, True)])
def test_encryption_with_a_secret_that_others_know_is_refused(demands: tuple[bool, bool]) -> None:
    one, two = (TcpTransport(encrypt=demand) for demand in demands)
    with one, two, refused(LLMStatusCode.LLM_LINK_FAILED, r"kvplan\.cluster_key_file"):
        one.connect(two.metadata(), timeout_ms=TIMEOUT_MS, streams=Overheard(0))


@pytest.mark.parametrize("demands", [(False, False), (True, False), (False, True)])
def test_data_is_encrypted_where_either_end_demands_it(demands: tuple[bool, bool]) -> None:
    """What passes is recorded: the memory of neither end is in it, unless nobody demands that."""
    there, here = pattern(1, NBYTES), np.zeros(NBYTES, np.uint8)
    recorded: list[Recorded] = []

    def dialled(port: int) -> Dialled:
        recorded.append(Recorded(port))
        return recorded[0]

    ends = [TcpTransport(connections=2, encrypt=demand) for demand in demands]
    with ends[0] as one, ends[1] as two:
        two.register(there)
        links = linked(one, two, dialled)
        assert [link.way.endswith(", 2 connections, encrypted") for link in links] == [
            any(demands)
        ] * 2
        remote = links[0].memory([there.ctypes.data], NBYTES, writable=True)
        work = there.ctypes.data, here
        for direction, seed in (("get", 1), ("put", 2)):
            with executor(remote, here, direction) as moving:
                report = moving.run(
                    descriptors(*work, direction, np.arange(NUM_BLOCKS)), TIMEOUT_MS
                )
                assert report.status == KVN_OK, report.message
            np.testing.assert_array_equal(here, there)
            np.testing.assert_array_equal(there, pattern(seed, NBYTES))
            here[:] = pattern(2, NBYTES)
    passed = b"".join(recorded[0].passed.values())
    assert len(passed) > 2 * NBYTES
    for seed in (1, 2):
        blocks = pattern(seed, NBYTES).reshape(-1, BLOCK)
        clear = [bytes(block[100:164]) in passed for block in blocks[::64]]
        assert clear == [not any(demands)] * len(clear)


def test_registrations_before_and_after_the_service_starts_are_reached() -> None:
    with TcpTransport(connections=1) as one, TcpTransport(connections=1) as two:
        memories = [pattern(number, BLOCK) for number in range(4)]
        early, gone = two.register(memories[0]), two.register(memories[1])
        two.deregister(gone)
        linked(one, two)
        late = two.register(memories[2])
        link, _ = linked(one, two)
        latest = two.register(memories[3])
        local = np.zeros(BLOCK, np.uint8)
        for item, seed in ((early, 0), (late, 2), (latest, 3)):
            remote = link.memory([item.address], item.nbytes, metadata=two.metadata([item]))
            with executor(remote, local, "get") as moving:
                work = descriptors(item.address, local, "get", np.arange(1))
                assert moving.run(work, TIMEOUT_MS).status == KVN_OK
            np.testing.assert_array_equal(local, pattern(seed, BLOCK))
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "is not inside one range"):
            link.memory([gone.address], BLOCK, metadata=two.metadata([early]))


def test_memory_that_must_not_be_written(transport: TcpTransport) -> None:
    memory = pattern(1, BLOCK)
    with TcpTransport(connections=1) as two:
        two.register(memory, writable=False)
        link, _ = linked(transport, two)
        with refused(LLMStatusCode.LLM_PARAM_INVALID, "with writable=False"):
            link.memory([memory.ctypes.data], BLOCK, writable=True)


def test_a_device_that_the_transport_was_not_made_with(link: TcpLink, owner: Owner) -> None:
    device = SimpleNamespace(on_device=True)
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, r"has no device: .*Placement\.HOST"):
        whole(link, owner).backend(ThreadPool(1), "get", device)


@BOTH
def test_the_peer_is_killed(link: TcpLink, owner: Owner, direction: str) -> None:
    local = pattern(2, NBYTES)
    moving, task = begun(link, owner, local, direction)
    owner.kill()
    report = task.wait(TIMEOUT_MS)
    moving.close()
    assert report.status == KVN_PEER_GONE, report.message
    assert report.unconfirmed
    assert link.death_fd is not None
    assert select.select([link.death_fd], [], [], 10)[0]
    with refused(LLMStatusCode.LLM_LINK_FAILED):
        link.check()


@BOTH
def test_the_memory_is_deregistered(link: TcpLink, owner: Owner, direction: str) -> None:
    """When that returns nothing is read or written there by any connection."""
    local = pattern(2, NBYTES)
    moving, task = begun(link, owner, local, direction)
    owner.run("transport.deregister(registration); memory[:] = 77")
    report = task.wait(TIMEOUT_MS)
    moving.close()
    assert report.status == KVN_UNMAPPED, report.message
    if direction == "put":
        assert owner.run("result = bool((memory == 77).all())")
    else:
        # Of what was promised before zeros take the place.
        possible = (local == pattern(1, NBYTES)) | (local == pattern(2, NBYTES)) | (local == 0)
        assert possible.all()
    link.check()


@BOTH
def test_the_peer_closes_its_transport(link: TcpLink, owner: Owner, direction: str) -> None:
    local = pattern(2, NBYTES)
    moving, task = begun(link, owner, local, direction)
    owner.run("transport.close(); memory[:] = 77")
    report = task.wait(TIMEOUT_MS)
    moving.close()
    assert report.status == KVN_PEER_GONE, report.message
    assert owner.run("result = bool((memory == 77).all())")


@BOTH
def test_the_link_is_closed_here(link: TcpLink, owner: Owner, direction: str) -> None:
    local = pattern(2, NBYTES)
    moving, task = begun(link, owner, local, direction)
    link.close(LLMException("unlinked", status_code=LLMStatusCode.LLM_NOT_YET_LINK))
    report = task.wait(TIMEOUT_MS)
    moving.close()
    assert report.status == KVN_PEER_GONE
    assert "unlinked" in report.message


@BOTH
def test_the_peer_stops_until_the_deadline(link: TcpLink, owner: Owner, direction: str) -> None:
    local = pattern(2, NBYTES)
    owner.stop()
    began = time.monotonic()
    with executor(whole(link, owner), local, direction) as moving:
        work = descriptors(owner.base, local, direction, np.arange(NUM_BLOCKS), TIMES)
        report = moving.run(work, 100)
    assert time.monotonic() - began < 15
    assert report.status == KVN_TIMEOUT, report.message
    local[:] = 9  # is not sent any more, nor written
    owner.resume()
    assert owner.run("result = bool((memory == 9).any())") is bool((pattern(1, NBYTES) == 9).any())
    assert (local == 9).all()


@BOTH
def test_a_descriptor_that_is_nowhere(link: TcpLink, owner: Owner, direction: str) -> None:
    local = np.zeros(NBYTES, np.uint8)
    order = np.arange(NUM_BLOCKS)
    order[-1] = NUM_BLOCKS
    with executor(whole(link, owner), local, direction) as moving:
        report = moving.run(descriptors(owner.base, local, direction, order), TIMEOUT_MS)
    assert report.status == KVN_UNMAPPED, report.message
    check_that_it_works(link, owner)


def test_all_threads_that_deregister_it_wait(transport: TcpTransport, owner: Owner) -> None:
    """Whoever of them returns, nothing of it is in flight any more."""
    memory = pattern(7, NBYTES)
    registration = transport.register(memory)
    link = owner.link(transport)
    owner.send(
        f"""
        import os, signal
        from kvnative._backend import ThreadPool
        from kvnative._executor import Executor
        from kvnative._lower import Descriptors
        from kvplan.execution.memory import HostMemory
        into = np.zeros({NBYTES}, np.uint8)
        remote = link.memory(
            [{memory.ctypes.data}], {NBYTES}, metadata={transport.metadata([registration])!r})
        moving = Executor(remote.backend(ThreadPool(1), "get", HostMemory.from_arrays([into])))
        columns = [
            np.array([it], np.uint64) for it in (into.ctypes.data, {memory.ctypes.data}, {NBYTES})]
        task = moving.submit(Descriptors.from_columns(*columns))
        while not task.done and not into[::4096].any():
            pass
        os.kill(os.getpid(), signal.SIGSTOP)
        status = task.wait({TIMEOUT_MS}).status
        result = [status, bool((into == pattern(7, {NBYTES})).all())]
        """
    )
    owner.wait_until_stopped()
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(transport.deregister, registration) for _ in range(3)]
        wait(calls, return_when=FIRST_COMPLETED)
        memory[:] = 0  # what was sent before is what was there
    assert [call.exception() for call in calls] == [None] * 3
    owner.resume()
    status, has_all = owner.answer()
    assert status != KVN_OK or has_all
    link.close()


def test_many_register_and_deregister_while_others_pull(
    transport: TcpTransport, link: TcpLink, owner: Owner
) -> None:
    """Of a range that is taken again at the same slot nothing is pulled for the one before."""
    owner.run(
        """
        stop = threading.Event()
        other = np.full(1 << 16, 99, np.uint8)
        def churn():
            while not stop.is_set():
                transport.deregister(transport.register(other))
        churning = [threading.Thread(target=churn) for _ in range(2)]
        for it in churning: it.start()
        """
    )
    stale = owner.run(
        """
        gone = transport.register(other)
        result = [other.ctypes.data, transport.metadata([gone])]
        transport.deregister(gone)
        """
    )
    local = np.zeros(BLOCK, np.uint8)
    remote = link.memory([stale[0]], BLOCK, metadata=stale[1])
    with executor(remote, local, "get") as moving:
        for _ in range(200):
            report = moving.run(descriptors(stale[0], local, "get", np.arange(1)), TIMEOUT_MS)
            assert report.status == KVN_UNMAPPED, report.message
    assert not local.any()
    owner.run("stop.set(); [it.join() for it in churning]")
    check_that_it_works(link, owner)


def test_several_threads_use_one_link(link: TcpLink, owner: Owner) -> None:
    remote, failed = whole(link, owner), []

    def pull(seed: int) -> None:
        local = np.zeros(NBYTES // 4, np.uint8)
        order = np.random.default_rng(seed).permutation(NUM_BLOCKS)[: NUM_BLOCKS // 4]
        with executor(remote, local, "get") as moving:
            for _ in range(4):
                report = moving.run(descriptors(owner.base, local, "get", order), TIMEOUT_MS)
                right = pattern(1, NBYTES).reshape(-1, BLOCK)[order]
                if report.status != KVN_OK or not (local.reshape(-1, BLOCK) == right).all():
                    failed.append(report)
                local[:] = 0

    threads = [threading.Thread(target=pull, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@BOTH
def test_memory_with_a_lease_shares_nothing_with_the_same_memory_without(direction: str) -> None:
    with TcpTransport() as one, TcpTransport() as two:
        there, here = pattern(1, BLOCK), np.zeros(BLOCK, np.uint8)
        two.register(there)
        link, _other = linked(one, two)
        plain = link.memory([there.ctypes.data], BLOCK, writable=True)
        work = descriptors(there.ctypes.data, here, direction, np.arange(1))
        word = LeaseWord("tcp", *two.begin_lease())
        lease = BlockLease(1, bytes(16), 1, 1, (0,), paged=True, tag="", words=(word,))

        def statuses() -> list[int]:
            found = []
            for memory in (plain, plain.leased([lease])):
                with executor(memory, here, direction) as moving:
                    found.append(moving.run(work, TIMEOUT_MS).status)
            return found

        assert statuses() == [KVN_OK, KVN_OK]
        two.end_leases([(word.slot, word.generation)])
        assert statuses() == [KVN_OK, KVN_UNMAPPED]


@pytest.mark.parametrize("is_linked", [False, True], ids=["before the link", "linked"])
def test_a_lease_has_its_deadline_whenever_it_was_made(is_linked: bool) -> None:
    """Also where it was renewed before the threads that serve peers began."""
    passed_ns, later_ns = 1, time.monotonic_ns() + 3_600 * 10**9
    with TcpTransport() as one, TcpTransport() as two:
        there, here = pattern(1, BLOCK), np.zeros(BLOCK, np.uint8)
        two.register(there)
        link = linked(one, two) if is_linked else None
        words = {
            name: LeaseWord("tcp", *two.begin_lease(deadline_ns))
            for name, deadline_ns in (
                *(("late", passed_ns), ("later", later_ns), ("forever", 0)),
                *(("prolonged", passed_ns + 1), ("shortened", later_ns)),
            )
        }
        for name, deadline_ns in (("prolonged", later_ns), ("shortened", passed_ns)):
            two.renew_lease(words[name].slot, words[name].generation, deadline_ns)
        link = link or linked(one, two)
        plain = link[0].memory([there.ctypes.data], BLOCK)
        work = descriptors(there.ctypes.data, here, "get", np.arange(1))
        found = {}
        for name, word in words.items():
            lease = BlockLease(1, bytes(16), 1, 1, (0,), paged=True, tag="", words=(word,))
            with executor(plain.leased([lease]), here, "get") as moving:
                found[name] = moving.run(work, TIMEOUT_MS).status
        ended = {"late", "shortened"}
        assert found == {name: KVN_UNMAPPED if name in ended else KVN_OK for name in words}


@BOTH
@pytest.mark.parametrize("ended", [0, 1, 2])
def test_each_of_overlapping_registrations_is_checked(direction: str, ended: int) -> None:
    """Whichever bytes move: two ranges begin in the first, which ends last."""
    with TcpTransport() as one, TcpTransport() as two:
        there, here = pattern(1, 4 * BLOCK), np.zeros(BLOCK, np.uint8)
        pieces = there, there[BLOCK : 2 * BLOCK], there[3 * BLOCK :]
        held = [two.register(piece) for piece in pieces]
        link, _other = linked(one, two)
        addresses = [piece.ctypes.data for piece in pieces]
        memory = link.memory(
            addresses, [piece.nbytes for piece in pieces], writable=True,
            metadata=[two.metadata([registration]) for registration in held],
        )  # fmt: skip
        work = descriptors(addresses[0], here, direction, np.arange(1))
        with executor(memory, here, direction) as moving:
            assert moving.run(work, TIMEOUT_MS).status == KVN_OK
            two.deregister(held[ended])
            assert moving.run(work, TIMEOUT_MS).status == KVN_UNMAPPED
