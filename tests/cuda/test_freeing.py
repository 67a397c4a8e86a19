"""Tests that freeing memory does not wait for pending work of the context.

Each test runs in a process of its own, because a call that waits for the event would never return.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cuda_sim.simulator import CudaControls

DEADLINE_S = 60

BEGIN = """
import gc
import time
from kvnative._cuda import CudaLibrary
from kvnative._backend import KVN_CANCELLED
from kvnative._executor import Executor
from tests.ascend.acl_cases import between
from tests.cuda_sim.simulator import controls
from tests.datadist.layers import wait_until
from tests.device.compute import compute_on, handle_of

GRANULE = 2 << 20
simulator = controls()
device = CudaLibrary.load().device(0)
compute = compute_on(simulator, 0)
device.allocate(GRANULE)  # and free it: the thread is there
before = device.memory()[0]
"""

BEHIND_AN_EVENT = """
executor = Executor(device.backend("device_to_device"))
case = between(device, simulator, "device_to_device", [100] * 20)
compute.hold()
task = executor.submit(case.descriptors, after=device.take_event(handle_of(compute.event())))
task.wait(50, give_up=False)
assert task.cancel().status == KVN_CANCELLED
full = device.memory()[0]
del case, task
gc.collect()
assert device.memory()[0] == full, "a kernel of the program may still read it"
device.allocate(GRANULE)  # and free it: all of this goes on
assert device.memory()[0] == full - GRANULE
compute.release()
wait_until(lambda: device.memory()[0] == full + 2 * GRANULE)

def is_freed_on_return():
    device.allocate(GRANULE)
    return device.memory()[0] == full + 2 * GRANULE

wait_until(is_freed_on_return)
in_time = sum(is_freed_on_return() for _ in range(50))
assert in_time > 25, "late work is not held against later frees"
"""

CLOSED = """
buffers = [device.allocate(GRANULE) for _ in range(3)]
compute.hold()
compute.event()
buffers.clear()
device.close()
del device
gc.collect()
assert simulator.left()["handles"] == 3
compute.release()
wait_until(lambda: "handles" not in simulator.left())
"""

IN_A_ROW = """
buffers = [device.allocate(GRANULE) for _ in range(20)]
compute.hold()
compute.event()
began = time.monotonic()
buffers.pop()
first_s = time.monotonic() - began
buffers.clear()
assert time.monotonic() - began < 5 * first_s, "each of them waited"
compute.release()
wait_until(lambda: device.memory()[0] == before)
"""

PLAIN = """
buffer = device.allocate(GRANULE)
compute.hold()
compute.event()
del buffer
assert device.memory()[0] < before
compute.release()
wait_until(lambda: device.memory()[0] == before)
"""

END = """
assert simulator.violations() == 0, simulator.last_violation()
"""


@pytest.mark.parametrize(
    ("program", "settings"),
    [
        pytest.param(BEHIND_AN_EVENT, {}, id="behind an event"),
        pytest.param(CLOSED, {}, id="the device is closed"),
        pytest.param(IN_A_ROW, {}, id="several in a row"),
        pytest.param(PLAIN, {"KVSIM_CUDA_VIRTUAL": "0"}, id="without virtual memory"),
    ],
)
def test_no_call_waits_for_an_event_that_does_not_come(
    cuda_simulator: CudaControls, program: str, settings: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program + END],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
