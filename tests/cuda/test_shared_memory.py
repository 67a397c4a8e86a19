"""GPU memory of another process on this host, by transport local: mapped, and copied one-sided."""

from __future__ import annotations

import gc

import msgspec
import numpy as np
import pytest

import kvplan
from kvplan import LLMException, LLMStatusCode, Placement, Rows, Transfer
from kvplan.transport.local import LocalTransport
from tests.ascend.simulator import Log
from tests.cuda.side import (
    BLOCK,
    GRANULE,
    NBYTES,
    PULL,
    PUSH,
    Other,
    Side,
    Whose,
    blocks,
    desc,
    expected,
    pattern,
    zeros,
)
from tests.cuda_sim.simulator import CudaControls
from tests.support.peer import RemoteError
from tests.support.refusals import refused
from tests.support.rights import denying

WHOSE = pytest.mark.parametrize("whose", ["kvplan", "program"])


@WHOSE
class TestTransfers:
    def test_blocks_are_pulled_to_a_device(self, side: Side, other: Other, whose: Whose) -> None:
        there = other.call("offer", whose, 1)
        here = zeros(side)
        with side.transport.connect(other.call("metadata")) as link:
            kvplan.execute(PULL, link.memory([there], NBYTES), side.local(here))
        assert np.array_equal(blocks(side.contents(here)), expected(1))

    def test_blocks_are_pulled_to_the_host(self, side: Side, other: Other, whose: Whose) -> None:
        there = other.call("offer", whose, 1)
        here = np.zeros(NBYTES, np.uint8)
        plan = kvplan.plan(
            Transfer(Rows(desc(), [1, 6, 0]), Rows(desc(Placement.HOST), [0, 3, 7])), local="dst"
        )
        with side.transport.connect(other.call("metadata")) as link:
            kvplan.execute(plan, link.memory([there], NBYTES), [here])
        assert np.array_equal(blocks(here), expected(1))

    def test_blocks_are_pushed_from_a_device(self, side: Side, other: Other, whose: Whose) -> None:
        there = other.call("offer", whose, 1)
        other.run("side.device.write(there, bytes(nbytes))", there=there, nbytes=NBYTES)
        here = side.allocate("kvplan", 2)
        with side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES, writable=True)
            kvplan.execute(PUSH, side.local(here), memory)
        assert np.array_equal(blocks(other.call("contents", there)), expected(2))

    def test_blocks_are_pushed_from_the_host(self, side: Side, other: Other, whose: Whose) -> None:
        there = other.call("offer", whose, 1)
        other.run("side.device.write(there, bytes(nbytes))", there=there, nbytes=NBYTES)
        plan = kvplan.plan(
            Transfer(Rows(desc(Placement.HOST), [1, 6, 0]), Rows(desc(), [0, 3, 7])), local="src"
        )
        with side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES, writable=True)
            kvplan.execute(plan, [pattern(2)], memory)
        assert np.array_equal(blocks(other.call("contents", there)), expected(2))

    def test_a_part_of_an_allocation_is_reachable(
        self, side: Side, other: Other, whose: Whose
    ) -> None:
        part = 3 * BLOCK, NBYTES
        there = other.call("offer", whose, 1, 2 * NBYTES, part=part) + part[0]
        here = zeros(side)
        with side.transport.connect(other.call("metadata")) as link:
            kvplan.execute(PULL, link.memory([there], NBYTES), side.local(here))
            with refused("LLM_KV_CACHE_NOT_EXIST", "is not inside one range"):
                link.memory([there - BLOCK], BLOCK)
        found = blocks(pattern(1, 2 * NBYTES)[part[0] : part[0] + NBYTES])
        assert np.array_equal(blocks(side.contents(here))[[0, 3, 7]], found[[1, 6, 0]])

    def test_an_allocation_is_mapped_once_per_link(
        self, side: Side, other: Other, whose: Whose, sim_log: Log
    ) -> None:
        there = other.call("offer", whose, 1)
        with side.transport.connect(other.call("metadata")) as link:
            assert link.way == "mapped arenas and GPU memory, process_vm"
            first = link.memory([there], NBYTES)
            second = link.memory([there + BLOCK], BLOCK)
            assert second.addresses[0] == first.addresses[0] + BLOCK
            made = sim_log.counts("cuMemImportFromShareableHandle", "cuIpcOpenMemHandle_v2")
            assert sum(made.values()) == 1

    def test_deregistered_memory_is_refused(self, side: Side, other: Other, whose: Whose) -> None:
        there = other.call("offer", whose, 1)
        here = zeros(side)
        with side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES, writable=True)
            assert other.call("deregister", there) == []
            for plan, src, dst in (
                (PULL, memory, side.local(here)),
                (PUSH, side.local(here), memory),
            ):
                with refused("LLM_KV_CACHE_NOT_EXIST", r"has deregistered .* \(GPU [0-9a-f]{32}"):
                    kvplan.execute(plan, src, dst)
            with refused("LLM_KV_CACHE_NOT_EXIST", "has deregistered"):
                link.memory([there], NBYTES)

    def test_a_read_only_registration_refuses_writes(
        self, side: Side, other: Other, whose: Whose
    ) -> None:
        there = other.call("offer", whose, 1, writable=False)
        with side.transport.connect(other.call("metadata")) as link:
            link.memory([there], NBYTES)
            with refused("LLM_PARAM_INVALID", "writable=False"):
                link.memory([there], NBYTES, writable=True)

    def test_a_released_lease_is_refused(self, side: Side, other: Other, whose: Whose) -> None:
        there = other.call("offer", whose, 1)
        slot, generation = other.run("result = side.transport.begin_lease()")
        with side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES).leased([Lease(slot, generation)])
            here = side.local(zeros(side))
            kvplan.execute(PULL, memory, here)
            other.run("side.transport.end_leases([lease])", lease=(slot, generation))
            with refused("LLM_KV_CACHE_NOT_EXIST", "a lease was released"):
                kvplan.execute(PULL, memory, here)

    def test_a_mapping_ends_with_its_last_user(
        self, side: Side, other: Other, whose: Whose, cuda_simulator: CudaControls
    ) -> None:
        there = other.call("offer", whose, 1)
        before, descriptors = cuda_simulator.left(), side.num_descriptors()
        link = side.transport.connect(other.call("metadata"))
        memory = link.memory([there], NBYTES)
        assert cuda_simulator.left() != before
        link.close()
        assert cuda_simulator.left() != before, "what uses it has it still"
        del memory, link
        gc.collect()
        assert cuda_simulator.left() == before
        assert side.num_descriptors() == descriptors

    def test_the_owner_keeps_no_descriptor(self, other: Other, whose: Whose) -> None:
        before = other.call("num_descriptors")
        there = other.call("offer", whose, 1)
        other.call("deregister", there)
        other.call("free", there)
        assert other.call("num_descriptors") == before


def test_a_peer_that_may_not_duplicate_descriptors_asks_for_them(
    side: Side, cuda_simulator: CudaControls
) -> None:
    """Docker containers without CAP_SYS_PTRACE have this limit: the owner sends the descriptors."""
    connect = "link = side.transport.connect(metadata, session=b'link'); "
    there = side.offer("kvplan", 1)
    metadata = side.metadata()
    other = Other()
    try:
        other.run(denying("pidfd_getfd"))
        assert other.run("result = side.transport.shortfall(metadata)", metadata=metadata) is None
        with side.transport.connect(other.call("metadata"), session=b"link"):
            found = other.run(
                connect + "memory = link.memory([there], nbytes)",
                "from tests.cuda.side import PULL, kvplan, zeros",
                "here = zeros(side); kvplan.execute(PULL, memory, side.local(here))",
                "del memory; link.close(); result = side.contents(here)",
                metadata=metadata,
                there=there,
                nbytes=NBYTES,
            )
            assert np.array_equal(blocks(found), expected(1))
        for session in (b"", b"link", b"another"):  # this end has closed the link
            with pytest.raises(RemoteError, match=r"pidfd_getfd .* let it pass") as caught:
                other.run(
                    "link = side.transport.connect(metadata, session=session)",
                    "link.memory([there], nbytes)",
                    metadata=metadata,
                    session=session,
                    there=there,
                    nbytes=NBYTES,
                )
            assert "LLM_LINK_FAILED" in caught.value.message
    finally:
        other.close()


class Lease:
    """A `BlockLease` with the attributes that memory uses."""

    def __init__(self, slot: int, generation: int) -> None:
        self._word = np.array([slot, generation], np.uint64).tobytes()

    def packed_word(self, transport: str) -> bytes:
        return self._word

    def __str__(self) -> str:
        return "a lease"


class TestRegistering:
    def test_memory_that_other_processes_cannot_map_is_refused(self, side: Side) -> None:
        address = side.expandable()
        with refused(
            "LLM_FEATURE_NOT_ENABLED",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False,backend:native",
        ):
            side.register(address, GRANULE)
        side.free_expandable(address)

    def test_memory_of_two_allocations_is_refused(self, side: Side) -> None:
        address = side.allocate("kvplan", 1)
        with refused("LLM_PARAM_INVALID", "needs memory of device 0"):
            side.register(address, GRANULE + 1)

    def test_host_memory_is_refused(self, side: Side) -> None:
        assert side.transport.reaches == {"host", "device"}
        with refused("LLM_PARAM_INVALID", "needs memory of device 0"):
            side.register(np.zeros(1, np.uint8).ctypes.data, 1)

    def test_device_memory_is_refused_without_a_device(self, other: Other) -> None:
        there = other.call("offer", "kvplan", 1)
        with LocalTransport() as transport:
            assert transport.reaches == {"host"}
            with (
                transport.connect(other.call("metadata")) as link,
                refused("LLM_FEATURE_NOT_ENABLED", "no device that could reach it"),
            ):
                link.memory([there], NBYTES)

    def test_host_and_device_memory_in_one_transfer_are_refused(
        self, side: Side, other: Other
    ) -> None:
        there = other.call("offer", "kvplan", 1)
        host = other.run("""
            import numpy as np
            array = np.zeros(64, np.uint8)
            side.transport.register(array)
            result = array.ctypes.data
        """)
        with (
            side.transport.connect(other.call("metadata")) as link,
            refused("LLM_PARAM_INVALID", "transfer them separately"),
        ):
            link.memory([there, host], 64)

    @WHOSE
    def test_a_peer_that_claims_a_larger_allocation_is_refused(
        self, side: Side, other: Other, whose: Whose
    ) -> None:
        """A copy beyond the end of the memory would lose this process's context."""
        there = other.call("offer", whose, 1)
        document = msgspec.msgpack.decode(other.call("metadata"))
        document["ranges"][0]["allocation"]["nbytes"] = 2 * GRANULE
        document["ranges"][0]["nbytes"] = 2 * GRANULE
        with side.transport.connect(msgspec.msgpack.encode(document)) as link:
            with pytest.raises(LLMException) as caught:
                link.memory([there], 2 * GRANULE)
            assert caught.value.status_code in (
                LLMStatusCode.LLM_PARAM_INVALID,
                LLMStatusCode.LLM_FAILED,
            )


@WHOSE
class TestToItself:
    """Two engines of one process: the memory is used in place."""

    def test_blocks_are_copied_in_place(self, side: Side, whose: Whose, sim_log: Log) -> None:
        there = side.offer(whose, 1)
        here = zeros(side)
        with side.transport.connect(side.metadata()) as link:
            memory = link.memory([there], NBYTES)
            assert memory.addresses[0] == there
            kvplan.execute(PULL, memory, side.local(here))
            del memory
        assert np.array_equal(blocks(side.contents(here)), expected(1))
        assert sim_log.calls("cuMemImportFromShareableHandle", "cuIpcOpenMemHandle_v2") == []

    def test_overlaps_are_refused(self, side: Side, whose: Whose) -> None:
        there = side.offer(whose, 1)
        plan = kvplan.plan(Transfer(Rows(desc(), [0, 1]), Rows(desc(), [1, 2])), local="dst")
        with (
            side.transport.connect(side.metadata()) as link,
            refused("LLM_PARAM_INVALID", "src and dst overlap"),
        ):
            kvplan.execute(plan, link.memory([there], NBYTES), side.local(there))
