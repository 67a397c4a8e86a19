"""The one-sided backend: memory of another process, over what UCX has between two of one host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvnative._executor import (
    KVN_CANCELLED,
    KVN_INVALID,
    KVN_OK,
    KVN_PEER_GONE,
    KVN_TIMEOUT,
    KVN_UNMAPPED,
    KVN_UNSUPPORTED,
    Executor,
)
from kvnative._ucx import UcxEnd, UcxError, UcxNativeLink
from kvnative._ucx_one_sided import UcxRegions
from tests.ucx.one_sided_peer import RegionPeer
from tests.ucx.peer import NBYTES, TIMEOUT_MS, Bytes, blocks, open_end
from tests.ucx.test_gathered import both
from tests.ucx_library import found

DIRECTIONS = ["get", "put"]
SEVERAL, MANY = (
    60,
    1000,
)  # times all of the peer's memory: enough to act meanwhile; more than any test waits for


def new_peer(tmp_path_factory: pytest.TempPathFactory) -> RegionPeer:
    with found():
        return RegionPeer(tmp_path_factory.mktemp("peer") / "memory")


@pytest.fixture(scope="module")
def one_sided_end() -> Iterator[UcxEnd]:
    with found():
        end = open_end("one_sided")
    yield end
    end.close()


@pytest.fixture(scope="module")
def regions(one_sided_end: UcxEnd) -> UcxRegions:
    return UcxRegions(one_sided_end)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegionPeer]:
    """For tests that leave it as it was."""
    peer = new_peer(tmp_path_factory)
    yield peer
    peer.close()


def connected(peer: RegionPeer, end: UcxEnd) -> UcxNativeLink:
    try:
        return peer.link(end)
    except UcxError as error:
        if error.status == KVN_UNSUPPORTED:
            pytest.skip(f"process_vm_readv is not allowed here: {error}")
        raise


@pytest.fixture(scope="module")
def link(one_sided_end: UcxEnd, peer: RegionPeer) -> UcxNativeLink:
    return connected(peer, one_sided_end)


@pytest.fixture(scope="module")
def whole(peer: RegionPeer) -> tuple[int, int, tuple[int, int]]:
    """A range that all of the peer's memory is."""
    return 0, NBYTES, peer.take()


@pytest.fixture
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegionPeer]:
    """For tests that end it."""
    peer = new_peer(tmp_path_factory)
    yield peer
    peer.close()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("count", "nbytes", "is_mapped"),
    [(1, 4095, False), (400, 32 << 10, True), (9000, 512, False), (1, NBYTES, True)],
)
def test_bytes(
    peer: RegionPeer,
    link: UcxNativeLink,
    regions: UcxRegions,
    whole: tuple[int, int, tuple[int, int]],
    local: Bytes,
    direction: str,
    count: int,
    nbytes: int,
    is_mapped: bool,
) -> None:
    spans = blocks(count, nbytes)
    here, there = both(peer.memory, direction, local, spans)
    region = regions.map(local.ctypes.data, local.nbytes) if is_mapped else None
    with Executor(peer.one_sided(link, direction, regions, [whole])) as executor:
        report = executor.run(peer.descriptors(direction, local, spans), TIMEOUT_MS)
    assert (report.status, report.bytes_done) == (KVN_OK, count * nbytes), report.message
    np.testing.assert_array_equal(local, here)
    np.testing.assert_array_equal(peer.memory, there)
    if region is not None:
        region.release()
        assert region.released
    peer.fill()


def test_it_says_how_it_is_reached(link: UcxNativeLink) -> None:
    assert link.way == "one-sided over cma/memory"


def test_stages(
    peer: RegionPeer,
    link: UcxNativeLink,
    regions: UcxRegions,
    whole: tuple[int, int, tuple[int, int]],
    local: Bytes,
) -> None:
    spans = blocks(40, 4096)
    here, _ = both(peer.memory, "get", local, spans)
    with Executor(peer.one_sided(link, "get", regions, [whole])) as executor:
        task = executor.stage(peer.descriptors("get", local, spans), 10)
        for stage in (2, 0, 3, 1):
            task.open(stage)
        assert task.wait(TIMEOUT_MS).status == KVN_OK
    np.testing.assert_array_equal(local, here)


class TestRegistrations:
    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_one_that_has_ended(
        self,
        peer: RegionPeer,
        link: UcxNativeLink,
        regions: UcxRegions,
        local: Bytes,
        direction: str,
    ) -> None:
        kept, ended = peer.take(), peer.take()
        ranges = [(0, 8 << 20, kept), (8 << 20, 8 << 20, ended)]
        with Executor(peer.one_sided(link, direction, regions, ranges)) as executor:
            peer.run(f"board.release{ended}")
            spans = [(0, 0, 4096), (4096, 8 << 20, 4096)]
            here, there = local.copy(), peer.memory.copy()
            report = executor.run(peer.descriptors(direction, local, spans), TIMEOUT_MS)
            assert (report.status, report.failed) == (KVN_UNMAPPED, 1)
            assert "the peer has deregistered" in report.message
            assert report.unconfirmed == ((0, 2),)
            np.testing.assert_array_equal(local, here)
            np.testing.assert_array_equal(peer.memory, there)
            # What stands beside it is reached, and the link is as it was.
            report = executor.run(peer.descriptors(direction, local, spans[:1]), TIMEOUT_MS)
            assert report.status == KVN_OK
        assert link.connected
        peer.run(f"board.release{kept}")
        peer.fill()

    def test_one_that_ends_meanwhile(
        self, peer: RegionPeer, link: UcxNativeLink, regions: UcxRegions, local: Bytes
    ) -> None:
        slot = peer.take()
        with Executor(peer.one_sided(link, "get", regions, [(0, NBYTES, slot)])) as executor:
            task = executor.submit(peer.descriptors("get", local, [(0, 0, NBYTES)] * SEVERAL))
            while task.report.bytes_done == 0:
                pass
            peer.run(f"board.release{slot}")
            report = task.wait(TIMEOUT_MS)
        assert report.status == KVN_UNMAPPED
        assert "meanwhile" in report.message
        assert report.unconfirmed == ((0, SEVERAL),)

    def test_the_slot_has_another_by_now(
        self, peer: RegionPeer, link: UcxNativeLink, regions: UcxRegions, local: Bytes
    ) -> None:
        slot, generation = peer.take()
        peer.run(f"board.release({slot}, {generation})")
        peer.run(f"while board.take()[0] != {slot}: pass")
        backend = peer.one_sided(link, "get", regions, [(0, NBYTES, (slot, generation))])
        with Executor(backend) as executor:
            report = executor.run(peer.descriptors("get", local, [(0, 0, 8)]), TIMEOUT_MS)
        assert report.status == KVN_UNMAPPED

    def test_remote_memory_in_no_range(
        self,
        peer: RegionPeer,
        link: UcxNativeLink,
        regions: UcxRegions,
        whole: tuple[int, int, tuple[int, int]],
        local: Bytes,
    ) -> None:
        with Executor(peer.one_sided(link, "get", regions, [whole])) as executor:
            spans = [(0, 0, 8), (0, NBYTES - 4, 8)]
            report = executor.run(peer.descriptors("get", local, spans), TIMEOUT_MS)
        assert (report.status, report.failed) == (KVN_INVALID, 1)
        assert "lies in none of the ranges" in report.message


class TestGivenUp:
    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_by_the_deadline_or_the_caller(
        self,
        peer: RegionPeer,
        link: UcxNativeLink,
        regions: UcxRegions,
        whole: tuple[int, int, tuple[int, int]],
        local: Bytes,
        direction: str,
    ) -> None:
        descriptors = peer.descriptors(direction, local, [(0, 0, NBYTES)] * MANY)
        with Executor(peer.one_sided(link, direction, regions, [whole])) as executor:
            late = executor.run(descriptors, 5)
            task = executor.submit(descriptors)
            cancelled = task.cancel()
            # Nothing of it is touched any more.
            target = local if direction == "get" else peer.memory
            target[:] = 7
            spans = [(0, 0, 8)]
            assert executor.run(peer.descriptors("get", local[-16:], spans), TIMEOUT_MS)
            assert (target[:-16] == 7).all()
        assert (late.status, cancelled.status) == (KVN_TIMEOUT, KVN_CANCELLED)
        assert late.unconfirmed == cancelled.unconfirmed == ((0, MANY),)
        assert link.connected
        peer.fill()

    def test_the_peer_is_killed(
        self,
        mortal: RegionPeer,
        one_sided_end: UcxEnd,
        regions: UcxRegions,
        local: Bytes,
    ) -> None:
        link = connected(mortal, one_sided_end)
        backend = mortal.one_sided(link, "get", regions, [(0, NBYTES, mortal.take())])
        with Executor(backend) as executor:
            task = executor.submit(mortal.descriptors("get", local, [(0, 0, NBYTES)] * MANY))
            while task.report.bytes_done == 0:
                pass
            mortal.process.kill()
            report = task.wait(TIMEOUT_MS)
            assert report.status == KVN_PEER_GONE, report.message
            again = executor.run(mortal.descriptors("get", local, [(0, 0, 8)]), TIMEOUT_MS)
            assert again.status == KVN_PEER_GONE
        assert link.failure is not None

    def test_the_link_is_closed(
        self,
        mortal: RegionPeer,
        one_sided_end: UcxEnd,
        regions: UcxRegions,
        local: Bytes,
    ) -> None:
        link = connected(mortal, one_sided_end)
        backend = mortal.one_sided(link, "get", regions, [(0, NBYTES, mortal.take())])
        with Executor(backend) as executor:
            task = executor.submit(mortal.descriptors("get", local, [(0, 0, NBYTES)] * MANY))
            link.close("it is over")
            report = task.wait(TIMEOUT_MS)
        assert (report.status, report.message) == (KVN_PEER_GONE, "it is over")


class TestArguments:
    def test_regions_of_an_end_without_remote_access(self, end: UcxEnd) -> None:
        with pytest.raises(ValueError, match="mode 'gathered'; it must be 'one_sided'"):
            UcxRegions(end)

    def test_a_region(self, regions: UcxRegions, local: Bytes) -> None:
        first = regions.map(local.ctypes.data, local.nbytes)
        second = regions.map(local.ctypes.data, local.nbytes)
        assert first.rkey == second.rkey
        first.release()
        first.release()
        assert (first.released, second.released) == (True, False)
        with pytest.raises(ValueError, match="must be one of host, cuda, rocm"):
            regions.map(1, 1, kind="disk")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at least 1 byte and end at"):
            regions.map(2**64 - 4096, 8192)

    def test_a_backend(
        self,
        peer: RegionPeer,
        link: UcxNativeLink,
        regions: UcxRegions,
        whole: tuple[int, int, tuple[int, int]],
    ) -> None:
        def refused(message: str, direction: str = "get", **changes: object) -> None:
            with pytest.raises((TypeError, ValueError), match=message):
                peer.one_sided(link, direction, regions, [whole], **changes)

        one = np.ones(1, dtype=np.uint64)
        refused("direction is 'pull'; it must be 'get' or 'put'", "pull")
        refused(
            "slots: expected 1 items, as in addresses, got 2", slots=np.ones(2, dtype=np.uint64)
        )
        refused("nbytes: expected uint64", nbytes=np.ones(1))
        refused("slots: range 0 has 16; the board has 16", slots=one * 16)
        refused("keys: range 0 has 2; there are 2", keys=one * 2)
        refused(r"rkeys\[0\]: expected bytes that are not empty", rkeys=[b""])
        refused("it must have at least 1 and end at", nbytes=one * 0)
