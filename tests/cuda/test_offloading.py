"""Offloading by a user: blocks of a GPU's cache move to pinned memory, and back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

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
from tests.cuda.memory import Program
from tests.cuda_sim.simulator import CudaControls
from tests.support.foreign import TorchTensor

TENSORS, BLOCK = 6, (4, 2, 8)
GPU_BLOCKS, HOST_BLOCKS = 12, 40
GPU = CacheDesc(TENSORS, (GPU_BLOCKS, *BLOCK), DataType.DT_UINT16, Placement.DEVICE)
HOST = CacheDesc(TENSORS, (HOST_BLOCKS, *BLOCK), DataType.DT_UINT16, Placement.HOST)
SCATTERED = {7: 31, 2: 0, 11: 17, 3: 39}

Blocks = NDArray[np.uint16]


@pytest.fixture(params=["allocations", "pools"])
def datadist(cuda_simulator: CudaControls, request: pytest.FixtureRequest) -> Iterator[LlmDataDist]:
    pool = PoolConfig(memory_size=1 << 20) if request.param == "pools" else None
    with LlmDataDist(1, LlmRole.MIX) as made:
        made.initialize(
            Options(
                accelerator="cuda",
                transport="local",
                mem_pool_config=pool,
                host_mem_pool_config=pool,
            )
        )
        yield made


def contents(seed: int, desc: CacheDesc) -> Blocks:
    shape = (desc.num_tensors, *desc.shape)
    return np.random.default_rng(seed).integers(1, 2**16, shape, np.uint16)


def held(datadist: LlmDataDist, cache: Cache) -> Blocks:
    return np.stack(datadist.arrays(cache, copy=True))


def test_blocks_return_from_pinned_memory_to_other_places(datadist: LlmDataDist) -> None:
    gpu, host = (datadist.allocate_blocks_cache(item) for item in (GPU, HOST))
    given, before = contents(1, GPU), contents(2, HOST)
    datadist.write_cache(gpu, given)
    datadist.write_cache(host, before)
    datadist.swap_blocks(gpu, host, SCATTERED)
    out, at = list(SCATTERED), list(SCATTERED.values())
    before[:, at] = given[:, out]
    np.testing.assert_array_equal(held(datadist, host), before)
    other_requests = contents(3, GPU)
    datadist.write_cache(gpu, other_requests)
    elsewhere = [5, 0, 8, 1]
    datadist.swap_blocks(host, gpu, dict(zip(at, elsewhere, strict=True)))
    other_requests[:, elsewhere] = given[:, out]
    np.testing.assert_array_equal(held(datadist, gpu), other_requests)
    np.testing.assert_array_equal(held(datadist, host), before)


def test_several_swaps_run_without_waiting(datadist: LlmDataDist) -> None:
    gpu, host = (datadist.allocate_blocks_cache(item) for item in (GPU, HOST))
    given = contents(1, GPU)
    datadist.write_cache(gpu, given)
    tasks = [
        datadist.submit(
            Transfer(
                Rows(gpu, list({block: 3 * block + 1})),
                Rows(host, list({block: 3 * block + 1}.values())),
            )
        )
        for block in range(GPU_BLOCKS)
    ]
    for task in tasks:
        task.wait(timeout_ms=60_000)
    np.testing.assert_array_equal(held(datadist, host)[:, 1 : 3 * GPU_BLOCKS : 3], given)


def test_slots_are_copied_in_both_directions(datadist: LlmDataDist) -> None:
    gpu, host = (datadist.allocate_cache(item) for item in (GPU, HOST))
    given = contents(1, GPU)
    datadist.write_cache(gpu, given)
    datadist.copy_cache(gpu, host, src_batch_index=4, dst_batch_index=33)
    datadist.copy_cache(host, gpu, src_batch_index=33, dst_batch_index=9)
    datadist.copy_cache(gpu, gpu, src_batch_index=9, dst_batch_index=0)
    given[:, [9, 0]] = given[:, [4]]
    np.testing.assert_array_equal(held(datadist, gpu), given)
    np.testing.assert_array_equal(held(datadist, host)[:, 33], given[:, 4])


def test_tensors_of_a_framework_are_offloaded(datadist: LlmDataDist) -> None:
    program = Program()
    try:
        addresses = program.allocate(TENSORS, GPU.tensor_nbytes)
        shown = np.zeros(GPU.shape, np.uint16)
        tensors = [TorchTensor(shown, None, "cuda:0", address) for address in addresses]
        gpu = datadist.register_blocks_cache(CacheDesc.from_tensors(tensors, None), tensors)
        host = datadist.allocate_blocks_cache(HOST)
        given = contents(1, GPU)
        program.write(addresses, given)
        datadist.swap_blocks(gpu, host, SCATTERED)
        program.write(addresses, np.zeros_like(given))
        datadist.swap_blocks(host, gpu, {there: here for here, there in SCATTERED.items()})
        expected = np.zeros_like(given)
        expected[:, list(SCATTERED)] = given[:, list(SCATTERED)]
        np.testing.assert_array_equal(program.read(addresses, given.shape, np.uint16), expected)
        datadist.unregister_cache(gpu.cache_id)
    finally:
        program.close()
