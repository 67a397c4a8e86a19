"""Streams that are captured into CUDA graphs: they cannot wait for transfers."""

from __future__ import annotations

import ctypes

import pytest

from kvnative._backend import KVN_INVALID, KVN_OK
from kvnative._cuda import CudaError
from kvnative._device import Device
from tests.ascend.acl_cases import FOREVER
from tests.cuda.streams import block, compute, held, refusal
from tests.cuda_sim.cuda_library import Cuda
from tests.cuda_sim.simulator import CudaControls
from tests.device.compute import CudaCompute, handle_of

__all__ = ["compute"]


def test_a_captured_stream_is_refused_and_stays_valid(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute
) -> None:
    task, _ = held(device, cuda_simulator)
    with compute.capture():
        report = refusal(task, compute.handle)
        with pytest.raises(CudaError, match="is captured into a CUDA graph") as caught:
            device.take_stream(compute.handle)
    assert (report.status, report.code) == (KVN_INVALID, 900)
    assert "is captured into a CUDA graph" in report.message
    assert (caught.value.status, caught.value.code) == (KVN_INVALID, 900)
    cuda_simulator.end_hangs()
    block(task, compute.handle)
    compute.wait()
    assert task.wait(FOREVER).status == KVN_OK


def test_the_default_stream_is_refused_during_a_capture(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute
) -> None:
    program = Cuda()
    blocking = program.made("cuStreamCreate", 0)
    task, _ = held(device, cuda_simulator)
    with program.capturing(blocking):
        assert refusal(task, 0).code == 900
        with pytest.raises(CudaError, match="is captured into a CUDA graph"):
            device.take_stream(0)
        block(task, compute.handle)  # another stream
    program.ok("cuStreamDestroy_v2", blocking)
    cuda_simulator.end_hangs()
    compute.wait()
    assert task.wait(FOREVER).status == KVN_OK


def test_an_event_of_a_graph_is_refused(device: Device, compute: CudaCompute) -> None:
    program = Cuda()
    event = handle_of(compute.event())
    program.ok("cuStreamBeginCapture_v2", compute.handle, 0)
    compute.record(event)
    with pytest.raises(CudaError, match="recorded on a stream that is captured") as caught:
        device.take_event(event)
    assert (caught.value.status, caught.value.code) == (KVN_INVALID, 907)
    graph = ctypes.c_void_p()
    assert (
        program.cuStreamEndCapture(compute.handle, ctypes.byref(graph)) == 901
    )  # the driver would refuse it otherwise
    compute.record(event)
    device.take_event(event)
