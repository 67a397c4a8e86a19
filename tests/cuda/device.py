"""Engines on a simulated CUDA device each, linked over TCP or by transport local."""

from __future__ import annotations

from kvplan.device.cuda import CudaDevice
from tests.ascend.device import OnDevice, OnDeviceOverTcp, SimulatedAscend
from tests.cuda_sim.simulator import controls


class OnCudaOverTcp(OnDeviceOverTcp):
    """The engines of Ascend devices, on CUDA devices."""

    accelerator = "cuda"


class OnCuda(OnDevice):
    """Engines that are linked by the preferred transport."""

    accelerator = "cuda"


class SimulatedCudaOverTcp(SimulatedAscend):
    """Devices of the stand-in for CUDA's driver, over TCP."""

    name = "cuda_tcp"
    transport = "tcp"
    engine = OnCudaOverTcp
    device = CudaDevice

    def left(self) -> dict[str, int]:
        return controls().left()


class SimulatedCuda(SimulatedCudaOverTcp):
    """Devices of one host, whose memory peers map."""

    name = "cuda"
    transport = "local"
    engine = OnCuda
