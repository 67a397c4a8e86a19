"""Tensors on a GPU are registered without a copy.

No framework is installed here: objects with the protocols of frameworks stand in for tensors, over
memory of the stand-in for CUDA.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvplan import CacheDesc, DataType, LlmDataDist, LlmRole, Options, Placement
from tests.cuda.memory import Program
from tests.cuda_sim.simulator import CudaControls
from tests.support.foreign import CudaArray, GpuTensor, TorchTensor
from tests.support.refusals import refused

SHAPE = (8, 3, 2, 4)
NHD = "block token head dim"
SHOWN = np.zeros(SHAPE, np.float16)
DESC = CacheDesc(2, SHAPE, DataType.DT_FLOAT16, kv_tensor_format=NHD)


@pytest.fixture
def program(cuda_simulator: CudaControls) -> Iterator[Program]:
    """A program that allocates in the same process, like torch."""
    made = Program(device_id=1)
    yield made
    made.close()


@pytest.fixture
def datadist(program: Program) -> Iterator[LlmDataDist]:
    with LlmDataDist(1, LlmRole.MIX) as made:
        made.initialize(Options(accelerator="cuda", device_id=1, transport="local"))
        yield made


def torch_like(address: int) -> Any:
    return TorchTensor(SHOWN.copy(), None, "cuda:1", address)


def cupy_like(address: int) -> Any:
    return GpuTensor(SHOWN.copy(), address, device=(2, 1))


def numba_like(address: int) -> Any:
    return CudaArray(SHOWN.copy(), address)


@pytest.mark.parametrize("library", [torch_like, cupy_like, numba_like])
def test_registered_tensors_are_transferred(
    program: Program, datadist: LlmDataDist, library: Callable[[int], Any]
) -> None:
    addresses = program.allocate(2, SHOWN.nbytes)
    tensors = [library(address) for address in addresses]
    desc = CacheDesc.from_tensors(tensors, NHD)
    assert desc == DESC
    assert desc.placement is Placement.DEVICE
    cache = datadist.register_blocks_cache(desc, tensors)
    assert cache.tensor_addrs == tuple(addresses)
    held = weakref.ref(tensors[1].array)  # references to the tensor keep this array alive
    del tensors
    gc.collect()
    assert held() is not None
    given = np.random.default_rng(1).random((2, *SHAPE)).astype(np.float16)
    program.write(addresses, given)
    datadist.copy_blocks(cache, {0: [5], 6: [2]})
    given[:, [5, 2]] = given[:, [0, 6]]
    np.testing.assert_array_equal(program.read(addresses, given.shape, np.float16), given)
    datadist.unregister_cache(cache.cache_id)
    gc.collect()
    assert held() is None


def test_a_slot_cache_is_registered(program: Program, datadist: LlmDataDist) -> None:
    addresses = program.allocate(2, SHOWN.nbytes)
    cache = datadist.register_cache(DESC, [torch_like(address) for address in addresses])
    given = np.ones((2, *SHAPE), np.float16)
    datadist.write_cache(cache, given)
    np.testing.assert_array_equal(program.read(addresses, given.shape, np.float16), given)


class TestRefused:
    @pytest.fixture
    def registering(self, datadist: LlmDataDist) -> Iterator[Callable[[list[Any]], None]]:
        yield lambda tensors: datadist.register_blocks_cache(DESC, tensors) and None
        assert datadist.caches() == []

    def test_tensors_of_another_device_are_refused(
        self, program: Program, registering: Callable[[list[Any]], None]
    ) -> None:
        addresses = program.allocate(2, SHOWN.nbytes)
        with refused("LLM_PARAM_INVALID", r"\[0\] is on device cuda:0, but .*on device cuda:1"):
            registering([TorchTensor(SHOWN, None, "cuda:0", address) for address in addresses])
        with refused("LLM_PARAM_INVALID", r"\[0\] is on device npu:1, but .*on device cuda:1"):
            registering([TorchTensor(SHOWN, None, "npu:1", address) for address in addresses])

    def test_a_tensor_with_a_wrong_device_is_refused(
        self, cuda_simulator: CudaControls, registering: Callable[[list[Any]], None]
    ) -> None:
        other = Program(device_id=0)
        try:
            addresses = other.allocate(2, SHOWN.nbytes)
            with refused("LLM_PARAM_INVALID", r"memory of another device \(0\)"):
                registering([torch_like(address) for address in addresses])
        finally:
            other.close()

    def test_host_memory_is_refused(self, registering: Callable[[list[Any]], None]) -> None:
        arrays = [np.zeros(SHAPE, np.float16) for _ in range(2)]
        with refused("LLM_PARAM_INVALID", r"tensors\[0\] is a ndarray; .*tensors on device 1"):
            registering(arrays)
        with refused("LLM_PARAM_INVALID", "is host memory"):
            registering([numba_like(array.ctypes.data) for array in arrays])

    def test_managed_memory_is_refused(
        self, program: Program, registering: Callable[[list[Any]], None]
    ) -> None:
        addresses = program.allocate(2, SHOWN.nbytes)
        with refused("LLM_PARAM_INVALID", "managed memory of CUDA"):
            registering([GpuTensor(SHOWN, address, device=(13, 1)) for address in addresses])

    def test_a_freed_tensor_is_refused(
        self, program: Program, registering: Callable[[list[Any]], None]
    ) -> None:
        addresses = program.allocate(2, SHOWN.nbytes)
        program.free(addresses)
        with refused("LLM_PARAM_INVALID", "is host memory"):
            registering([torch_like(address) for address in addresses])

    def test_a_tensor_beyond_its_allocation_is_refused(
        self, program: Program, registering: Callable[[list[Any]], None]
    ) -> None:
        addresses = program.allocate(2, SHOWN.nbytes - 2)
        with refused("LLM_PARAM_INVALID", r"tensor 0 has 384 bytes"):
            registering([torch_like(address) for address in addresses])

    def test_gpu_tensors_are_refused_in_a_host_cache(
        self, program: Program, datadist: LlmDataDist
    ) -> None:
        addresses = program.allocate(2, SHOWN.nbytes)
        on_host = CacheDesc(2, SHAPE, DataType.DT_FLOAT16, Placement.HOST)
        with refused("LLM_PARAM_INVALID", r"\[0\] is on device cuda:1; .*as placement=HOST says"):
            datadist.register_blocks_cache(on_host, [torch_like(address) for address in addresses])
