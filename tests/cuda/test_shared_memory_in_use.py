"""GPU memory of another process that is freed, or whose owner dies, while transfers use it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import pytest

import kvplan
from kvnative._backend import KVN_UNMAPPED, ThreadPool
from kvnative._cuda import CopyTuning, tune_copies
from kvnative._executor import Executor
from kvnative._lower import lower
from kvplan import Rows, Transfer, Transfers
from kvplan.device.device import CopyDirection
from kvplan.device.memory import DeviceMemory
from kvplan.execution import HostMemory
from tests.ascend.simulator import Log
from tests.cuda.side import (
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
from tests.datadist.layers import wait_until
from tests.device.compute import Compute, compute_on, handle_of
from tests.support.held import Held
from tests.support.refusals import refused

SINGLE = CopyTuning(0, 0, 0)
COPIES = ("cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "cuLaunchKernel")
WHOSE = pytest.mark.parametrize("whose", ["kvplan", "program"])


class TestInFlight:
    """Copies that last: the fault `hang` holds them until the test releases them."""

    def begin(
        self, simulator: CudaControls, transfers: Transfers, log: Log, *task: object
    ) -> kvplan.TransferTask:
        """Submit a transfer; return when its copy is on a stream and hangs."""
        simulator.add_fault(*(f"{copy}:1=hang" for copy in COPIES))
        log.restart()
        made = transfers.submit(*task)  # type: ignore[arg-type]
        wait_until(lambda: bool(log.calls(*COPIES)))
        simulator.clear_faults()
        return made

    @WHOSE
    @pytest.mark.parametrize("pulls", [True, False])
    def test_the_death_of_the_owner_fails_the_transfer(
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
        """The owner does not wait, because mapped memory stays valid until it is unmapped."""
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
        """The owner must not free the memory under the copy, so the transfer is announced."""
        # Copies of the driver cannot be stopped.
        tune_copies(side.device.native, "device_to_device", SINGLE)
        here = side.local(zeros(side))

        def ended(thread: ThreadPoolExecutor, lasts_ns: int) -> Future[None]:
            """Return a transfer during which, or after which, the owner has deregistered."""
            there = other.call("offer", whose, 1, NBYTES, writable=not pulls)
            with side.transport.connect(other.call("metadata")) as link:
                memory = link.memory([there], NBYTES, writable=not pulls)
                sides = (PULL, memory, here) if pulls else (PUSH, here, memory)
                sim_log.restart()
                cuda_simulator.set("latency_us", lasts_ns // 1000)
                begun = time.monotonic_ns()
                done = thread.submit(kvplan.execute, *sides)
                wait_until(lambda: bool(sim_log.calls(*COPIES)))
                messages, deregistered = other.run(
                    """
                    import time
                    messages = side.deregister(there)
                    result = messages, time.monotonic_ns()
                    if not messages:
                        side.free(there)
                    """,
                    there=there,
                )
                assert messages or deregistered - begun >= lasts_ns
                wait([done])
                return done

        with ThreadPoolExecutor() as thread:
            try:
                done, lasts_ns = ended(thread, 50_000_000), 100_000_000
                while done.exception() is None and lasts_ns < 20 * 10**9:
                    done = ended(thread, lasts_ns)  # the owner of a busy machine came too late
                    lasts_ns *= 2
                with refused("LLM_KV_CACHE_NOT_EXIST", "has deregistered"):
                    done.result()
            finally:
                cuda_simulator.set("latency_us", 0)

    @pytest.mark.parametrize("owners", [("kvplan", "program"), ("program", "kvplan")])
    def test_memory_of_both_owners_is_read_in_one_transfer(
        self, side: Side, other: Other, owners: tuple[Whose, Whose]
    ) -> None:
        """The transfer is announced, because the owner waits for reads of one of them."""
        there = [other.call("offer", whose, 1 + i) for i, whose in enumerate(owners)]
        cache = replace(desc(), num_tensors=2)
        plan = kvplan.plan(Transfer(Rows(cache, [1, 6, 0]), Rows(cache, [0, 3, 7])), local="dst")
        here = [zeros(side), zeros(side)]
        with side.transport.connect(other.call("metadata")) as link:
            memory = DeviceMemory.from_addresses(side.device, cache, here, owner=side)
            kvplan.execute(plan, link.memory(there, NBYTES), memory)
        for i, address in enumerate(here):
            np.testing.assert_array_equal(blocks(side.contents(address)), expected(1 + i))

    @pytest.mark.parametrize("inside", [True, False], ids=["device", "pageable memory"])
    def test_an_owner_waits_only_for_work_on_the_stream(
        self,
        side: Side,
        other: Other,
        inside: bool,
        cuda_simulator: CudaControls,
        sim_log: Log,
    ) -> None:
        """The owner must not wait for eight seconds of copies: it would warn after one."""
        each, count, per_second = 16 << 20, 256, 1 << 29
        there = other.call("offer", "program", 1, each)
        here = side.local(side.allocate("program", 2, each)) if inside else None
        memory_here = here or HostMemory.from_arrays([np.zeros(each, np.uint8)])
        way: CopyDirection = "device_to_device" if inside else "device_to_host"
        tune_copies(side.device.native, way, SINGLE)
        with side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], each)
            backend = memory.backend(ThreadPool(1), "get", memory_here, None)
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

    def test_a_finished_push_does_not_delay_its_owner(self, side: Side, other: Other) -> None:
        """The caller has not asked for the outcome yet."""
        there = other.call("offer", "kvplan", 1)
        here = side.local(side.allocate("kvplan", 2))
        with Transfers(1) as transfers, side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES, writable=True)
            task = transfers.submit(PUSH, here, memory)
            assert other.call("deregister", there) == [], "it would be named after a second"
            with refused("LLM_KV_CACHE_NOT_EXIST", "has deregistered"):
                task.wait()

    def test_an_owner_that_frees_memory_stops_a_launch(
        self, side: Side, other: Other, cuda_simulator: CudaControls, sim_log: Log
    ) -> None:
        """The launch hangs here, so waiting for it would never end."""
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

    def test_an_owner_that_waits_too_long_logs_a_warning(
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


def test_executed_programs_do_not_keep_the_memory(side: Side) -> None:
    """Otherwise the memory would stay allocated as long as the programs run, even after a free."""
    before = Held.now()
    side.offer("kvplan", 1)
    before.check_new_are_not_inherited()


class TestHeld:
    """Transfers that wait for this side's event are on a stream, and announced if they write."""

    @pytest.fixture
    def compute(self, side: Side, cuda_simulator: CudaControls) -> Iterator[Compute]:
        made = compute_on(cuda_simulator, side.device_id)
        yield made
        made.close()
        side.enter()

    def begin(
        self, transfers: Transfers, log: Log, side: Side, compute: Compute, *task: object
    ) -> kvplan.TransferTask:
        """Submit a transfer behind the compute; return when its copy is on a stream and waits."""
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
    def test_an_owner_that_frees_memory_ends_a_held_transfer(
        self, side: Side, other: Other, whose: Whose, pulls: bool, compute: Compute, sim_log: Log
    ) -> None:
        """The transfer ends within milliseconds; an owner that waits for a second would warn."""
        there = other.call("offer", whose, 1, writable=not pulls)
        here = side.allocate("kvplan", 2)
        with Transfers(1) as transfers, side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES, writable=not pulls)
            mine = side.local(here)
            sides = (PULL, memory, mine) if pulls else (PUSH, mine, memory)
            task = self.begin(transfers, sim_log, side, compute, *sides)
            assert other.call("deregister", there) == []
            with refused("LLM_KV_CACHE_NOT_EXIST", f"peer {other.pid} has deregistered"):
                task.wait(60_000)  # although the event has not come
            before = other.call("contents", there), side.contents(here)
            compute.release()
            compute.settle()
            assert (other.call("contents", there), side.contents(here)) == before
            del memory, task

    def test_an_owner_frees_other_memory_without_waiting_for_held_transfers(
        self, side: Side, other: Other, compute: Compute, sim_log: Log
    ) -> None:
        """The owner waits for the announcements that it finds; held transfers renew theirs."""
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

    def test_more_transfers_than_streams_and_places_end(
        self, side: Side, other: Other, compute: Compute, sim_log: Log
    ) -> None:
        """At most 62 transfers are announced at a time; others of the link get a place later."""
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

    def test_the_death_of_the_owner_fails_the_transfer(
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
