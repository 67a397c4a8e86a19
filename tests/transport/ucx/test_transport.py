"""The transport between two processes of one host, over what UCX offers without RDMA."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest.mock import Mock

import numpy as np
import pytest
from msgspec.structs import replace

import kvplan
from kvnative._backend import KVN_OK, KVN_UNMAPPED, NativeError, ThreadPool
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._report import Report
from kvplan import CacheDesc, DataType, Rows, Transfer
from kvplan.execution.binding import bind
from kvplan.lease import BlockLease, LeaseWord
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.ucx.library import why_no_rdma
from kvplan.transport.ucx.link import UcxLink, UcxPeerMemory
from kvplan.transport.ucx.metadata import Metadata
from kvplan.transport.ucx.transport import UcxTransport
from tests.support.held import Held
from tests.support.refusals import refused
from tests.support.ucx_library import found
from tests.transport.owner_process import pattern
from tests.transport.ucx.owner import (
    NBYTES,
    SHARED_MEMORY,
    TIMEOUT_MS,
    Bytes,
    UcxOwner,
    host_memory,
)


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    return ThreadPool(1)


def move(
    pool: ThreadPool, remote: UcxPeerMemory, local: Bytes, direction: Literal["get", "put"]
) -> Report:
    """Move all of the remote tensors, which lie one after another in local memory."""
    sizes = remote.nbytes
    here = np.uint64(local.ctypes.data) + np.cumsum(sizes) - sizes
    dst, src = (here, remote.addresses) if direction == "get" else (remote.addresses, here)
    backend = remote.backend(pool, direction, host_memory(local), None)
    with Executor(backend) as executor:
        return executor.run(Descriptors.from_columns(dst, src, sizes), TIMEOUT_MS)


def test_arrays_and_parts_of_an_arena(
    transport: UcxTransport, owner: UcxOwner, link: UcxLink, pool: ThreadPool
) -> None:
    metadata = Metadata.from_bytes(owner.metadata())
    array, *parts = (range_.region for range_ in metadata.ranges)
    assert array not in parts
    assert len(set(parts)) == 1  # the arena is published as a whole
    assert len(metadata.regions) == 2
    remote = link.memory(
        [range_.address for range_ in metadata.ranges],
        [range_.nbytes for range_ in metadata.ranges],
        writable=True,
    )
    arena = pattern(2, NBYTES)
    expected = np.concatenate([pattern(1, NBYTES), arena[:65536], arena[131072:]])
    local = np.zeros(expected.nbytes, dtype=np.uint8)
    assert move(pool, remote, local, "get").status == KVN_OK
    np.testing.assert_array_equal(local, expected)
    registration = transport.register(local)
    local[:] = 9
    assert move(pool, remote, local, "put").status == KVN_OK
    transport.deregister(registration)
    assert owner.run("result = bool((array == 9).all())")
    arena[:65536] = arena[131072:] = 9
    assert owner.run("result = within.sum(dtype=np.uint64).item()") == arena.sum(dtype=np.uint64)
    assert link.way == "cma/memory"


def test_adjacent_blocks_are_merged_into_one_get(
    owner: UcxOwner, link: UcxLink, pool: ThreadPool
) -> None:
    """Plans merge adjacent blocks for every transport, in any order of the block table."""
    nbytes = 4096
    desc = CacheDesc(1, (NBYTES // nbytes, nbytes), DataType.DT_UINT8)
    there, here = [9, 3, 5, 4, 8, 20], [2, 10, 12, 11, 1, 30]
    plan = kvplan.plan(Transfer(Rows(desc, there), Rows(desc, here)), local="dst")
    address, metadata = owner.run("result = array.ctypes.data"), owner.metadata()
    remote, local = link.memory([address], NBYTES, metadata=metadata), np.zeros(NBYTES, np.uint8)
    owner.run(f"array[:] = pattern(1, {NBYTES})")
    descriptors = bind(plan, remote, host_memory(local), one_space=False)
    assert descriptors.count == 3  # blocks 3 to 5, 8 to 9, and 20
    with Executor(remote.backend(pool, "get", host_memory(local), None)) as executor:
        assert executor.run(descriptors, TIMEOUT_MS).status == KVN_OK
    expected = np.zeros((NBYTES // nbytes, nbytes), np.uint8)
    expected[here] = pattern(1, NBYTES).reshape(expected.shape)[there]
    np.testing.assert_array_equal(local.reshape(expected.shape), expected)


def test_ended_registrations_are_refused(owner: UcxOwner, link: UcxLink, pool: ThreadPool) -> None:
    owner.run("extra = np.ones(4096, np.uint8); one = transport.register(extra)")
    newer = owner.metadata()
    address = owner.run("result = extra.ctypes.data")
    remote = link.memory([address], 4096, metadata=newer)
    local = np.zeros(4096, dtype=np.uint8)
    assert move(pool, remote, local, "get").status == KVN_OK
    owner.run("transport.deregister(one); transport.deregister(one)")
    assert move(pool, remote, local, "get").status == KVN_UNMAPPED
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "is not inside one range"):
        link.memory([address], 4096, metadata=owner.metadata())
    owner.run("one = transport.register(extra)")  # takes the same slot
    assert move(pool, remote, local, "get").status == KVN_UNMAPPED
    again = link.memory([address], 4096, metadata=owner.metadata())
    assert move(pool, again, local, "get").status == KVN_OK
    link.check()


@pytest.mark.parametrize("direction", ["get", "put"])
def test_memory_with_a_lease_shares_nothing_with_the_same_memory_without(
    owner: UcxOwner, link: UcxLink, pool: ThreadPool, direction: Literal["get", "put"]
) -> None:
    word = LeaseWord("ucx", *owner.run("lease = transport.begin_lease(); result = lease"))
    lease = BlockLease(1, bytes(16), 1, 1, (0,), paged=True, tag="", words=(word,))
    address, metadata = owner.run("result = array.ctypes.data"), owner.metadata()
    plain = link.memory([address], NBYTES, writable=True, metadata=metadata)
    local = np.zeros(NBYTES, np.uint8)
    leased = [plain.leased([lease])]  # before a transfer of the memory without the lease

    def statuses() -> list[int]:
        leased.append(plain.leased([lease]))
        return [move(pool, remote, local, direction).status for remote in (plain, *leased)]

    assert statuses() == [KVN_OK] * 3
    owner.run("transport.end_leases([lease])")
    assert statuses() == [KVN_OK] + [KVN_UNMAPPED] * 3


def test_memory_that_several_documents_name_is_one_side(
    owner: UcxOwner, link: UcxLink, pool: ThreadPool
) -> None:
    """Caches that were published one after another have documents with one registration each."""
    named = owner.run(
        """
        several = [np.full(4096, 3 + number, np.uint8) for number in range(2)]
        both = [transport.register(array) for array in several]
        result = [(array.ctypes.data, transport.metadata([to])) for array, to in zip(several, both)]
        """
    )
    addresses, metadata = zip(*named, strict=True)
    remote = link.memory(addresses, 4096, writable=True, metadata=metadata)
    local = np.zeros(8192, dtype=np.uint8)
    assert move(pool, remote, local, "get").status == KVN_OK
    assert (local == np.repeat([3, 4], 4096)).all()
    local[:] = 8
    assert move(pool, remote, local, "put").status == KVN_OK
    assert owner.run("result = [int(array.min()) for array in several]") == [8, 8]
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "is not inside one range"):
        link.memory(addresses, 4096, metadata=metadata[::-1])
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "metadata is of 1 tensors; there are 2"):
        link.memory(addresses, 4096, metadata=metadata[:1])
    again = owner.run(
        "twice = transport.register(several[0]); result = transport.metadata([twice])"
    )
    twice = link.memory(addresses[:1] * 2, 4096, metadata=[metadata[0], again])
    assert move(pool, twice, local, "get").status == KVN_OK
    owner.run("transport.deregister(twice)")
    assert move(pool, twice, local, "get").status == KVN_UNMAPPED
    owner.run("transport.deregister(both[1])")
    assert move(pool, remote, local, "get").status == KVN_UNMAPPED
    owner.run("transport.deregister(both[0])")


def test_the_transport(transport: UcxTransport, link: UcxLink) -> None:
    assert transport.reaches == {"host"}  # UCX finds no device here
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "that UCX does not reach here"):
        transport.register(DeviceRange(1 << 40, 4096))
    memory = bytearray(4096)
    held = [transport.register(memory) for _ in range(64)]
    with refused(LLMStatusCode.LLM_OUT_OF_MEMORY, "max_registrations"):
        transport.register(memory)
    for item in held:
        transport.deregister(item)
    memory.append(1)  # the memory is released
    assert transport.refusal(transport.metadata()) is not None
    assert link.detects_freed == "after"


def test_a_stopped_peer_does_not_delay_a_transfer(owner: UcxOwner, transport: UcxTransport) -> None:
    metadata = owner.metadata()
    owner.stop()
    with transport.connect(metadata, timeout_ms=TIMEOUT_MS) as link:
        link.check()
    owner.resume()
    with refused(LLMStatusCode.LLM_NOT_YET_LINK, "is closed"):
        link.check()
    assert link.death_fd is None


def test_an_unreachable_peer_is_named(transport: UcxTransport, owner: UcxOwner) -> None:
    assert "is this transport itself" in str(transport.refusal(transport.metadata(())))
    assert "cannot be decoded" in str(transport.refusal(b"\x81"))
    assert transport.refusal(owner.metadata()) is None
    with found(), UcxTransport(settings='{"UCX_TLS": "self"}') as alone:
        assert "UCX cannot reach the peer" in str(alone.refusal(owner.metadata()))
    theirs = Metadata.from_bytes(owner.metadata())
    forged = replace(theirs, generations=replace(theirs.generations, address=4096)).to_bytes()
    with refused(LLMStatusCode.LLM_LINK_FAILED, rf"process {owner.pid} of .* cannot be reached"):
        transport.connect(forged, timeout_ms=TIMEOUT_MS)


@pytest.mark.usefixtures("ucx")
class TestMaking:
    def test_without_rdma_the_error_says_why_and_what_to_do(self, tmp_path: Path) -> None:
        if not why_no_rdma(""):
            pytest.skip("RDMA is here")
        with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "use the transport tcp") as caught:
            UcxTransport()
        assert 'kvplan.ucx_settings={"UCX_TLS": "cuda,shm"}' in str(caught.value)

    def test_tcp_as_a_ucx_transport_is_refused(self) -> None:
        with refused(LLMStatusCode.LLM_PARAM_INVALID, "UCX_TLS lets UCX use TCP"):
            UcxTransport(settings='{"UCX_TLS": "all"}')

    def test_unknown_transports_and_settings_are_refused(self) -> None:
        with pytest.raises(LLMException, match=r"UCX .* cannot be used: ucp_init: No such device"):
            UcxTransport(devices="none7", settings='{"UCX_TLS": "ib"}')

    def test_the_number_of_registrations_is_limited(self) -> None:
        with pytest.raises(LLMException, match=r"max_registrations=0 .*\[1, 65536\]"):
            UcxTransport(settings=SHARED_MEMORY, max_registrations=0)

    def test_a_transport_with_registrations_can_be_closed(self) -> None:
        transport = UcxTransport(settings=SHARED_MEMORY)
        kept = bytearray(4096)
        transport.register(kept)
        with pytest.raises(BufferError):
            kept.append(1)
        transport.close()
        transport.close()
        kept.append(1)
        with pytest.raises(LLMException, match="the transport is closed"):
            transport.register(kept)

    def test_memory_that_ucx_refuses_is_not_held_with_the_error(self) -> None:
        """RDMA refuses memory beyond RLIMIT_MEMLOCK; shared memory refuses nothing."""
        memory = bytearray(4096)
        refusing = Mock(side_effect=NativeError("Cannot allocate memory"))
        with UcxTransport(settings=SHARED_MEMORY) as transport:
            transport._registrations._worker = cast(Any, SimpleNamespace(map=refusing))
            with pytest.raises(LLMException, match="could not register 4096 bytes") as caught:
                transport.register(memory)
            memory.append(1)
        assert "Cannot allocate memory" in str(caught.value)

    @pytest.mark.parametrize("sizes", [(4096, 8192), (8192, 4096), (4096, 4096)])
    def test_registrations_that_begin_at_one_address_are_in_regions_of_their_sizes(
        self, sizes: tuple[int, int]
    ) -> None:
        memory = np.zeros(max(sizes), np.uint8)
        with UcxTransport(settings=SHARED_MEMORY) as transport:
            for nbytes in sizes:
                transport.register(memory[:nbytes])
            known = Metadata.from_bytes(transport.metadata())
        regions = {region.number: region for region in known.regions}
        assert len(regions) == len(set(sizes))
        assert [regions[each.region].nbytes for each in known.ranges] == [*sizes]

    def test_documents_of_one_transport_give_no_number_to_two_regions(self) -> None:
        """A link finds the keys of several documents by their numbers, which RDMA needs."""
        memory = [np.zeros(4096, np.uint8) for _ in range(3)]
        regions: dict[int, tuple[int, int]] = {}
        with UcxTransport(settings=SHARED_MEMORY) as transport:
            held = [transport.register(each) for each in memory]
            for some in ([0], [1], [2], [2, 0], [1, 0], [0, 1, 2]):
                known = Metadata.from_bytes(transport.metadata([held[i] for i in some]))
                for region in known.regions:
                    place = region.address, region.nbytes
                    assert regions.setdefault(region.number, place) == place
        assert len(set(regions.values())) == 3

    def test_a_closed_transport_has_no_open_files_and_no_threads(self) -> None:
        """They end even while the transport is referenced, and whatever its leases wait for."""
        before, kept = Held.now(), []
        for _ in range(2):  # UCX keeps some files open after its first use
            before = Held.now()
            ends = [UcxTransport(settings=SHARED_MEMORY) for _ in range(2)]
            link = ends[0].connect(ends[1].metadata(), timeout_ms=TIMEOUT_MS)
            ends[0].begin_lease(time.monotonic_ns() + 3_600 * 10**9)
            assert before.new().descriptors
            assert "kvplan-ucx-leases" in {thread.name for thread in threading.enumerate()}
            for end in (link, *ends):
                end.close()
                kept.append(end)
            del link, end
        before.check_nothing_new()

    def test_a_forked_child_of_a_process_that_uses_it_is_refused_with_advice(self) -> None:
        with UcxTransport(settings=SHARED_MEMORY) as parents:
            if (child := os.fork()) == 0:
                status = 1
                try:
                    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "with the method spawn"):
                        UcxTransport(settings=SHARED_MEMORY)
                    with pytest.raises(LLMException, match="forked child"):
                        parents.metadata(())
                    parents.close()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            parents.metadata(())
