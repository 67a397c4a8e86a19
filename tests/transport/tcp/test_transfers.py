"""Transfers over TCP between two processes: connections, encryption, threads, registrations."""

from __future__ import annotations

import hashlib
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from kvnative._backend import KVN_OK, ThreadPool
from kvplan.status import LLMStatusCode
from kvplan.transport.tcp.link import TcpLink
from kvplan.transport.tcp.transport import TcpTransport
from tests.support.refusals import refused
from tests.transport.owner_process import pattern
from tests.transport.tcp.owner import (
    BLOCK,
    CONNECTIONS,
    NBYTES,
    NUM_BLOCKS,
    Owner,
    descriptors,
    executor,
    whole,
)
from tests.transport.tcp.peer import TIMEOUT_MS, linked
from tests.transport.tcp.streams import Dialled, Recorded


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
        backend = remote.backend(ThreadPool(1), "get", HostMemory.from_arrays([into]), None)
        columns = [
            np.array([value], np.uint64)
            for value in (into.ctypes.data, {ours.ctypes.data}, {NBYTES})]
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
        """Return the bytes that passed on each connection of the end that dialled."""
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
    """A stream whose handshake was not encrypted."""

    private = False


@pytest.mark.parametrize("demands", [(True, False), (False, True)])
def test_encryption_with_a_secret_that_was_sent_in_the_clear_is_refused(
    demands: tuple[bool, bool],
) -> None:
    one, two = (TcpTransport(encrypt=demand) for demand in demands)
    with one, two, refused(LLMStatusCode.LLM_LINK_FAILED, r"kvplan\.cluster_key_file"):
        one.connect(two.metadata(), timeout_ms=TIMEOUT_MS, streams=Overheard(0))


@pytest.mark.parametrize("demands", [(False, False), (True, False), (False, True)])
def test_data_is_encrypted_if_either_end_requires_it(demands: tuple[bool, bool]) -> None:
    """Recorded traffic contains the memory of an end only if neither end requires encryption."""
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


def test_read_only_memory_is_not_written(transport: TcpTransport) -> None:
    memory = pattern(1, BLOCK)
    with TcpTransport(connections=1) as two:
        two.register(memory, writable=False)
        link, _ = linked(transport, two)
        with refused(LLMStatusCode.LLM_PARAM_INVALID, "with writable=False"):
            link.memory([memory.ctypes.data], BLOCK, writable=True)


@pytest.mark.parametrize("name", ["a" * 64, "a" * 65, "", "a" * 253])
def test_the_name_of_the_host_may_be_long_or_empty(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    with TcpTransport(connections=1) as one, TcpTransport(connections=1) as two:
        link, _ = linked(one, two)
        assert (name[:64] or "localhost") in str(link.peer)


def test_memory_of_an_unknown_device_is_refused(link: TcpLink, owner: Owner) -> None:
    device = SimpleNamespace(on_device=True)
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, r"has no device: .*Placement\.HOST"):
        whole(link, owner).backend(ThreadPool(1), "get", device, None)


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
