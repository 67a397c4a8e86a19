"""Engines on a simulated CUDA device each, linked over TCP, which reaches their memory."""

from __future__ import annotations

from kvplan.device.cuda import CudaDevice
from tests.ascend.device import OnDeviceOverTcp, SimulatedAscend
from tests.cuda_sim.simulator import controls


class OnCuda(OnDeviceOverTcp):
    """The same engines as on Ascend devices."""

    accelerator = "cuda"


class SimulatedCuda(SimulatedAscend):
    """Devices that the stand-in for CUDA's driver stands in for."""

    name = "cuda"
    transport = "tcp"
    engine = OnCuda
    device = CudaDevice

    def left(self) -> dict[str, int]:
        return controls().left()
