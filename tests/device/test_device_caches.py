"""Caches in device memory: their allocation, their content, and the release of all resources."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import (
    Cache,
    CacheDesc,
    DataType,
    LlmDataDist,
    LlmRole,
    Options,
    Placement,
    PoolConfig,
    Rows,
    Transfer,
)
from tests.ascend.simulator import Controls, Log
from tests.device.engines import DEVICE, HOST, contents, engine_on, kind_of, same
from tests.support.left import check_nothing_left
from tests.support.refusals import refused

POOL = 1 << 16


def test_a_pool_is_one_allocation_on_the_device(simulator: Controls, sim_log: Log) -> None:
    with engine_on(simulator, mem_pool_config=PoolConfig(POOL, page_shift=12)) as datadist:
        call = kind_of(simulator).allocate
        assert simulator.left()["device_bytes"] == kind_of(simulator).taken(POOL)
        assert sim_log.counts(call) == {call: 1}
        caches = [datadist.allocate_cache(DEVICE) for _ in range(3)]
        first = min(cache.tensor_addrs[0] for cache in caches)
        assert all(
            first <= address < first + POOL for each in caches for address in each.tensor_addrs
        )
        assert sim_log.counts(call) == {call: 1}
        with refused("LLM_OUT_OF_MEMORY", "the pool of 65536 bytes"):
            datadist.allocate_cache(CacheDesc(1, (1, POOL), DataType.DT_INT8))
        datadist.deallocate_cache(caches.pop())
        assert datadist.allocate_cache(DEVICE)


def test_without_a_pool_each_cache_has_its_own(simulator: Controls) -> None:
    one = kind_of(simulator).taken(DEVICE.nbytes)
    with engine_on(simulator) as datadist:
        first, second = datadist.allocate_cache(DEVICE), datadist.allocate_cache(DEVICE)
        assert simulator.left()["device_bytes"] == 2 * one
        assert not np.any(datadist.arrays(first, copy=True))
        datadist.deallocate_cache(first)
        assert simulator.left()["device_bytes"] == one
        datadist.deallocate_cache(second)
        assert "device_bytes" not in simulator.left()


def test_caches_of_the_host_are_pinned(simulator: Controls) -> None:
    with engine_on(simulator, host_mem_pool_config=PoolConfig(POOL)) as datadist:
        assert simulator.left()["registered"] == 1
        cache = datadist.allocate_cache(HOST)
        assert datadist.device is not None
        assert datadist.device.native.locate(cache.tensor_addrs[0])[0] == "host"
        datadist.arrays(cache)[1][:] = 7
        assert (datadist.arrays(cache, copy=True)[1] == 7).all()


def test_an_array_over_a_pinned_cache_outlives_the_engine(simulator: Controls) -> None:
    with engine_on(simulator) as datadist:  # at the end of this block, no memory may stay pinned
        array = datadist.arrays(datadist.allocate_cache(HOST))[0]
    array[:] = 3
    assert (array == 3).all()


def test_memory_that_cannot_be_pinned_is_used_unpinned(
    simulator: Controls, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_on(simulator) as datadist:
        kind = kind_of(simulator)
        simulator.add_fault(f"{kind.pin}:1={kind.not_pinned}")
        host, device = datadist.allocate_blocks_cache(HOST), datadist.allocate_blocks_cache(DEVICE)
        assert "slow" in caplog.text
        expected = contents(1)
        datadist.write_cache(host, expected)
        datadist.swap_blocks(host, device, {row: row for row in range(8)})
        assert same(datadist.arrays(device, copy=True), expected)


def test_pinned_memory_outlives_the_device_that_pinned_it(simulator: Controls) -> None:
    pages = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
    here = pages.ctypes.data, pages.nbytes
    one, other = (kind_of(simulator).device(4) for _ in range(2))
    pinned = one.pin(*here)
    with refused("LLM_PARAM_INVALID", "overlaps"):
        other.pin(*here)
    one.close()
    other.pin(*here).close()
    other.close()
    assert pinned.nbytes == pages.nbytes  # the memory stayed pinned all the time


def test_a_full_device_refuses_allocations_until_memory_is_free(simulator: Controls) -> None:
    before = simulator.left()
    kind = kind_of(simulator)
    fault = f"{kind.allocate}:1={kind.full}"
    message = f"of device 3, which has .* bytes free.*{kind.allocate}: {kind.full} "
    with engine_on(simulator) as datadist:
        simulator.add_fault(fault)
        with refused("LLM_DEVICE_OUT_OF_MEMORY", message):
            datadist.allocate_cache(DEVICE)
        assert datadist.allocate_cache(DEVICE).cache_id == 2
    simulator.add_fault(fault)
    with (
        refused("LLM_DEVICE_OUT_OF_MEMORY", "device 3"),
        engine_on(simulator, mem_pool_config=PoolConfig(POOL)),
    ):
        pass
    gc.collect()
    check_nothing_left(simulator.left, before)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (DataType.DT_FLOAT16, np.float16),
        (DataType.DT_BF16, np.uint16),
        (DataType.DT_INT4, np.uint8),
        (DataType.DT_COMPLEX128, np.complex128),
    ],
)
@pytest.mark.parametrize("placement", list(Placement))
def test_metadata_round_trips(
    simulator: Controls, kind: DataType, dtype: Any, placement: Placement
) -> None:
    cache_desc = CacheDesc(2, (1, 3, 4, 6), kind, placement, batch_dim_index=1)
    shape = (1, 3, 12) if kind is DataType.DT_INT4 else cache_desc.shape
    given = [np.arange(np.prod(shape)).reshape(shape).astype(dtype) + i for i in range(2)]
    with engine_on(simulator) as datadist:
        cache = datadist.allocate_cache(cache_desc)
        datadist.write_cache(cache, np.stack(given))
        assert same(datadist.arrays(cache, copy=True), given)
        datadist.write_cache(cache, [np.asfortranarray(item[:, ::-1]) for item in given])
        assert same(datadist.arrays(cache, copy=True), [item[:, ::-1] for item in given])


@pytest.mark.parametrize("of", [DEVICE, HOST], ids=["device", "host"])
def test_bytes_that_do_not_fit_are_not_written(simulator: Controls, of: CacheDesc) -> None:
    good = contents(1)
    with engine_on(simulator) as datadist:
        cache = datadist.allocate_cache(of)
        with refused("LLM_PARAM_INVALID", "arrays has 2 elements; num_tensors=3"):
            datadist.write_cache(cache, good[:2])
        with refused("LLM_PARAM_INVALID", r"arrays\[2\] has shape \(7, 96\) and type uint16"):
            datadist.write_cache(cache, [*good[:2], good[2][:7]])
        with refused(
            "LLM_PARAM_INVALID", r"arrays\[1\] .* type uint32; .* shape \(8, 96\) and type uint16"
        ):
            datadist.write_cache(cache, [good[0], good[1].astype(np.uint32), good[2]])
        with pytest.raises(TypeError, match="not str"):
            datadist.write_cache(cache, "abc")
        assert not np.any(datadist.arrays(cache, copy=True))
        with refused("LLM_KV_CACHE_NOT_EXIST", "cache_id=9"):
            datadist.arrays(Cache(of, 9), copy=True)


def test_a_read_only_buffer_is_not_written(simulator: Controls) -> None:
    with engine_on(simulator) as datadist:
        arrays = contents(1)
        for array in arrays:
            array.flags.writeable = False
        cache = datadist.register_cache(HOST, arrays)
        with refused("LLM_PARAM_INVALID", "writable=False"):
            datadist.write_cache(cache, contents(2))


def test_arrays_cannot_view_device_memory(simulator: Controls) -> None:
    with engine_on(simulator) as datadist:
        cache = datadist.allocate_cache(DEVICE)
        with refused("LLM_FEATURE_NOT_ENABLED", "device 3, which arrays cannot view.*copy=True"):
            datadist.arrays(cache)
        # The address is invalid on the host even if a caller passes it as host memory.
        with refused("LLM_PARAM_INVALID", "not mapped|not readable"):
            kvplan.execute(
                kvplan.plan(Transfer(Rows(DEVICE), Rows(DEVICE))),
                contents(1),
                Cache(DEVICE, -1, cache.tensor_addrs),
            )


def test_a_device_error_names_the_call(simulator: Controls) -> None:
    with engine_on(simulator) as datadist:
        cache = datadist.allocate_cache(DEVICE)
        kind = kind_of(simulator)
        simulator.add_fault(f"{kind.read}:1={kind.not_read}")
        message = f"device 3 at 0x[0-9a-f]+: {kind.read}: {kind.not_read} "
        with refused("LLM_DEVICE_MEM_ERROR", message):
            datadist.arrays(cache, copy=True)
        assert not np.any(datadist.arrays(cache, copy=True))


class TestChoice:
    def test_none_makes_no_device_calls(self, simulator: Controls, sim_log: Log) -> None:
        with LlmDataDist(1, LlmRole.MIX) as datadist:
            datadist.initialize({"kvplan.accelerator": "none"})
            assert datadist.device is None
            assert datadist.arrays(datadist.allocate_cache(DEVICE))
        assert sim_log.calls() == []

    def test_auto_uses_the_available_device(self, simulator: Controls) -> None:
        with LlmDataDist(1, LlmRole.MIX) as datadist:
            datadist.initialize({"llm.DeviceId": "5"})
            assert datadist.device is not None
            assert datadist.device.id == 5

    def test_auto_uses_the_host_if_the_device_does_not_exist(
        self, simulator: Controls, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        with LlmDataDist(1, LlmRole.MIX) as datadist:
            datadist.initialize(Options(device_id=99))
            assert datadist.device is None
        assert "device_id=99 is out of range [0, 8)" in caplog.text

    @pytest.mark.parametrize("place", ["", "/nowhere/library.so"])
    @pytest.mark.parametrize(
        ("accelerator", "library"), [("ascend", "runtime library"), ("cuda", "driver library")]
    )
    def test_a_requested_accelerator_without_its_library_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, accelerator: str, library: str, place: str
    ) -> None:
        monkeypatch.setenv(f"KVPLAN_{accelerator.upper()}_LIBRARY", place)
        datadist = LlmDataDist(1, LlmRole.MIX)
        message = f"accelerator='{accelerator}': no {library}.*{place}"
        with refused("LLM_FEATURE_NOT_ENABLED", message):
            datadist.initialize(Options(accelerator=accelerator))
        datadist.initialize()
        datadist.finalize()

    def test_unknown_accelerators_and_contexts_are_refused(self) -> None:
        message = "accelerator.*'npu' must be one of auto, none, ascend, cuda"
        with refused("LLM_PARAM_INVALID", message):
            Options(accelerator="npu")
        with refused("LLM_PARAM_INVALID", "cuda_context.*'mine' must be one of primary, own"):
            Options(cuda_context="mine")

    def test_engines_share_a_device_until_the_last_one_ends(self, simulator: Controls) -> None:
        with engine_on(simulator, cluster_id=1) as first:
            with LlmDataDist(2, LlmRole.MIX) as second:
                second.initialize(
                    Options(accelerator=simulator.accelerator, device_id=3, transport="local")
                )
                assert first.device is not None
                assert second.device is not None
                assert first.device.native is second.device.native
            cache = first.allocate_cache(DEVICE)
            first.copy_cache(cache, cache, 0, 1)


def test_a_device_works_without_an_engine(simulator: Controls) -> None:
    before = simulator.left()
    device = kind_of(simulator).device(4)
    buffer = device.allocate(100)
    device.write(buffer.address, bytes(range(100)))
    found = bytearray(100)
    device.read(buffer.address, found)
    assert found == bytes(range(100))
    described = device.describe()
    assert (described["id"], described["name"]) == (4, device.name)
    device.close()
    device.close()
    with pytest.raises(kvplan.LLMException, match="closed"):
        device.read(buffer.address, found)
    del buffer, device
    gc.collect()
    check_nothing_left(simulator.left, before)
