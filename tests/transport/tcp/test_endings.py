"""Events that end a transfer over TCP: memory that is not offered any more stays untouched."""

from __future__ import annotations

import select
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from types import SimpleNamespace

import numpy as np
import pytest

from kvnative._backend import KVN_OK, KVN_PEER_GONE, KVN_TIMEOUT, KVN_UNMAPPED
from kvnative._executor import Executor
from kvnative._task import Task
from kvplan.lease import BlockLease, LeaseWord
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.tcp.link import TcpLink
from kvplan.transport.tcp.transport import TcpTransport
from tests.support.refusals import refused
from tests.transport.owner_process import pattern
from tests.transport.tcp.owner import (
    BLOCK,
    BOTH,
    NBYTES,
    NUM_BLOCKS,
    Bytes,
    Owner,
    check_that_blocks_arrive,
    descriptors,
    executor,
    whole,
)
from tests.transport.tcp.peer import TIMEOUT_MS, linked

TIMES = 64  # transfers of the whole array: enough time to act meanwhile


def begun(link: TcpLink, owner: Owner, local: Bytes, direction: str) -> tuple[Executor, Task]:
    """Return a long transfer as soon as its first bytes have moved."""
    moving = executor(whole(link, owner), local, direction)
    work = descriptors(owner.base, local, direction, np.arange(NUM_BLOCKS), TIMES)
    task = moving.submit(work)
    while not task.done and not task.report.bytes_done:
        pass
    assert not task.done
    return moving, task


def test_descriptor_zero_is_a_death_fd_like_any_other(
    link: TcpLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may have closed its standard input."""
    with monkeypatch.context() as zero:
        zero.setattr(link, "native", SimpleNamespace(death_fd=0, failure=None))
        assert link.death_fd == 0
        link.check()


@BOTH
def test_a_killed_peer_ends_the_transfer(link: TcpLink, owner: Owner, direction: str) -> None:
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
def test_no_byte_moves_after_the_memory_is_deregistered(
    link: TcpLink, owner: Owner, direction: str
) -> None:
    """After the deregistration returns, no connection reads or writes the range."""
    local = pattern(2, NBYTES)
    moving, task = begun(link, owner, local, direction)
    owner.run("transport.deregister(registration); memory[:] = 77")
    report = task.wait(TIMEOUT_MS)
    moving.close()
    assert report.status == KVN_UNMAPPED, report.message
    if direction == "put":
        assert owner.run("result = bool((memory == 77).all())")
    else:
        # Blocks that were validated before zeros take their place.
        possible = (local == pattern(1, NBYTES)) | (local == pattern(2, NBYTES)) | (local == 0)
        assert possible.all()
    link.check()


@BOTH
def test_a_peer_that_closes_its_transport_ends_the_transfer(
    link: TcpLink, owner: Owner, direction: str
) -> None:
    local = pattern(2, NBYTES)
    moving, task = begun(link, owner, local, direction)
    owner.run("transport.close(); memory[:] = 77")
    report = task.wait(TIMEOUT_MS)
    moving.close()
    assert report.status == KVN_PEER_GONE, report.message
    assert owner.run("result = bool((memory == 77).all())")


@BOTH
def test_closing_the_link_ends_the_transfer(link: TcpLink, owner: Owner, direction: str) -> None:
    local = pattern(2, NBYTES)
    moving, task = begun(link, owner, local, direction)
    link.close(LLMException("unlinked", status_code=LLMStatusCode.LLM_NOT_YET_LINK))
    report = task.wait(TIMEOUT_MS)
    moving.close()
    assert report.status == KVN_PEER_GONE
    assert "unlinked" in report.message


@BOTH
def test_a_transfer_with_a_stopped_peer_ends_at_the_deadline(
    link: TcpLink, owner: Owner, direction: str
) -> None:
    local = pattern(2, NBYTES)
    owner.stop()
    began = time.monotonic()
    with executor(whole(link, owner), local, direction) as moving:
        work = descriptors(owner.base, local, direction, np.arange(NUM_BLOCKS), TIMES)
        report = moving.run(work, 100)
    assert time.monotonic() - began < 15
    assert report.status == KVN_TIMEOUT, report.message
    local[:] = 9  # is not sent or written any more
    owner.resume()
    assert owner.run("result = bool((memory == 9).any())") is bool((pattern(1, NBYTES) == 9).any())
    assert (local == 9).all()


@BOTH
def test_a_descriptor_outside_of_all_ranges_is_refused(
    link: TcpLink, owner: Owner, direction: str
) -> None:
    local = np.zeros(NBYTES, np.uint8)
    order = np.arange(NUM_BLOCKS)
    order[-1] = NUM_BLOCKS
    with executor(whole(link, owner), local, direction) as moving:
        report = moving.run(descriptors(owner.base, local, direction, order), TIMEOUT_MS)
    assert report.status == KVN_UNMAPPED, report.message
    check_that_blocks_arrive(link, owner)


def test_all_threads_that_deregister_a_range_wait(transport: TcpTransport, owner: Owner) -> None:
    """No byte of the range is in flight after any of the threads returns."""
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
        host = HostMemory.from_arrays([into])
        moving = Executor(remote.backend(ThreadPool(1), "get", host, None))
        columns = [
            np.array([value], np.uint64)
            for value in (into.ctypes.data, {memory.ctypes.data}, {NBYTES})]
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
        memory[:] = 0  # a transfer that succeeds has read the content before this
    assert [call.exception() for call in calls] == [None] * 3
    owner.resume()
    status, has_all = owner.answer()
    assert status != KVN_OK or has_all
    link.close()


def test_pulls_by_a_stale_registration_fail_while_others_register(
    transport: TcpTransport, link: TcpLink, owner: Owner
) -> None:
    """A transfer with a stale registration reads nothing from the next registration of its slot."""
    owner.run(
        """
        stop = threading.Event()
        other = np.full(1 << 16, 99, np.uint8)
        def churn():
            while not stop.is_set():
                transport.deregister(transport.register(other))
        churning = [threading.Thread(target=churn) for _ in range(2)]
        for thread in churning: thread.start()
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
    owner.run("stop.set(); [thread.join() for thread in churning]")
    check_that_blocks_arrive(link, owner)


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
    """A lease that was renewed before the service threads began has its deadline, too."""
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
    """Two ranges begin inside the first; a transfer needs all three, whatever bytes it moves."""
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
