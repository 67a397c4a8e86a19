"""Engines on a simulated CUDA device each, linked over TCP, or by local on this host."""

from __future__ import annotations

from kvplan.device.cuda import CudaDevice
from tests.ascend.device import OnDevice, OnDeviceOverTcp, SimulatedAscend
from tests.cuda_sim.simulator import controls


class OnCudaOverTcp(OnDeviceOverTcp):
    """The same engines as on Ascend devices."""

    accelerator = "cuda"


class OnCuda(OnDevice):
    """Those, linked by what is preferred."""

    accelerator = "cuda"


class SimulatedCudaOverTcp(SimulatedAscend):
    """Devices that the stand-in for CUDA's driver stands in for."""

    name = "cuda_tcp"
    transport = "tcp"
    engine = OnCudaOverTcp
    device = CudaDevice

    def left(self) -> dict[str, int]:
        return controls().left()


class SimulatedCuda(SimulatedCudaOverTcp):
    """Those of one host, whose memory peers map."""

    name = "cuda"
    transport = "local"
    engine = OnCuda
