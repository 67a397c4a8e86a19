"""Engines on a device of any kind, cache descriptions and contents, for tests of device caches."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan import Cache, CacheDesc, DataType, LlmDataDist, LlmRole, Options, Placement, Shard
from kvplan.device.ascend import AscendDevice
from kvplan.device.cuda import CudaDevice
from kvplan.device.device import Device
from tests.ascend.simulator import Controls
from tests.support.left import check_nothing_left

ROWS, ROW = 8, 96
NUM_TENSORS = 3


def desc(placement: Placement = Placement.DEVICE, rows: int = ROWS) -> CacheDesc:
    shard = Shard(num_layers=NUM_TENSORS)  # one tensor per layer
    return CacheDesc(NUM_TENSORS, (rows, ROW), DataType.DT_UINT16, placement, shard=shard)


DEVICE, HOST = desc(), desc(Placement.HOST)


def contents(seed: int, of: CacheDesc = DEVICE) -> list[NDArray[Any]]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 2**16, of.shape, np.uint16) for _ in range(of.num_tensors)]


def same(found: list[NDArray[Any]], expected: list[NDArray[Any]]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)


class Kind(NamedTuple):
    """The calls and codes of an accelerator that tests watch or inject.

    Attributes:
        device: the class of kvplan.
        granularity: allocations are multiples of this size.
        allocate, pin, read: the calls for these steps.
        full, not_pinned, not_read: the codes with which these calls fail.
        refusal, gone: the message and the status for memory that was freed.
    """

    device: type[Device]
    granularity: int
    allocate: str
    full: int
    pin: str
    not_pinned: int
    read: str
    not_read: int
    refusal: str
    gone: str

    def taken(self, nbytes: int) -> int:
        """Return the size of an allocation for `nbytes`."""
        return -(-nbytes // self.granularity) * self.granularity


KINDS = {
    "ascend": Kind(
        AscendDevice, 1, "aclrtMallocAlign32", 207001, "aclrtHostRegisterV2", 207006,
        "aclrtMemcpy", 507054, "aclrtMemcpy", "LLM_PARAM_INVALID",
    ),
    "cuda": Kind(
        CudaDevice, 2 << 20, "cuMemCreate", 2, "cuMemHostRegister_v2", 800,
        "cuMemcpyAsync", 214, "not memory of a device", "LLM_KV_CACHE_NOT_EXIST",
    ),
}  # fmt: skip


def kind_of(simulator: Controls) -> Kind:
    return KINDS[simulator.accelerator]


@contextmanager
def engine_on(
    simulator: Controls, device_id: int = 3, cluster_id: int = 2, **options: Any
) -> Iterator[LlmDataDist]:
    """Yield an engine on a device, and check that it leaves nothing behind.

    Without other options, the engine uses the device only for caches.
    """
    gc.collect()
    before = simulator.left()  # what the program holds, or an earlier test that failed
    given = {"transport": "local", "device_id": device_id, **options}
    with LlmDataDist(cluster_id, LlmRole.MIX) as datadist:
        datadist.initialize(Options(accelerator=simulator.accelerator, **given))
        yield datadist
    del datadist
    gc.collect()
    check_nothing_left(simulator.left, before)


def filled(datadist: LlmDataDist, of: CacheDesc, seed: int, *, paged: bool) -> Cache:
    allocate = datadist.allocate_blocks_cache if paged else datadist.allocate_cache
    cache = allocate(of)
    datadist.write_cache(cache, contents(seed, of))
    return cache
