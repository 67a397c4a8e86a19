"""Deregistered memory: on return, no byte is read or written for a peer."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvnative._backend import KVN_OK, KVN_UNMAPPED
from kvnative._executor import Executor
from kvnative._tcp import TcpNativeLink, TcpService, tcp_backend
from tests.support.spare import copy_of, is_same
from tests.tcp.peer import (
    DIRECTIONS,
    NBYTES,
    TIMEOUT_MS,
    Bytes,
    TcpPeer,
    backend_of,
    descriptors,
    link_within,
    u64,
)

MIB = 1 << 20
directions = pytest.mark.parametrize("direction", DIRECTIONS)


@directions
class TestRefused:
    """Requests that the peer refuses, after which the link continues."""

    def refusal(
        self,
        peer: TcpPeer,
        link: TcpNativeLink,
        direction: str,
        slot: int = 1,
        generation: int = 1,
        nbytes: int = 8192,
    ) -> str:
        local = np.full(3 * 4096, 0xA5, dtype=np.uint8)
        before = peer.memory[:16384].copy()
        backend = peer.backend(link, direction, slot=slot, generation=generation, nbytes=nbytes)
        spans = [(0, 0, 4096), (4096, 4096, 4096)]
        with Executor(backend) as executor:
            report = executor.run(peer.descriptors(direction, local, spans), TIMEOUT_MS)
        assert report.status == KVN_UNMAPPED
        assert report.failed is not None
        assert report.unconfirmed[-1][1] == 2
        assert (local == 0xA5).all()
        assert np.array_equal(peer.memory[:16384], before)
        assert link.failure is None
        return report.message

    def test_removed_memory_is_refused(
        self, steady_peer: TcpPeer, steady_link: TcpNativeLink, direction: str
    ) -> None:
        steady_peer.add_range(1, 0, 8192)
        steady_peer.remove_range(1)
        message = self.refusal(steady_peer, steady_link, direction)
        assert message.startswith("descriptor 0: 4096 bytes at 0x")
        assert message.endswith("of the peer, which has deregistered it")

    def test_a_reused_slot_is_refused(
        self, steady_peer: TcpPeer, steady_link: TcpNativeLink, direction: str
    ) -> None:
        steady_peer.add_range(1, 0, 8192, generation=2)
        message = self.refusal(steady_peer, steady_link, direction, generation=1)
        steady_peer.remove_range(1)
        assert message.endswith("of the peer, which has deregistered it")

    def test_the_memory_is_shorter(
        self, steady_peer: TcpPeer, steady_link: TcpNativeLink, direction: str
    ) -> None:
        """The second descriptor is outside of the memory."""
        steady_peer.add_range(1, 0, 6000)
        message = self.refusal(steady_peer, steady_link, direction)
        steady_peer.remove_range(1)
        assert message.startswith("descriptor 1: 4096 bytes at 0x")
        assert message.endswith("of the peer, which has not registered all of it")

    def test_an_unknown_slot_is_refused(
        self, steady_peer: TcpPeer, steady_link: TcpNativeLink, direction: str
    ) -> None:
        message = self.refusal(steady_peer, steady_link, direction, slot=2**32 - 1)
        assert message.endswith("of the peer, which has not registered all of it")

    def test_the_registration_is_shorter_than_the_client_believes(
        self, steady_peer: TcpPeer, steady_link: TcpNativeLink, direction: str
    ) -> None:
        """No range of the backend holds the descriptor, so no request is sent."""
        backend = steady_peer.backend(steady_link, direction, offset=4096)
        local = np.zeros(4096, dtype=np.uint8)
        with Executor(backend) as executor:
            report = executor.run(
                steady_peer.descriptors(direction, local, [(0, 1, 4096)]), TIMEOUT_MS
            )
        message = report.message
        assert report.status == KVN_UNMAPPED
        assert message.startswith("descriptor 0: 4096 bytes at 0x")
        assert message.endswith("of the peer, which has not registered all of it")


def test_read_only_memory_is_not_written(steady_peer: TcpPeer, steady_link: TcpNativeLink) -> None:
    steady_peer.add_range(1, 0, 8192, writable=False)
    local = np.zeros(8192, dtype=np.uint8)
    before = steady_peer.memory[:8192].copy()
    reports = {}
    for direction in DIRECTIONS:
        with Executor(steady_peer.backend(steady_link, direction, slot=1)) as executor:
            reports[direction] = executor.run(
                steady_peer.descriptors(direction, local, [(0, 0, 8192)]), TIMEOUT_MS
            )
    steady_peer.remove_range(1)
    assert reports["get"].status == KVN_OK
    assert reports["put"].status == KVN_UNMAPPED
    assert reports["put"].message.endswith(
        "of the peer, which has registered it with writable=False"
    )
    assert np.array_equal(steady_peer.memory[:8192], before)
    assert np.array_equal(local, before)


def test_adjacent_memory_is_a_range_of_its_own(
    steady_peer: TcpPeer, steady_link: TcpNativeLink
) -> None:
    """Descriptors in the range that stays are never unconfirmed when the other is removed."""
    steady_peer.add_range(1, 0, MIB)
    backend = tcp_backend(
        steady_link, 0, "get", u64(1, 2), u64(1, 1),
        u64(steady_peer.base, steady_peer.base + MIB), u64(MIB, MIB),
    )  # fmt: skip
    local = np.zeros(2 * MIB, dtype=np.uint8)
    spans = [(at, at, 4096) for at in range(0, 2 * MIB, 4096)]
    with Executor(backend) as executor:
        report = executor.run(steady_peer.descriptors("get", local, spans), TIMEOUT_MS)
    steady_peer.remove_range(1)
    assert (report.status, report.failed) == (KVN_UNMAPPED, 256)
    assert report.unconfirmed == ((256, 512),)
    assert np.array_equal(local[:MIB], steady_peer.memory[:MIB])


class TestInTheMiddle:
    """A service that deregisters, and one that sends requests, both in this process."""

    SIZE = 16 * MIB
    ROUNDS = 12

    @directions
    def test_nothing_is_touched_afterwards(self, direction: str, secret: bytes | None) -> None:
        owner = TcpService(threads=1, max_ranges=1)
        asker = TcpService(threads=1, max_ranges=1)
        link, _ = link_within(asker, owner, secret=secret)
        memory = np.empty(self.SIZE, dtype=np.uint8)
        local = np.empty(self.SIZE, dtype=np.uint8)
        base, here = memory.ctypes.data, local.ctypes.data
        spans = [(at, self.SIZE - at - 8192, 8192) for at in range(0, self.SIZE, 8192)]
        interrupted = 0
        for number in range(1, self.ROUNDS + 1):
            memory[:], local[:] = (0x11, 0xA5) if direction == "get" else (0xA5, 0x11)
            owner.add_range(0, base, self.SIZE, True, number)
            backend = backend_of(link, direction, base, self.SIZE, generation=number)
            with Executor(backend) as executor:
                task = executor.submit(descriptors(direction, here, base, spans))
                deadline = time.monotonic() + TIMEOUT_MS / 1000
                while not task.done and not task.report.bytes_done:
                    assert time.monotonic() < deadline
                owner.remove_range(0)
                if direction == "get":
                    memory[:] = 0xEE  # now the owner's again, so no byte of this may be sent
                else:
                    after = copy_of(memory)
                report = task.wait(TIMEOUT_MS)
            if direction == "get":
                assert not (local == 0xEE).any()
            else:
                assert is_same(memory, after)
            if report.status == KVN_OK:
                continue
            interrupted += 1
            assert report.status == KVN_UNMAPPED
            assert "of the peer, which has deregistered it" in report.message
            ((first, last),) = report.unconfirmed
            assert last == len(spans)
            for mine, theirs, nbytes in spans[:first]:
                assert (local[mine:][:nbytes] == 0x11).all()
                assert (memory[theirs:][:nbytes] == (0xEE if direction == "get" else 0x11)).all()
        assert interrupted > 0
        assert link.failure is None
        owner.close()
        asker.close()

    @directions
    def test_transfers_of_others_are_not_disturbed(
        self, service: TcpService, peer: TcpPeer, local: Bytes, direction: str
    ) -> None:
        """The peer constantly removes and adds other ranges."""
        link = peer.link(service)
        peer.send(
            """
            for i in range(3000):
                service.add_range(7, base, 4096, True, i)
                service.remove_range(7)
            """
        )
        spans = [(at, at, 65_536) for at in range(0, NBYTES, 65_536)]
        with Executor(peer.backend(link, direction)) as executor:
            for _ in range(4):
                report = executor.run(peer.descriptors(direction, local, spans), TIMEOUT_MS)
                assert report.status == KVN_OK, report.message
        peer.answer()
        assert is_same(local, peer.memory)


class TestTable:
    def test_errors(self, service: TcpService, local: Bytes) -> None:
        address = local.ctypes.data
        service.add_range(3, address, 10, True, 1)
        with pytest.raises(ValueError, match="slot 3 has a range already"):
            service.add_range(3, address, 10, True, 2)
        with pytest.raises(ValueError, match="slot is 256; it must be below 256"):
            service.add_range(256, address, 10, True, 1)
        with pytest.raises(ValueError, match=r"a range of 0 bytes at 0x.* is empty"):
            service.add_range(4, address, 0, True, 1)
        with pytest.raises(ValueError, match=r"ends past 2\*\*64"):
            service.add_range(4, 2**64 - 4, 5, True, 1)
        service.remove_range(3)
        with pytest.raises(ValueError, match="slot 3 holds no range"):
            service.remove_range(3)
        with pytest.raises(ValueError, match="slot 5000 holds no range"):
            service.remove_range(5000)

    def test_a_range_may_end_with_all_addresses(self, service: TcpService) -> None:
        service.add_range(3, 2**64 - 4, 4, True, 1)
        service.remove_range(3)
        with pytest.raises(ValueError, match="slot 3 holds no range"):
            service.remove_range(3)
