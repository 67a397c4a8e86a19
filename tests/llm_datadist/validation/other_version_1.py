"""What version 1 of the official package (read, not run) does otherwise."""

from __future__ import annotations

import gc

import numpy as np

from kvplan.llm_datadist import DataType, KvCache, Tensor, TensorDesc
from tests.llm_datadist.validation.environments import HOST, Engine, Fresh
from tests.llm_datadist.validation.row import INVALID, TYPE, Accepted, Difference, Row


def two_devices(fresh: Fresh) -> None:
    fresh.datadist.init({})
    manager = fresh.datadist.kv_cache_manager
    memory = [np.zeros(16, np.int8) for _ in range(4)]
    addresses = [it.ctypes.data for it in memory]
    spread = KvCache.create_cpu_cache(Engine.desc(placement=HOST), [addresses[:2], addresses[2:]])
    manager.swap_blocks(spread, manager.allocate_blocks_cache(Engine.desc()), {0: 0})


def shapes_of_halves() -> list[list[int]]:
    array = np.zeros((2, 4), np.float16)
    bf16 = Tensor(array, TensorDesc(DataType.DT_BF16, [2, 4]))
    return [list(it.numpy(copy=True).shape) for it in (Tensor(array), bf16)]


def memory_of_a_freed_cache(fresh: Fresh) -> int:
    fresh.datadist.init({})
    manager = fresh.datadist.kv_cache_manager
    cache = manager.allocate_cache(Engine.desc())
    (tensor,) = manager.get_cache_tensors(cache)
    tensor.numpy()[:] = 7
    del cache
    gc.collect()
    manager.allocate_cache(Engine.desc())
    return int(tensor.numpy().min())


VERSION_1 = [
    Difference(
        "version 1: one engine may have several devices",
        "one engine has one device; a KvCache with addresses of several: LLM_PARAM_INVALID",
        (Row("version 1: swap with a cache on two devices", INVALID, two_devices, "fresh"),),
    ),
    Difference(
        "version 1: Tensor(int) accepts any integer as the number of a C++ tensor",
        "TypeError: tensors have no numbers here",
        (Row("version 1: Tensor(1)", TYPE, lambda: Tensor(1)),),  # type: ignore[arg-type]
    ),
    Difference(
        "version 1: numpy() of a Tensor of float16 or bfloat16 has one dimension",
        "it has the shape of the Tensor",
        (
            Row(
                "version 1: shapes of float16 and bfloat16",
                Accepted([[2, 4], [2, 4]]),
                shapes_of_halves,
            ),
        ),
    ),
    Difference(
        "version 1: a Tensor of a freed cache points to memory that may be reused",
        "the memory is kept as long as a Tensor holds it",
        (
            Row(
                "version 1: Tensor of a freed cache",
                Accepted(7),
                memory_of_a_freed_cache,
                "fresh",
            ),
        ),
    ),
]
