"""Copies of a device by ACL: the number of calls, and aborts.

Properties that all devices share are tested in tests/device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvplan import LlmDataDist, LLMException, LLMStatusCode, PoolConfig, Rows, Transfer
from kvplan.device.ascend import AscendDevice
from tests.ascend.simulator import Controls, Log
from tests.device.engines import DEVICE, HOST, NUM_TENSORS, ROWS, contents, engine_on, filled, same
from tests.support.refusals import refused


@pytest.fixture
def datadist(simulator: Controls) -> Iterator[LlmDataDist]:
    pools = {"mem_pool_config": PoolConfig(1 << 20), "host_mem_pool_config": PoolConfig(1 << 20)}
    with engine_on(simulator, **pools) as made:
        yield made
        del made


@pytest.fixture
def outside_of_super_pod(simulator: Controls) -> Iterator[None]:
    """The device of an A3 without a super pod."""
    simulator.set("soc", "Ascend910_9391")
    simulator.set("super_pod_id", -1)
    yield
    simulator.set("super_pod_id", 0)
    simulator.set("soc", "Ascend910B1")


def test_an_a3_outside_of_a_super_pod_does_not_name_the_owner_of_memory(
    datadist: LlmDataDist, outside_of_super_pod: None
) -> None:
    """The device's number in the super pod is negative there."""
    device = AscendDevice(3)
    buffer = device.allocate(DEVICE.nbytes)
    addresses = [buffer.address + i * DEVICE.tensor_nbytes for i in range(NUM_TENSORS)]
    cache = datadist.register_blocks_cache(DEVICE, addresses)
    datadist.write_cache(cache, contents(1))
    assert same(datadist.arrays(cache, copy=True), contents(1))
    host = np.zeros((DEVICE.num_tensors, DEVICE.tensor_nbytes), np.uint8)
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "needs memory of device 3"):
        datadist.register_blocks_cache(DEVICE, [array.ctypes.data for array in host])
    datadist.unregister_cache(cache.cache_id)
    del buffer
    device.close()


def test_blocks_of_a_device_are_copied_one_by_one(datadist: LlmDataDist, sim_log: Log) -> None:
    cache = filled(datadist, DEVICE, 1, paged=True)
    sim_log.restart()
    datadist.copy_blocks(cache, {1: [4, 6], 2: [5]})
    copies = sim_log.calls("aclrtMemcpyAsync")
    assert len(copies) == 3 * NUM_TENSORS


def test_a_swap_is_one_batch_and_one_wait(datadist: LlmDataDist, sim_log: Log) -> None:
    host = filled(datadist, HOST, 1, paged=True)
    device = filled(datadist, DEVICE, 2, paged=True)
    sim_log.restart()
    datadist.swap_blocks(host, device, {row: ROWS - 1 - row for row in range(ROWS)})
    waited = [call for call in sim_log.calls("aclrtSynchronizeStreamWithTimeout") if call.code == 0]
    assert (len(sim_log.calls("aclrtMemcpyBatchAsync")), len(waited)) == (1, 1)
    assert same(datadist.arrays(device, copy=True), [content[::-1] for content in contents(1)])


class TestFailures:
    def test_a_copy_that_hangs_times_out(self, datadist: LlmDataDist, simulator: Controls) -> None:
        device = filled(datadist, DEVICE, 1, paged=True)
        host = filled(datadist, HOST, 2, paged=True)
        simulator.add_fault("aclrtMemcpyBatchAsync:1=hang")
        while simulator.faults_left():  # on a busy machine, the deadline may pass before the copy
            with refused("LLM_TIMEOUT", "swap_blocks B2B"):
                datadist.swap_blocks(device, host, {0: 1}, timeout_ms=30)
        datadist.swap_blocks(device, host, {0: 1}, timeout_ms=30_000)
        assert np.array_equal(datadist.arrays(host)[0][1], contents(1)[0][0])

    def test_an_error_names_its_device_and_address(
        self, datadist: LlmDataDist, simulator: Controls
    ) -> None:
        device = filled(datadist, DEVICE, 1, paged=True)
        host = filled(datadist, HOST, 2, paged=True)
        simulator.add_fault("aclrtMemcpyBatchAsync:1=sync:507054")
        with refused("LLM_DEVICE_MEM_ERROR", "507054.*not confirmed") as caught:
            datadist.swap_blocks(host, device, {0: 1})
        assert caught.value.unconfirmed == ((0, NUM_TENSORS),)
        datadist.swap_blocks(host, device, {0: 1})
        assert np.array_equal(datadist.arrays(device, copy=True)[2][1], contents(2)[2][0])

    def test_finalize_stops_hanging_copies(self, simulator: Controls) -> None:
        with engine_on(simulator, sync_kv_cache_wait_time=30) as datadist:
            device = filled(datadist, DEVICE, 1, paged=True)
            host = filled(datadist, HOST, 2, paged=True)
            simulator.add_fault("aclrtMemcpyBatchAsync:1=hang")
            task = datadist.submit(Transfer(Rows(device, [0]), Rows(host, [1])))
            datadist.finalize()
            with pytest.raises(LLMException, match=r"cancel|finalize"):
                task.wait()
            del task
