"""GPU memory of another process on this host, by transport local: mapped, and copied one-sided."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

import kvplan
from kvnative._backend import KVN_UNMAPPED, ThreadPool
from kvnative._cuda import CopyTuning, tune_copies
from kvnative._executor import Executor
from kvnative._lower import lower
from kvplan import LLMException, LLMStatusCode, Placement, Rows, Transfer, Transfers
from kvplan.device.device import CopyDirection
from kvplan.execution import HostMemory
from kvplan.transport.local import LocalTransport
from tests.ascend.simulator import Log
from tests.cuda.side import (
    BLOCK,
    BLOCKS,
    GRANULE,
    NBYTES,
    Other,
    Side,
    Whose,
    blocks,
    desc,
    pattern,
)
from tests.cuda_sim.simulator import CudaControls
from tests.datadist.layers import wait_until
from tests.device.compute import Compute, compute_on, handle_of
from tests.support.held import Held
from tests.support.peer import RemoteError
from tests.support.refusals import refused
from tests.support.rights import denying

PULL = kvplan.plan(Transfer(Rows(desc(), [1, 6, 0]), Rows(desc(), [0, 3, 7])), local="dst")
PUSH = kvplan.plan(Transfer(Rows(desc(), [1, 6, 0]), Rows(desc(), [0, 3, 7])), local="src")
SINGLE = CopyTuning(0, 0, 0)
COPIES = ("cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "cuLaunchKernel")
WHOSE = pytest.mark.parametrize("whose", ["kvplan", "program"])


@pytest.fixture
def side(cuda_simulator: CudaControls) -> Iterator[Side]:
    """This process, on device 0; nothing may be left."""
    side = Side(0)
    yield side
    assert side.close() == {}


@pytest.fixture(scope="module")
def process_of_other() -> Iterator[list[Other]]:
    """A process that tests leave as it was; to start one takes longer than most of them."""
    kept: list[Other] = []
    yield kept
    for item in kept:
        item.close()


@pytest.fixture
def other(cuda_simulator: CudaControls, process_of_other: list[Other]) -> Iterator[Other]:
    """The owner of memory, on device 0 too; nothing may be left there."""
    if process_of_other and not process_of_other[0].dead:
        other = process_of_other[0]
        other.run("side = Side(0)")
    else:
        process_of_other[:] = [other := Other()]
    yield other
    if other.dead:
        other.close()
    else:
        assert other.call("close") == {}


def expected(seed: int) -> np.ndarray:
    """What `PULL` and `PUSH` make of zeros."""
    made = np.zeros((BLOCKS, BLOCK), np.uint8)
    made[[0, 3, 7]] = blocks(pattern(seed))[[1, 6, 0]]
    return made


def zeros(side: Side) -> int:
    address = side.allocate("kvplan", 0)
    side.device.write(address, bytes(NBYTES))
    return address


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

    def test_a_part_of_an_allocation(self, side: Side, other: Other, whose: Whose) -> None:
        part = 3 * BLOCK, NBYTES
        there = other.call("offer", whose, 1, 2 * NBYTES, part=part) + part[0]
        here = zeros(side)
        with side.transport.connect(other.call("metadata")) as link:
            kvplan.execute(PULL, link.memory([there], NBYTES), side.local(here))
            with refused("LLM_KV_CACHE_NOT_EXIST", "is not inside one range"):
                link.memory([there - BLOCK], BLOCK)
        found = blocks(pattern(1, 2 * NBYTES)[part[0] : part[0] + NBYTES])
        assert np.array_equal(blocks(side.contents(here))[[0, 3, 7]], found[[1, 6, 0]])

    def test_an_allocation_is_mapped_once_a_link(
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

    def test_a_read_only_registration(self, side: Side, other: Other, whose: Whose) -> None:
        there = other.call("offer", whose, 1, writable=False)
        with side.transport.connect(other.call("metadata")) as link:
            link.memory([there], NBYTES)
            with refused("LLM_PARAM_INVALID", "writable=False"):
                link.memory([there], NBYTES, writable=True)

    def test_a_released_lease(self, side: Side, other: Other, whose: Whose) -> None:
        there = other.call("offer", whose, 1)
        slot, generation = other.run("result = side.transport.begin_lease()")
        with side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES).leased([Lease(slot, generation)])
            here = side.local(zeros(side))
            kvplan.execute(PULL, memory, here)
            other.run("side.transport.end_leases([lease])", lease=(slot, generation))
            with refused("LLM_KV_CACHE_NOT_EXIST", "a lease was released"):
                kvplan.execute(PULL, memory, here)

    def test_a_mapping_goes_with_its_last_user(
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
    """As in a container of Docker without CAP_SYS_PTRACE: the owner sends them."""
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
                "from tests.cuda.test_shared_memory import PULL, kvplan, zeros",
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
    """As `BlockLease`, as far as memory asks it."""

    def __init__(self, slot: int, generation: int) -> None:
        self._word = np.array([slot, generation], np.uint64).tobytes()

    def packed_word(self, transport: str) -> bytes:
        return self._word

    def __str__(self) -> str:
        return "a lease"


class TestInFlight:
    """Copies that last: `hang` holds them until the test lets them go on."""

    def begin(
        self, simulator: CudaControls, transfers: Transfers, log: Log, *task: object
    ) -> kvplan.TransferTask:
        """Submit one; on return its copy is on a stream, and hangs."""
        simulator.add_fault(*(f"{copy}:1=hang" for copy in COPIES))
        log.restart()
        made = transfers.submit(*task)  # type: ignore[arg-type]
        wait_until(lambda: bool(log.calls(*COPIES)))
        simulator.clear_faults()
        return made

    @WHOSE
    @pytest.mark.parametrize("pulls", [True, False])
    def test_the_owner_is_killed(
        self,
        side: Side,
        other: Other,
        whose: Whose,
        pulls: bool,
        cuda_simulator: CudaControls,
        sim_log: Log,
    ) -> None:
        there = other.call("offer", whose, 1)
        here = side.local(zeros(side))
        with Transfers(1) as transfers, side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES, writable=not pulls)
            sides = (PULL, memory, here) if pulls else (PUSH, here, memory)
            task = self.begin(cuda_simulator, transfers, sim_log, *sides)
            other.kill()
            cuda_simulator.end_hangs()
            with refused("LLM_LINK_FAILED", f"process {other.pid} "):
                task.wait()
            with refused("LLM_LINK_FAILED", f"process {other.pid} has exited"):
                link.memory([there], NBYTES)

    def test_kvplans_own_memory_is_freed_while_it_is_read(
        self, side: Side, other: Other, cuda_simulator: CudaControls, sim_log: Log
    ) -> None:
        """The owner does not wait: what is mapped here stays until it is unmapped."""
        there = other.call("offer", "kvplan", 1, writable=False)
        here = side.local(zeros(side))
        with Transfers(1) as transfers, side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES)
            task = self.begin(cuda_simulator, transfers, sim_log, PULL, memory, here)
            assert other.call("deregister", there) == []
            other.call("free", there)
            cuda_simulator.end_hangs()
            with refused("LLM_KV_CACHE_NOT_EXIST", "has deregistered"):
                task.wait()

    @pytest.mark.parametrize(
        ("whose", "pulls"), [("program", True), ("program", False), ("kvplan", False)]
    )
    def test_the_owner_waits_for_transfers_that_use_its_memory(
        self,
        side: Side,
        other: Other,
        whose: Whose,
        pulls: bool,
        cuda_simulator: CudaControls,
        sim_log: Log,
    ) -> None:
        """It is announced; else the owner would free it under the copy, which is a violation."""
        lasts_ns = 50_000_000
        tune_copies(side.device.native, "device_to_device", SINGLE)  # nothing stops the driver's
        there = other.call("offer", whose, 1, NBYTES, writable=not pulls)
        here = side.local(zeros(side))
        with ThreadPoolExecutor() as thread, side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES, writable=not pulls)
            sides = (PULL, memory, here) if pulls else (PUSH, here, memory)
            sim_log.restart()
            cuda_simulator.set("latency_us", lasts_ns // 1000)
            try:
                begun = time.monotonic_ns()
                done = thread.submit(kvplan.execute, *sides)
                wait_until(lambda: bool(sim_log.calls(*COPIES)))
                messages, ended = other.run(
                    """
                    import time
                    messages = side.deregister(there)
                    result = messages, time.monotonic_ns()
                    if not messages:
                        side.free(there)
                    """,
                    there=there,
                )
                assert messages or ended - begun >= lasts_ns
                with refused("LLM_KV_CACHE_NOT_EXIST", "has deregistered"):
                    done.result()
            finally:
                cuda_simulator.set("latency_us", 0)

    @pytest.mark.parametrize("inside", [True, False], ids=["device", "pageable memory"])
    def test_an_owner_waits_for_work_on_the_stream_only(
        self,
        side: Side,
        other: Other,
        inside: bool,
        cuda_simulator: CudaControls,
        sim_log: Log,
    ) -> None:
        """Not for two seconds of the driver's copies: it would say so after one."""
        each, count, per_second = 16 << 20, 256, 2 << 30
        there = other.call("offer", "program", 1, each)
        here = side.local(side.allocate("program", 2, each)) if inside else None
        memory_here = here or HostMemory.from_arrays([np.zeros(each, np.uint8)])
        way: CopyDirection = "device_to_device" if inside else "device_to_host"
        tune_copies(side.device.native, way, SINGLE)
        with side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], each)
            backend = memory.backend(ThreadPool(1), "get", memory_here)
            assert backend is not None
            executor = Executor(backend)
            none = np.zeros(count, np.uint64)
            descriptors = lower(
                none, none, none + np.uint64(each), memory.addresses, memory_here.addresses
            )
            sim_log.restart()
            cuda_simulator.set("bandwidth", per_second)
            try:
                task = executor.submit(descriptors, (memory, memory_here))
                wait_until(lambda: bool(sim_log.calls(*COPIES)))
                assert other.call("deregister", there) == []
            finally:
                cuda_simulator.set("bandwidth", 0)
            report = task.wait()
            assert report.status == KVN_UNMAPPED
            assert "has deregistered the memory" in report.message
            assert report.bytes_done < count * each // 2
            del memory, task, executor, backend
        gc.collect()

    def test_a_push_that_is_over_holds_up_no_owner(self, side: Side, other: Other) -> None:
        """Though its outcome was not asked for."""
        there = other.call("offer", "kvplan", 1)
        here = side.local(side.allocate("kvplan", 2))
        with Transfers(1) as transfers, side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES, writable=True)
            task = transfers.submit(PUSH, here, memory)
            assert other.call("deregister", there) == [], "it would be named after a second"
            with refused("LLM_KV_CACHE_NOT_EXIST", "has deregistered"):
                task.wait()

    def test_an_owner_that_frees_it_stops_a_launch(
        self, side: Side, other: Other, cuda_simulator: CudaControls, sim_log: Log
    ) -> None:
        """Which hangs here, and would else be waited for in vain."""
        there = other.call("offer", "program", 1)
        here = side.local(zeros(side))
        with Transfers(1) as transfers, side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES)
            task = self.begin(cuda_simulator, transfers, sim_log, PULL, memory, here)
            assert sim_log.calls("cuLaunchKernel")
            assert other.call("deregister", there) == []
            with refused("LLM_KV_CACHE_NOT_EXIST", f"peer {other.pid} has deregistered"):
                task.wait(60_000)
            cuda_simulator.end_hangs()
            del memory, task
        gc.collect()

    def test_an_owner_that_waits_too_long_says_so(
        self, side: Side, other: Other, cuda_simulator: CudaControls, sim_log: Log
    ) -> None:
        there = other.call("offer", "program", 1)
        here = side.local(zeros(side))
        tune_copies(side.device.native, "device_to_device", SINGLE)
        with Transfers(1) as transfers, side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES)
            task = self.begin(cuda_simulator, transfers, sim_log, PULL, memory, here)
            (message,) = other.call("deregister", there)
            assert "do not free it before the transfer or that process has ended" in message
            cuda_simulator.end_hangs()
            with refused("LLM_KV_CACHE_NOT_EXIST", "has deregistered"):
                task.wait()
        del memory
        gc.collect()


def test_programs_that_are_executed_do_not_keep_the_memory(side: Side) -> None:
    """It would stay allocated for as long as they run, whatever this process frees."""
    before = Held.now()
    side.offer("kvplan", 1)
    before.check_new_are_not_inherited()


class TestHeld:
    """What waits for an event of this side stands on a stream there, announced if it writes."""

    @pytest.fixture
    def compute(self, side: Side, cuda_simulator: CudaControls) -> Iterator[Compute]:
        made = compute_on(cuda_simulator, side.device_id)
        yield made
        made.close()
        side.enter()

    def begin(
        self, transfers: Transfers, log: Log, side: Side, compute: Compute, *task: object
    ) -> kvplan.TransferTask:
        """Submit one behind the compute; on return its copy is on a stream, and waits."""
        compute.hold()
        log.restart()
        after = side.device.native.take_event(handle_of(compute.event()))
        made = transfers.submit(*task, after=after)  # type: ignore[arg-type]
        wait_until(lambda: bool(log.calls("cuLaunchKernel")))
        return made

    @WHOSE
    @pytest.mark.parametrize("pulls", [True, False])
    def test_the_device_keeps_the_order(
        self, side: Side, other: Other, whose: Whose, pulls: bool, compute: Compute, sim_log: Log
    ) -> None:
        there = other.call("offer", whose, 1)
        here = zeros(side) if pulls else side.allocate("kvplan", 2)
        if not pulls:
            other.run("side.device.write(there, bytes(nbytes))", there=there, nbytes=NBYTES)
        with Transfers(1) as transfers, side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES, writable=not pulls)
            mine = side.local(here)
            sides = (PULL, memory, mine) if pulls else (PUSH, mine, memory)
            task = self.begin(transfers, sim_log, side, compute, *sides)
            assert not task.wait_done(20)
            issued = len(sim_log.calls(*COPIES))
            compute.release()
            task.wait(60_000)
            assert len(sim_log.calls(*COPIES)) == issued == 1
            del memory, task
        moved = side.contents(here) if pulls else other.call("contents", there)
        assert np.array_equal(blocks(moved), expected(1 if pulls else 2))

    @pytest.mark.parametrize(
        ("whose", "pulls"), [("kvplan", False), ("program", False), ("program", True)]
    )
    def test_an_owner_that_frees_it_ends_it(
        self, side: Side, other: Other, whose: Whose, pulls: bool, compute: Compute, sim_log: Log
    ) -> None:
        """Within milliseconds: an owner that waits for a second says so."""
        there = other.call("offer", whose, 1, writable=not pulls)
        here = side.allocate("kvplan", 2)
        with Transfers(1) as transfers, side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES, writable=not pulls)
            mine = side.local(here)
            sides = (PULL, memory, mine) if pulls else (PUSH, mine, memory)
            task = self.begin(transfers, sim_log, side, compute, *sides)
            assert other.call("deregister", there) == []
            with refused("LLM_KV_CACHE_NOT_EXIST", f"peer {other.pid} has deregistered"):
                task.wait(60_000)  # though the event has not come
            before = other.call("contents", there), side.contents(here)
            compute.release()
            compute.settle()
            assert (other.call("contents", there), side.contents(here)) == before
            del memory, task

    def test_an_owner_frees_other_memory_meanwhile(
        self, side: Side, other: Other, compute: Compute, sim_log: Log
    ) -> None:
        """All announcements that it finds are waited for; those of what is held are renewed."""
        there = other.call("offer", "kvplan", 1)
        here = side.allocate("kvplan", 2)
        with Transfers(1) as transfers, side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES, writable=True)
            task = self.begin(transfers, sim_log, side, compute, PUSH, side.local(here), memory)
            for _ in range(3):
                another = other.call("offer", "kvplan", 3)
                assert other.call("deregister", another) == []
                other.call("free", another)
            assert not task.done
            compute.release()
            task.wait(60_000)
            del memory, task
        moved = blocks(other.call("contents", there))
        assert np.array_equal(moved[[0, 3, 7]], blocks(pattern(2))[[1, 6, 0]])

    def test_more_than_there_are_streams_and_places_for(
        self, side: Side, other: Other, compute: Compute, sim_log: Log
    ) -> None:
        """62 can be announced at one time; others of the link find a place all the same."""
        there = other.call("offer", "kvplan", 1)
        here = side.allocate("kvplan", 2)
        with Transfers(1) as transfers, side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES, writable=True)
            sides = (PUSH, side.local(here), memory)
            tasks = [self.begin(transfers, sim_log, side, compute, *sides) for _ in range(4)]
            after = side.device.native.take_event(handle_of(compute.event()))
            tasks += [transfers.submit(*sides, after=after) for _ in range(70)]
            kvplan.execute(*sides)
            for task in tasks[1::2]:
                task.cancel()
            for _ in range(4):
                compute.release()
            for task in tasks[::2]:
                task.wait(60_000)
            del memory, tasks, sides, task

    def test_the_owner_is_killed(
        self, side: Side, other: Other, compute: Compute, sim_log: Log
    ) -> None:
        there = other.call("offer", "kvplan", 1)
        here = side.allocate("kvplan", 2)
        with Transfers(1) as transfers, side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES, writable=True)
            task = self.begin(transfers, sim_log, side, compute, PUSH, side.local(here), memory)
            other.kill()
            compute.release()
            with refused("LLM_LINK_FAILED", f"process {other.pid} "):
                task.wait(60_000)
            del memory, task


class TestRegistering:
    def test_memory_that_no_other_process_can_map(self, side: Side) -> None:
        address = side.expandable()
        with refused(
            "LLM_FEATURE_NOT_ENABLED",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False,backend:native",
        ):
            side.register(address, GRANULE)
        side.free_expandable(address)

    def test_memory_of_two_allocations(self, side: Side) -> None:
        address = side.allocate("kvplan", 1)
        with refused("LLM_PARAM_INVALID", "needs memory of device 0"):
            side.register(address, GRANULE + 1)

    def test_memory_of_the_host(self, side: Side) -> None:
        assert side.transport.reaches == {"host", "device"}
        with refused("LLM_PARAM_INVALID", "needs memory of device 0"):
            side.register(np.zeros(1, np.uint8).ctypes.data, 1)

    def test_a_transport_without_device(self, other: Other) -> None:
        there = other.call("offer", "kvplan", 1)
        with LocalTransport() as transport:
            assert transport.reaches == {"host"}
            with (
                transport.connect(other.call("metadata")) as link,
                refused("LLM_FEATURE_NOT_ENABLED", "no device that could reach it"),
            ):
                link.memory([there], NBYTES)

    def test_host_and_device_at_once(self, side: Side, other: Other) -> None:
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
    def test_a_peer_that_claims_a_larger_allocation(
        self, side: Side, other: Other, whose: Whose
    ) -> None:
        """A copy beyond what is there would be the end of this process's context."""
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
    """Two engines of one process: the memory is used where it is."""

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

    def test_overlaps_show(self, side: Side, whose: Whose) -> None:
        there = side.offer(whose, 1)
        plan = kvplan.plan(Transfer(Rows(desc(), [0, 1]), Rows(desc(), [1, 2])), local="dst")
        with (
            side.transport.connect(side.metadata()) as link,
            refused("LLM_PARAM_INVALID", "src and dst overlap"),
        ):
            kvplan.execute(plan, link.memory([there], NBYTES), side.local(there))
