"""Two engines on devices of two hosts, with caches in host memory; prints results as JSON."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LLMException,
    LlmRole,
    Options,
    Placement,
    PoolConfig,
)
from kvplan.device.ascend import AscendDevice
from tests.ascend.hccl_side import on_a_host_of_its_own
from tests.ascend.simulator import controls, found

BLOCKS, BLOCK = 40, 3000
HOST = CacheDesc(2, (BLOCKS, BLOCK), DataType.DT_UINT8, Placement.HOST)
MINE, THEIRS = [7, 8, 9, 30, 2, 39], [0, 20, 21, 22, 5, 39]
POOL = PoolConfig(1 << 20)


@contextmanager
def engine(device_id: int, listen: str = "", **options: Any) -> Iterator[LlmDataDist]:
    with LlmDataDist(device_id, LlmRole.MIX) as made:
        made.initialize(
            Options(
                listen_ip_info=listen,
                device_id=device_id,
                accelerator="ascend",
                local_comm_res=on_a_host_of_its_own(device_id),
                **options,
            )
        )
        yield made


class ProgramArrays:
    """Arrays of a program, which begin in the middle of a page."""

    def __init__(self) -> None:
        nbytes = HOST.tensor_nbytes
        self.pages = mmap.mmap(-1, 2 * nbytes + 3 * mmap.PAGESIZE)
        both = np.frombuffer(self.pages, np.uint8)[64 : 64 + 2 * nbytes]
        self.arrays = list(both.reshape(2, BLOCKS, BLOCK))

    def pin(self, acl: ctypes.CDLL) -> None:
        """Pin the arrays as a program may have done, in the context of its device."""
        assert acl.aclrtSetDevice(1) == 0
        address, out = np.frombuffer(self.pages, np.uint8).ctypes.data, ctypes.c_void_p()
        nbytes = len(self.pages) & -mmap.PAGESIZE
        register = acl.aclrtHostRegister
        assert (
            register(ctypes.c_void_p(address), ctypes.c_uint64(nbytes), 0, ctypes.byref(out)) == 0
        )

    def unpin(self, acl: ctypes.CDLL) -> None:
        address = np.frombuffer(self.pages, np.uint8).ctypes.data
        assert acl.aclrtHostUnregister(ctypes.c_void_p(address)) == 0


def outcome(
    datadist: LlmDataDist, cache: Cache, arrays: list[NDArray[Any]], key: BlocksCacheKey, seed: int
) -> str:
    """Push blocks and pull them back; return what happened."""
    random = np.random.default_rng(seed)
    for array in arrays:
        array[...] = random.integers(1, 256, array.shape, np.uint8)
    before = [array[MINE].copy() for array in arrays]
    try:
        datadist.push_blocks(cache, key, MINE, THEIRS)
        for array in arrays:
            array[...] = 0
        datadist.pull_blocks(key, cache, THEIRS, MINE)
    except LLMException as error:
        return f"{error.status_code.name}: {error}"
    same = all((array[MINE] == old).all() for array, old in zip(arrays, before, strict=True))
    return "right" if same else "WRONG"


def shown() -> dict[str, str]:
    outcomes: dict[str, str] = {}
    own, pinned = ProgramArrays(), ProgramArrays()
    library = AscendDevice(1)
    acl = ctypes.CDLL(library.native.library.path)
    library.close()
    pinned.pin(acl)
    with (
        engine(0, "127.0.0.1:0", host_mem_pool_config=POOL) as server,
        engine(1, transport="hccl") as client,
    ):
        pooled = server.allocate_blocks_cache(HOST, BlocksCacheKey(0, 1))
        theirs = ProgramArrays()
        server.register_blocks_cache(HOST, theirs.arrays, BlocksCacheKey(0, 2))
        caches = {
            "allocated": (client.allocate_blocks_cache(HOST), None),
            "registered": (client.register_blocks_cache(HOST, own.arrays), own.arrays),
            "pinned by the program": (
                client.register_blocks_cache(HOST, pinned.arrays),
                pinned.arrays,
            ),
        }
        peer = ClusterInfo(0, server.listen_address)
        client.link_clusters([peer], timeout_ms=5000).raise_for_status()
        for seed, (name, (cache, arrays)) in enumerate(caches.items()):
            seen = client.arrays(cache) if arrays is None else arrays
            for model_id, remote in ((1, "a pool"), (2, "the program's own")):
                key = BlocksCacheKey(0, model_id)
                outcomes[f"{name} <-> {remote}"] = outcome(client, cache, seen, key, seed)
        client.unlink_clusters([peer]).raise_for_status()
        del caches, pooled, cache, seen
    pinned.unpin(acl)
    return outcomes


if __name__ == "__main__":
    with found(sys.argv[1]):
        assert os.environ["KVSIM_DIR"]
        report: dict[str, Any] = {"said": shown()}
        gc.collect()
        report["left"] = controls(sys.argv[1]).left()
    sys.stdout.write(json.dumps(report))
