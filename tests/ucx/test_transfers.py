"""Gets and puts of another process's memory, over the transport of UCX within one host."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_INVALID,
    KVN_OK,
    KVN_PEER_GONE,
    KVN_TIMEOUT,
    KVN_UNMAPPED,
    ThreadPool,
    host_backend,
)
from kvnative._executor import Executor
from kvnative._ucx import UcxEndpoint, UcxWorker
from kvnative._ucx_backend import ucx_leased
from tests.support.ends import assert_no_outcome_before_its_end
from tests.support.spare import assert_same, copy_of
from tests.ucx.peer import NBYTES, TIMEOUT_MS, Bytes, Range, UcxPeer, blocks, both

DIRECTIONS = ["get", "put"]
# Number of passes over the peer's memory: enough to act meanwhile, and more than any test waits
# for.
SEVERAL, MANY = 120, 4000


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("count", "nbytes", "is_mapped"),
    [(1, 4095, False), (100, 32 << 10, True), (9000, 256, False), (1, NBYTES, True)],
)
def test_blocks_of_any_size_arrive(
    worker: UcxWorker,
    peer: UcxPeer,
    endpoint: UcxEndpoint,
    whole: Range,
    local: Bytes,
    direction: str,
    count: int,
    nbytes: int,
    is_mapped: bool,
) -> None:
    spans = blocks(count, nbytes)
    here, there = both(peer.memory, direction, local, spans)
    region = worker.map(local.ctypes.data, local.nbytes) if is_mapped else None
    with Executor(peer.backend(endpoint, direction, [whole])) as executor:
        report = executor.run(peer.descriptors(direction, local, spans), TIMEOUT_MS)
    assert (report.status, report.bytes_done) == (KVN_OK, count * nbytes), report.message
    assert_same(local, here)
    assert_same(peer.memory, there)
    if region is not None:
        region.release()
        assert region.released
    peer.fill()


def test_an_endpoint_names_its_transport(endpoint: UcxEndpoint) -> None:
    assert endpoint.transport == "cma/memory"


def test_layers_arrive(
    peer: UcxPeer,
    endpoint: UcxEndpoint,
    whole: Range,
    local: Bytes,
) -> None:
    spans = blocks(40, 4096)
    here, _ = both(peer.memory, "get", local, spans)
    with Executor(peer.backend(endpoint, "get", [whole])) as executor:
        task = executor.layered(peer.descriptors("get", local, spans), 10)
        for layer in (2, 0, 3, 1):
            task.open(layer)
        assert task.wait(TIMEOUT_MS).status == KVN_OK
    assert_same(local, here)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_outcome_is_known_before_the_end_of_a_batch(
    peer: UcxPeer, endpoint: UcxEndpoint, whole: Range, local: Bytes, direction: str
) -> None:
    moved = peer.descriptors(direction, local, [(0, 0, NBYTES)])
    assert_no_outcome_before_its_end(peer.backend(endpoint, direction, [whole]), moved)
    peer.fill()


def test_several_threads_share_a_worker(worker: UcxWorker, peer: UcxPeer, whole: Range) -> None:
    """Threads have their own blocks, over two endpoints of one worker, in both directions."""
    endpoints = [peer.connect(worker) for _ in range(2)]
    share, nbytes = NBYTES // 4, 4096

    def move(index: int) -> None:
        local = np.full(share, index + 1, np.uint8)
        spans = [(i, index * share + i, nbytes) for i in range(0, share, nbytes)]
        columns = [peer.descriptors(direction, local, spans) for direction in DIRECTIONS]
        backends = [
            peer.backend(endpoints[index % 2], direction, [whole]) for direction in DIRECTIONS
        ]
        with Executor(backends[0]) as pulls, Executor(backends[1]) as pushes:
            for number in range(1, 11):
                local[:] = number * (index + 1)
                assert pushes.run(columns[1], TIMEOUT_MS).status == KVN_OK
                local[:] = 0
                assert pulls.submit(columns[0]).wait(TIMEOUT_MS).status == KVN_OK
                assert (local == number * (index + 1)).all()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(move, range(4)))
    for endpoint in endpoints:
        endpoint.close()
    peer.fill()


class TestRegistrations:
    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_an_ended_registration_or_lease_fails_the_transfer(
        self,
        peer: UcxPeer,
        endpoint: UcxEndpoint,
        local: Bytes,
        direction: str,
    ) -> None:
        kept, ended = peer.take(), peer.take()
        ranges = [(0, 8 << 20, kept), (8 << 20, 8 << 20, ended)]
        with Executor(peer.backend(endpoint, direction, ranges)) as executor:
            peer.run(f"board.release{ended}")
            spans = [(0, 0, 4096), (4096, 8 << 20, 4096)]
            here, there = copy_of(local), copy_of(peer.memory)
            report = executor.run(peer.descriptors(direction, local, spans), TIMEOUT_MS)
            assert (report.status, report.failed) == (KVN_UNMAPPED, 1)
            assert "the peer has deregistered" in report.message
            assert report.unconfirmed == ((0, 2),)
            assert_same(local, here)
            assert_same(peer.memory, there)
            # The range beside it is still reached, and the endpoint is connected.
            report = executor.run(peer.descriptors(direction, local, spans[:1]), TIMEOUT_MS)
            assert report.status == KVN_OK
        assert endpoint.connected
        peer.run(f"board.release{kept}")
        peer.fill()

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_a_descriptor_of_a_layer_is_named_by_its_place_in_the_transfer(
        self, peer: UcxPeer, endpoint: UcxEndpoint, local: Bytes, direction: str
    ) -> None:
        kept, ended = peer.take(), peer.take()
        ranges = [(0, 8 << 20, kept), (8 << 20, 8 << 20, ended)]
        spans = [(4096 * i, (8 << 20) * (i == 5) + 4096 * i, 4096) for i in range(6)]
        with Executor(peer.backend(endpoint, direction, ranges)) as executor:
            peer.run(f"board.release{ended}")
            task = executor.layered(peer.descriptors(direction, local, spans), 2)
            for layer in range(3):
                task.open(layer)
            report = task.wait(TIMEOUT_MS)
        assert (report.status, report.failed) == (KVN_UNMAPPED, 5)
        peer.run(f"board.release{kept}")
        peer.fill()

    def test_an_end_during_the_transfer_fails_it(
        self, peer: UcxPeer, endpoint: UcxEndpoint, local: Bytes
    ) -> None:
        slot = peer.take()
        with Executor(peer.backend(endpoint, "get", [(0, NBYTES, slot)])) as executor:
            task = executor.submit(peer.descriptors("get", local, [(0, 0, NBYTES)] * SEVERAL))
            while task.report.bytes_done == 0:
                pass
            peer.run(f"board.release{slot}")
            report = task.wait(TIMEOUT_MS)
        assert report.status == KVN_UNMAPPED
        assert "meanwhile" in report.message
        assert report.unconfirmed == ((0, SEVERAL),)

    def test_a_slot_with_a_new_registration_fails_the_transfer(
        self, peer: UcxPeer, endpoint: UcxEndpoint, local: Bytes
    ) -> None:
        slot, generation = peer.take()
        peer.run(f"board.release({slot}, {generation})")
        peer.run(
            "taken = [board.take()]", f"while taken[-1][0] != {slot}: taken.append(board.take())"
        )
        backend = peer.backend(endpoint, "get", [(0, NBYTES, (slot, generation))])
        with Executor(backend) as executor:
            report = executor.run(peer.descriptors("get", local, [(0, 0, 8)]), TIMEOUT_MS)
        assert report.status == KVN_UNMAPPED
        peer.run("for slot in taken: board.release(*slot)")

    def test_remote_memory_outside_of_all_ranges_is_refused(
        self,
        peer: UcxPeer,
        endpoint: UcxEndpoint,
        whole: Range,
        local: Bytes,
    ) -> None:
        with Executor(peer.backend(endpoint, "get", [whole])) as executor:
            spans = [(0, 0, 8), (0, NBYTES - 4, 8)]
            report = executor.run(peer.descriptors("get", local, spans), TIMEOUT_MS)
        assert (report.status, report.failed) == (KVN_INVALID, 1)
        assert "lies in none of the ranges" in report.message


class TestLeases:
    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_an_ended_registration_or_lease_fails_the_transfer(
        self, peer: UcxPeer, endpoint: UcxEndpoint, whole: Range, local: Bytes, direction: str
    ) -> None:
        kept, ended = peer.take(), peer.take()
        without = peer.backend(endpoint, direction, [whole])
        backend = ucx_leased(without, [(*kept, "lease 3"), (*ended, "lease 4 of é")])
        spans = [(0, 4096, 8192)]
        here, there = both(peer.memory, direction, local, spans)
        with Executor(backend) as executor, Executor(without) as others:
            descriptors = peer.descriptors(direction, local, spans)
            assert executor.run(descriptors, TIMEOUT_MS).status == KVN_OK
            assert_same(local, here)
            assert_same(peer.memory, there)
            local[:], peer.memory[:] = 1, 2
            peer.run(f"board.release{ended}")
            report = executor.run(descriptors, TIMEOUT_MS)
            assert (report.status, report.unconfirmed) == (KVN_UNMAPPED, ((0, 1),))
            message = "lease 4 of é was released or moved by the peer, or has expired"
            assert report.message == message
            assert (local == 1).all()
            assert (peer.memory == 2).all()
            assert others.run(descriptors, TIMEOUT_MS).status == KVN_OK
        peer.run(f"board.release{kept}")
        peer.fill()

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_an_end_during_the_transfer_fails_it(
        self, peer: UcxPeer, endpoint: UcxEndpoint, whole: Range, local: Bytes, direction: str
    ) -> None:
        lease = peer.take()
        backend = ucx_leased(peer.backend(endpoint, direction, [whole]), [(*lease, "lease 3")])
        with Executor(backend) as executor:
            task = executor.submit(peer.descriptors(direction, local, [(0, 0, NBYTES)] * SEVERAL))
            while task.report.bytes_done == 0:
                pass
            peer.run(f"board.release{lease}")
            report = task.wait(TIMEOUT_MS)
        assert report.status == KVN_UNMAPPED
        message = "lease 3 was released or moved by the peer, or has expired meanwhile"
        assert report.message == message
        assert report.unconfirmed == ((0, SEVERAL),)
        assert endpoint.connected
        peer.fill()

    @pytest.mark.parametrize(
        ("slot", "generation"), [(16, 1), (2**64 - 1, 1), (15, 0), (15, 2), (15, 7)]
    )
    def test_an_impossible_lease_is_refused(
        self,
        peer: UcxPeer,
        endpoint: UcxEndpoint,
        whole: Range,
        local: Bytes,
        slot: int,
        generation: int,
    ) -> None:
        """Words outside of the table are not read, and a free slot is not a lease."""
        without = peer.backend(endpoint, "get", [whole])
        with Executor(ucx_leased(without, [(slot, generation, "lease 3")])) as executor:
            report = executor.run(peer.descriptors("get", local, [(0, 0, 8)]), TIMEOUT_MS)
        assert (report.status, report.unconfirmed) == (KVN_UNMAPPED, ((0, 1),))
        assert report.message == "lease 3 was released or moved by the peer, or has expired"
        assert endpoint.connected

    def test_the_word_after_the_table_is_not_read(
        self, worker: UcxWorker, peer: UcxPeer, whole: Range, local: Bytes
    ) -> None:
        """The word has the right generation, so a transfer that read it would succeed."""
        slot, generation = peer.take()
        few = peer.endpoint(worker, num_slots=slot)
        few.connect(TIMEOUT_MS)
        backend = ucx_leased(peer.backend(few, "get", [whole]), [(slot, generation, "lease 3")])
        with Executor(backend) as executor:
            report = executor.run(peer.descriptors("get", local, [(0, 0, 8)]), TIMEOUT_MS)
        assert (report.status, report.unconfirmed) == (KVN_UNMAPPED, ((0, 1),))
        assert (local == 0xA5).all()
        few.close()
        peer.run(f"board.release({slot}, {generation})")

    def test_wrong_arguments_of_leases_are_refused(
        self, peer: UcxPeer, endpoint: UcxEndpoint, whole: Range
    ) -> None:
        with pytest.raises(ValueError, match="it must be one of ucx_backend"):
            ucx_leased(host_backend(ThreadPool(1)), [])
        backend = peer.backend(endpoint, "get", [whole])
        with pytest.raises(ValueError, match="slot"):
            ucx_leased(backend, [(-1, 1, "lease 3")])


class TestGivenUp:
    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_an_abandoned_transfer_touches_no_memory(
        self,
        peer: UcxPeer,
        endpoint: UcxEndpoint,
        whole: Range,
        local: Bytes,
        direction: str,
    ) -> None:
        descriptors = peer.descriptors(direction, local, [(0, 0, NBYTES)] * MANY)
        with Executor(peer.backend(endpoint, direction, [whole])) as executor:
            late = executor.run(descriptors, 5)
            task = executor.submit(descriptors)
            cancelled = task.cancel()
            # The memory is not touched any more.
            target = local if direction == "get" else peer.memory
            target[:] = 7
            spans = [(0, 0, 8)]
            assert executor.run(peer.descriptors("get", local[-16:], spans), TIMEOUT_MS)
            assert (target[:-16] == 7).all()
        assert (late.status, cancelled.status) == (KVN_TIMEOUT, KVN_CANCELLED)
        assert late.unconfirmed == cancelled.unconfirmed == ((0, MANY),)
        assert endpoint.connected
        peer.fill()

    def test_a_killed_peer_ends_the_transfer(
        self,
        mortal: UcxPeer,
        worker: UcxWorker,
        local: Bytes,
    ) -> None:
        endpoint = mortal.connect(worker)
        backend = mortal.backend(endpoint, "get", [(0, NBYTES, mortal.take())])
        with Executor(backend) as executor:
            task = executor.submit(mortal.descriptors("get", local, [(0, 0, NBYTES)] * MANY))
            while task.report.bytes_done == 0:
                pass
            mortal.process.kill()
            report = task.wait(TIMEOUT_MS)
            assert report.status == KVN_PEER_GONE, report.message
            again = executor.run(mortal.descriptors("get", local, [(0, 0, 8)]), TIMEOUT_MS)
            assert again.status == KVN_PEER_GONE
        assert endpoint.failure is not None

    def test_a_closed_endpoint_ends_the_transfer(
        self,
        mortal: UcxPeer,
        worker: UcxWorker,
        local: Bytes,
    ) -> None:
        endpoint = mortal.connect(worker)
        backend = mortal.backend(endpoint, "get", [(0, NBYTES, mortal.take())])
        with Executor(backend) as executor:
            task = executor.submit(mortal.descriptors("get", local, [(0, 0, NBYTES)] * MANY))
            endpoint.close("it is over")
            report = task.wait(TIMEOUT_MS)
        assert (report.status, report.message) == (KVN_PEER_GONE, "it is over")


class Owner:
    """An owner of memory."""


class TestArguments:
    def test_a_region_is_released_once(self, worker: UcxWorker, local: Bytes) -> None:
        first = worker.map(local.ctypes.data, local.nbytes)
        second = worker.map(local.ctypes.data, local.nbytes)
        assert first.rkey == second.rkey
        first.release()
        first.release()
        assert (first.released, second.released) == (True, False)
        with pytest.raises(ValueError, match="must be one of host, cuda"):
            worker.map(1, 1, kind="disk")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at least 1 byte and end at"):
            worker.map(2**64 - 4096, 8192)

    def test_a_region_holds_its_owner_until_it_is_released(
        self, worker: UcxWorker, local: Bytes
    ) -> None:
        """Each region holds its own owner, although both have the same memory."""
        owners = [Owner() for _ in range(2)]
        alive = [weakref.ref(owner) for owner in owners]
        regions = [
            worker.map(local.ctypes.data, local.nbytes, owner=owners.pop(0)) for _ in range(2)
        ]
        gc.collect()
        assert None not in [owner() for owner in alive]
        regions[0].release()
        gc.collect()
        assert [owner() is None for owner in alive] == [True, False]
        assert not regions[1].released

    def test_wrong_arguments_of_a_backend_are_refused(
        self,
        peer: UcxPeer,
        endpoint: UcxEndpoint,
        whole: Range,
    ) -> None:
        def refused_backend(message: str, direction: str = "get", **changes: object) -> None:
            with pytest.raises((TypeError, ValueError), match=message):
                peer.backend(endpoint, direction, [whole], **changes)

        one = np.ones(1, dtype=np.uint64)
        refused_backend("direction is 'pull'; it must be 'get' or 'put'", "pull")
        refused_backend(
            "slots: expected 1 items, as in addresses, got 2", slots=np.ones(2, dtype=np.uint64)
        )
        refused_backend("nbytes: expected uint64", nbytes=np.ones(1))
        refused_backend("slots: range 0 has 16; the generation table has 16", slots=one * 16)
        refused_backend("keys: range 0 has 1; there are 1", keys=one)
        refused_backend(r"rkeys\[0\]: expected bytes that are not empty", rkeys=[b""])
        refused_backend("it must have at least 1 and end at", nbytes=one * 0)
        last = one * np.uint64(2**64 - 1)
        peer.backend(endpoint, "get", [whole], addresses=last, nbytes=one)
        refused_backend("it must have at least 1 and end at", addresses=last, nbytes=one * 2)
