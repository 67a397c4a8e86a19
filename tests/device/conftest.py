"""Fixtures of tests that run on a simulated device of each kind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kvplan import LlmDataDist, PoolConfig
from tests.ascend.device import OnDevice, OnDeviceOverTcp
from tests.ascend.fixtures import sim_folder, sim_log
from tests.ascend.fixtures import simulator as ascend
from tests.ascend.simulator import Controls
from tests.cuda.device import OnCuda
from tests.cuda_sim.simulator import cuda_simulator as cuda
from tests.device.compute import Compute, compute_on
from tests.device.engines import engine_on
from tests.device.pair import Pair

__all__ = ["ascend", "cuda", "sim_folder", "sim_log"]


@pytest.fixture(params=["ascend", "cuda"])
def simulator(request: pytest.FixtureRequest) -> Iterator[Controls]:
    """Controls of the simulated driver and runtime for this process and its children."""
    found: Controls = request.getfixturevalue(request.param)
    yield found
    # Both simulators share one core, which keeps one current context per thread. Objects of one
    # kind that are collected later would change that context under a test of the other kind.
    gc.collect()


@pytest.fixture
def datadist(simulator: Controls) -> Iterator[LlmDataDist]:
    """An engine on a device, with pools for both placements."""
    pools = {"mem_pool_config": PoolConfig(1 << 20), "host_mem_pool_config": PoolConfig(1 << 20)}
    with engine_on(simulator, sync_kv_cache_wait_time=30, **pools) as made:
        yield made
        del made


@pytest.fixture
def compute(simulator: Controls, datadist: LlmDataDist) -> Iterator[Compute]:
    """A program that computes on the engine's device."""
    made = compute_on(simulator)
    yield made
    made.close()


@pytest.fixture(params=["hccl", "tcp"])
def linked(simulator: Controls, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two engines, linked over HCCL, over TCP, or (on CUDA) over the preferred transport."""
    if simulator.accelerator == "cuda" and request.param == "hccl":
        pytest.skip("HCCL is between Ascend devices")
    over_tcp = OnCuda if simulator.accelerator == "cuda" else OnDeviceOverTcp
    made = Pair(simulator, OnDevice if request.param == "hccl" else over_tcp)
    yield made
    made.close()
