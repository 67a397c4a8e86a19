"""Release of memory and devices while copies still wait for an event."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from kvnative._backend import KVN_CANCELLED, KVN_OK
from kvnative._cuda import CudaLibrary
from kvnative._device import Device
from kvnative._executor import Executor
from tests.ascend.acl_cases import Case, between
from tests.ascend.simulator import Log
from tests.cuda.held import begin, take_point
from tests.cuda_sim.simulator import CudaControls
from tests.datadist.layers import wait_until
from tests.device.compute import Compute, handle_of


def run(executor: Executor, case: Case) -> None:
    assert executor.run(case.descriptors).status == KVN_OK
    case.assert_moved()


class TestEnds:
    """Memory and devices that end while a cancelled transfer still waits for its event."""

    def test_in_a_context_of_its_own_memory_is_freed_at_once(
        self, cuda_simulator: CudaControls, device: Device, compute: Compute, sim_log: Log
    ) -> None:
        own = CudaLibrary.load(context="own").device(5)
        executor = Executor(own.backend("device_to_device"))
        case = between(own, cuda_simulator, "device_to_device", [100] * 20)
        compute.hold()
        task = begin(executor, case, own.take_event(handle_of(compute.event())), sim_log)
        assert task.cancel().status == KVN_CANCELLED
        sim_log.restart()
        del case, task
        gc.collect()
        assert len(sim_log.calls("cuMemUnmap")) == 2, "though the event has not come"
        compute.release()

        def has_passed() -> bool:
            """Run a copy, whose launch notices the event; return True if its stream has ended."""
            run(executor, between(own, cuda_simulator, "device_to_device", [100] * 20))
            return bool(sim_log.calls("cuStreamDestroy_v2"))

        wait_until(has_passed)

    @pytest.mark.parametrize("context", ["primary", "own"])
    def test_a_device_may_be_closed_before_the_event_comes(
        self, cuda_simulator: CudaControls, context: str
    ) -> None:
        """The memory that launches read stays, because they begin after the device has ended.

        The test runs in a process of its own, which leaks that memory.
        """
        run_alone(CLOSED_BEFORE, context)

    def test_an_engine_may_end_before_the_event_comes(self, cuda_simulator: CudaControls) -> None:
        run_alone(FINALIZED_BEFORE)

    def test_blocking_launches_are_not_made_behind_an_event(
        self, cuda_simulator: CudaControls
    ) -> None:
        """No launch is made behind an event, because the waiting thread could not be stopped."""
        run_alone(BLOCKING_LAUNCHES, CUDA_LAUNCH_BLOCKING="1")


def run_alone(program: str, *arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


FINALIZED_BEFORE = """
from kvplan import CacheDesc, DataType, LlmDataDist, LLMException, LlmRole
from kvplan import Placement, Rows, Transfer
from tests.cuda_sim.simulator import controls
from tests.device.compute import compute_on

datadist = LlmDataDist(1, LlmRole.MIX)
datadist.initialize({"kvplan.accelerator": "cuda", "kvplan.cuda_context": "own"})
compute = compute_on(controls(), 0)
cache = datadist.allocate_blocks_cache(
    CacheDesc(4, (8, 4096), DataType.DT_UINT8, Placement.DEVICE)
)
compute.hold()
copy = Transfer(Rows(cache, [0]), Rows(cache, [1]))
tasks = [datadist.submit(copy, after=compute.event()) for _ in range(6)]
tasks[0].wait_done(100)
datadist.finalize()
for task in tasks:
    try:
        task.wait(60_000)
    except LLMException:
        continue
    raise AssertionError("it has moved")
compute.release()
compute.wait()
assert controls().violations() == 0, controls().last_violation()
"""
BLOCKING_LAUNCHES = """
from kvnative._cuda import CudaLibrary
from kvnative._backend import KVN_CANCELLED, KVN_OK, KVN_PENDING
from kvnative._executor import Executor
from tests.ascend.acl_cases import between
from tests.cuda_sim.simulator import controls
from tests.device.compute import compute_on, handle_of

simulator = controls()  # loads the stand-in
device = CudaLibrary.load().device(0)
compute = compute_on(simulator, 0)
executor = Executor(device.backend("device_to_device"))
case = between(device, simulator, "device_to_device", [100] * 20)
compute.hold()
point = device.take_event(handle_of(compute.event()))
tasks = [executor.submit(case.descriptors, after=point) for _ in "ab"]
assert all(task.wait(50, give_up=False).status == KVN_PENDING for task in tasks)
assert tasks[0].cancel().status == KVN_CANCELLED
compute.release()
assert tasks[1].wait(60_000).status == KVN_OK
case.assert_moved()
"""
CLOSED_BEFORE = """
import gc, sys, weakref
import numpy as np
from kvnative._cuda import CudaLibrary
from kvnative._backend import KVN_CANCELLED
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._pinned import allocate_host
from tests.cuda_sim.cuda_library import Cuda
from tests.cuda_sim.simulator import controls
from tests.device.compute import compute_on, handle_of

program = Cuda()
program.ok("cuInit", 0)
compute = compute_on(controls(), 0)
device = CudaLibrary.load(context=sys.argv[1]).device(0)
source = allocate_host(device, 30_000)
# In the primary context memory of kvplan's is freed when all work is done.
is_primary = sys.argv[1] == "primary"
buffer = None if is_primary else device.allocate(30_000)
target = program.made("cuMemAlloc_v2", 30_000) if is_primary else buffer.address
before = bytes(program.view(target, 30_000))
offsets = np.arange(300, dtype=np.uint64) * np.uint64(100)
descriptors = Descriptors.from_columns(
    offsets + np.uint64(target), offsets + np.uint64(source.address), np.full(300, 100, np.uint64)
)
compute.hold()
executor = Executor(device.backend("host_to_device"))
task = executor.submit(descriptors, after=device.take_event(handle_of(compute.event())))
task.wait(100, give_up=False)
assert task.cancel().status == KVN_CANCELLED
closed = weakref.ref(device)
device.close()
del executor, task, source, buffer, device
gc.collect()
assert closed() is None
assert controls().left()["modules"] == 1, "its kernel has not begun"
compute.release()
compute.settle()
if is_primary:
    assert bytes(program.view(target, 30_000)) == before
    program.ok("cuMemFree_v2", target)
assert controls().violations() == 0, controls().last_violation()
"""


def test_a_transfer_is_cancelled_just_after_its_event(
    device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
) -> None:
    """In either order, descriptors that are reported as not moved are not touched afterwards."""
    executor = Executor(device.backend("device_to_device"))
    for _ in range(20):
        case = between(device, cuda_simulator, "device_to_device", [1000] * 50)
        compute.hold()
        task = begin(executor, case, take_point(device, compute), sim_log)
        compute.release()
        report = task.cancel()
        seen = case.target.copy()
        assert report.status in (KVN_OK, KVN_CANCELLED)
        compute.settle()
        np.testing.assert_array_equal(case.target, seen)
        if report.status == KVN_OK:
            case.assert_moved()
