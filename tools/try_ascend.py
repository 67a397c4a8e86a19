"""Try Ascend devices with real bytes, and time them: for the first runs on hardware.

    python tools/try_ascend.py copies                     # one process: to a device and back
    python tools/try_ascend.py serve 0.0.0.0:26000        # a peer, until its input ends (^D)
    python tools/try_ascend.py reach 10.0.0.7:26000       # another: pushes, pulls back, compares

docs/how-to/ascend.md has the order of these steps. Exits with 1 if a byte came back wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvplan
from kvnative._host import Arena
from kvnative.ascend_files import driver_version, max_registered
from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    ClusterInfo,
    DataType,
    HostMemory,
    LlmDataDist,
    LLMException,
    LlmRole,
    Options,
    Placement,
    Rows,
    Transfer,
    execute,
)
from kvplan.device.ascend import AscendDevice
from kvplan.device.memory import DeviceMemory

SERVER, CLIENT = 1, 2
MODELS = {Placement.DEVICE: 1, Placement.HOST: 2}  # the model_id of each cache's key
TIMEOUT_MS = 60_000
GIB = 1 << 30
REST_NBYTES = 1 << 28  # other registered memory of an engine: staging, tables


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=sorted(RUNS))
    parser.add_argument("address", nargs="?", help="ip:port to listen at, or of the peer")
    parser.add_argument("--device-id", type=int, default=0)
    parser.add_argument("--accelerator", default="ascend", help="none: both caches on the host")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--local-comm-res", default="", help="JSON, see llm.LocalCommRes")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--blocks", type=int, default=1024, help="of each tensor; half of them move"
    )
    parser.add_argument("--block-kib", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.what != "copies" and not arguments.address:
        parser.error(f"{arguments.what} needs an address")
    if reason := too_much(arguments):
        parser.error(reason)
    return RUNS[arguments.what](arguments)


def described(arguments: argparse.Namespace, placement: Placement) -> CacheDesc:
    shape = arguments.blocks, arguments.block_kib * 1024
    return CacheDesc(2 * arguments.layers, shape, DataType.DT_UINT8, placement)


def too_much(arguments: argparse.Namespace) -> str | None:
    """Return why HCCL would refuse to register this much, which it does only at connect."""
    hdk = driver_version()
    limits = max_registered(hdk)
    nbytes = described(arguments, Placement.DEVICE).nbytes
    for kind, most in limits.items():
        if nbytes + REST_NBYTES > most and arguments.what != "copies":
            blocks = arguments.blocks * (most - REST_NBYTES) // nbytes
            return (
                f"--layers {arguments.layers} --blocks {arguments.blocks} --block-kib "
                f"{arguments.block_kib} are {nbytes / GIB:.1f} GiB of {kind} memory; with HDK "
                f"{hdk or 'of unknown version'} HCCL registers {most >> 30} GiB: give at most "
                f"--blocks {blocks}"
            )
    return None


def scattered(arguments: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Return the source and destination blocks."""
    generator = np.random.default_rng(7)
    half = arguments.blocks // 2
    here, there = (generator.permutation(arguments.blocks)[:half].tolist() for _ in range(2))
    return here, there


def timed(arguments: argparse.Namespace, nbytes: int, move: Callable[[], None]) -> str:
    seconds = []
    for _ in range(arguments.rounds):
        began = time.perf_counter()
        move()
        seconds.append(time.perf_counter() - began)
    middle = statistics.median(seconds)
    return f"{nbytes / middle / 1e9:.2f} GB/s, {middle * 1e3:.2f} ms"


def tell(name: str, outcome: str) -> None:
    sys.stdout.write(f"{name:<44}{outcome}\n")
    sys.stdout.flush()


def copies(arguments: argparse.Namespace) -> int:
    """Copy inside one process: pinned memory in asynchronous batches, other memory not."""
    desc = described(arguments, Placement.DEVICE)
    here, there = scattered(arguments)
    forth, back, inside = (
        kvplan.plan(Transfer(Rows(desc, read), Rows(desc, written)), local="dst")
        for read, written in ((here, there), (there, here), (there, there))
    )
    wrong = False
    with ExitStack() as stack:
        device = AscendDevice(arguments.device_id)
        stack.callback(device.close)
        first, second = (on_device(device, desc) for _ in range(2))
        for kind in ("pageable", "pinned"):
            given, got = (on_host(desc) for _ in range(2))
            for array in (given, got) if kind == "pinned" else ():
                stack.callback(device.pin(array.ctypes.data, array.nbytes, array).close)
            given[:] = np.random.default_rng(1).integers(1, 256, given.shape, np.uint8)
            steps: list[tuple[str, Any, Any, Any]] = [
                (f"{kind} host -> device", forth, HostMemory.from_arrays(list(given)), first),
                ("device -> device", inside, first, second),
                (f"device -> {kind} host", back, second, HostMemory.from_arrays(list(got))),
            ]
            for name, plan, source, target in steps:
                tell(
                    name,
                    timed(
                        arguments, plan.nbytes, lambda value=(plan, source, target): execute(*value)
                    ),
                )
            wrong |= bool((got[:, here] != given[:, here]).any())
        tell(
            "batch copies", f"not used: {why}" if (why := device.native.fallback_reason) else "used"
        )
    tell("the bytes", "WRONG" if wrong else "as they must be")
    return int(wrong)


def on_device(device: AscendDevice, desc: CacheDesc) -> DeviceMemory:
    buffer = device.allocate(desc.nbytes)
    addresses = [buffer.address + i * desc.tensor_nbytes for i in range(desc.num_tensors)]
    return DeviceMemory.from_addresses(device, desc, addresses, owner=buffer)


def on_host(desc: CacheDesc) -> NDArray[np.uint8]:
    """Return tensors in one page-aligned piece of memory, which can be pinned."""
    return np.frombuffer(Arena(desc.nbytes), np.uint8).reshape(desc.num_tensors, *desc.shape)


def engine(arguments: argparse.Namespace, cluster_id: int, listen: str = "") -> LlmDataDist:
    made = LlmDataDist(cluster_id, LlmRole.MIX)
    made.initialize(
        Options(
            listen_ip_info=listen,
            device_id=arguments.device_id,
            accelerator=arguments.accelerator,
            transport=arguments.transport,
            local_comm_res=arguments.local_comm_res,
            sync_kv_cache_wait_time=TIMEOUT_MS,
        )
    )
    return made


def serve(arguments: argparse.Namespace) -> int:
    with engine(arguments, SERVER, arguments.address) as datadist:
        for placement, model_id in MODELS.items():
            key = BlocksCacheKey(SERVER, model_id)
            datadist.allocate_blocks_cache(described(arguments, placement), key)
        tell("listening at", str(datadist.listen_address))
        sys.stdin.read()
    return 0


def reach(arguments: argparse.Namespace) -> int:
    """Push to each cache of the peer and pull back, for each local placement."""
    here, there = scattered(arguments)
    wrong = reached = 0
    with engine(arguments, CLIENT) as datadist:
        peer = ClusterInfo(SERVER, arguments.address)
        datadist.link_clusters([peer], timeout_ms=TIMEOUT_MS).raise_for_status()
        tell("linked over", datadist.links()[0].transport or "")
        for local, remote in product(MODELS, MODELS):
            name = f"local {local.name}, remote {remote.name}"
            try:
                right, rates = there_and_back(arguments, datadist, local, remote, here, there)
            except LLMException as error:
                tell(name, f"refused: {error}")
                continue
            reached += 1
            wrong += not right
            for direction, rate in rates.items():
                tell(f"{name}, {direction}", rate)
            tell(f"{name}, the bytes", "as they must be" if right else "WRONG")
        datadist.unlink_clusters([peer]).raise_for_status()
    return int(wrong > 0 or not reached)


def there_and_back(
    arguments: argparse.Namespace,
    datadist: LlmDataDist,
    local: Placement,
    remote: Placement,
    here: list[int],
    there: list[int],
) -> tuple[bool, dict[str, str]]:
    desc = described(arguments, local)
    cache = datadist.allocate_blocks_cache(desc)
    key = BlocksCacheKey(SERVER, MODELS[remote])
    given = np.random.default_rng().integers(1, 256, (desc.num_tensors, *desc.shape), np.uint8)
    try:
        datadist.write_cache(cache, given)
        nbytes = datadist.plan(Transfer(Rows(cache, here), Rows(key, there))).nbytes
        push = timed(arguments, nbytes, lambda: datadist.push_blocks(cache, key, here, there))
        datadist.write_cache(cache, np.zeros_like(given))
        pull = timed(arguments, nbytes, lambda: datadist.pull_blocks(key, cache, there, here))
        got = np.stack(datadist.arrays(cache, copy=True))
    finally:
        datadist.deallocate_cache(cache)
    return bool((got[:, here] == given[:, here]).all()), {"push": push, "pull": pull}


RUNS = {"copies": copies, "serve": serve, "reach": reach}

if __name__ == "__main__":
    sys.exit(main())
