"""Tries inside one process: what the device is, copies, caches, offloading, memory of a program."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.gpu_driver import Driver, difference
from kvnative._backend import NativeError
from kvnative._cuda import CopyTuning, copy_tuning, copy_way, tune_copies
from kvnative._device import COPY_DIRECTIONS
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvplan import (
    Cache,
    CacheDesc,
    DataType,
    LlmDataDist,
    LLMException,
    LlmRole,
    Placement,
    Rows,
    Transfer,
    TransferTask,
)
from kvplan.cli.tune.cuda import Way, calibrate, time_copies
from kvplan.device import cuda_copies
from kvplan.device.cuda import CudaDevice
from kvplan.device.cuda_copies import NO_LIMIT
from tools.cuda_tries.notes import Notes, SkippedError, random_bytes, the_device

TIMEOUT_MS = 60_000


def engine(cluster_id: int = 0, **options: str) -> LlmDataDist:
    """Return an engine on the first GPU."""
    made = LlmDataDist(cluster_id, LlmRole.MIX)
    made.initialize({"kvplan.accelerator": "cuda", "kvplan.transport": "local", **options})
    return made


def paged(tensors: int, blocks: int, block: int, placement: Placement) -> CacheDesc:
    return CacheDesc(tensors, (blocks, block), DataType.DT_UINT8, placement)


def try_device(notes: Notes) -> None:
    """Describe the device, and check that allocations are where they are said to be."""
    with the_device() as device:
        for name, value in device.describe().items():
            notes.add(name, "says", str(value))
        buffer = device.allocate(1 << 20)
        device.check_range("of kvplan", buffer.address, buffer.nbytes)
        content = np.empty(1 << 20, np.uint8)
        device.read(buffer.address, content)
        notes.expect("new memory is zeroed", not content.any())
        driver = Driver(device.native.library.path)
        notes.add("CUDA of the driver", "says", driver.version)
        address = driver.allocate(1 << 20)
        device.check_range("of a program", address, 1 << 20)
        notes.add("memory of both is memory of the device", "ok")
        with notes.refusal("memory of the host is not", "LLM_PARAM_INVALID"):
            device.check_range("of the host", content.ctypes.data, 1)
        driver.free(address)
        with notes.refusal("what was freed is not", "LLM_PARAM_INVALID"):
            device.check_range("freed", address, 1)
        driver.close()


BLOCKS = (1, 3, 4, 15, 16, 31, 512, 4096, 4099, 32 << 10, (256 << 10) + 1)
WAYS: dict[Way, tuple[int, int]] = {
    "kernel": (NO_LIMIT, NO_LIMIT),
    "batch": (0, NO_LIMIT),
    "single": (0, 0),
}
"""Sizes to copy with each way: see `CopyTuning`."""


def try_copies(notes: Notes) -> None:
    """Copy each direction and way, odd sizes at odd addresses, pinned and pageable host memory."""
    sizes = BLOCKS[::3] if notes.quick else BLOCKS
    with the_device() as device:
        for direction in COPY_DIRECTIONS:
            before = copy_tuning(device.native, direction)
            for way, limits in WAYS.items():
                tune_copies(device.native, direction, CopyTuning(*limits, before.blocks))
                if copy_way(device.native, direction, 4096, 64) != way:
                    notes.add(f"{direction}: {way}", "skipped", "this driver lacks it")
                    continue
                for kind in ("",) if direction == "device_to_device" else ("pinned", "pageable"):
                    wrong = [
                        f"blocks of {size} bytes: {problem}"
                        for size in sizes
                        if (problem := tried(device, direction, kind, size, notes.quick))
                    ]
                    notes.expect(
                        f"{direction.replace('_', ' ')}: {way} {kind}".rstrip(),
                        not wrong,
                        f"{len(wrong)} of {len(sizes)} sizes: {wrong[0]}"
                        if wrong
                        else f"blocks of {sizes} bytes",
                    )
                if copy_way(device.native, direction, 4096, 64) != way:
                    notes.add(f"{direction}: {way}", "says", device.native.fallback_reason)
            tune_copies(device.native, direction, before)


def try_tuning(notes: Notes) -> None:
    """Measure which way is best on this GPU; the tries and figures after this copy so."""
    with the_device() as device:
        spans = {"span_nbytes": 1 << 16} if notes.quick else {}
        for direction, words in cuda_copies.describe(device).items():
            notes.add(f"{direction}: before", "says", words)
        began = time.monotonic()
        times: list[str] = []

        def timed(direction: Any, way: Way, nbytes: int) -> float:
            seconds = time_copies(device, direction, way, nbytes, **spans)
            times.append(f"{way} {1e6 * seconds:.0f}")
            if len(times) == len(WAYS):
                step = f"{direction}: us of blocks of {nbytes >> 10} KiB"
                notes.add(step, "says", ", ".join(times))
                times.clear()
            return seconds

        found = calibrate(timed)
        for direction, words in found.words(device).items():
            notes.add(f"{direction}: measured", "says", words)
        notes.add("seconds that it took", "says", f"{time.monotonic() - began:.1f}")
        cuda_copies.save(device, found.tunings)


def tried(device: CudaDevice, direction: Any, kind: str, block: int, quick: bool) -> str:
    """Do as `copied`, and turn a failure into a text, so that the other ways are tried."""
    try:
        return copied(device, direction, kind, block, quick)
    except (NativeError, LLMException) as error:
        return f"{type(error).__name__}: {error}"


def copied(device: CudaDevice, direction: Any, kind: str, block: int, quick: bool) -> str:
    """Copy random blocks, and say what is wrong; empty if all of them arrived, and no more."""
    count = min(64 if quick else 2048, max(4, (8 << 20) // block))
    apart = block + 7  # no two blocks are aligned alike
    nbytes = 2 * count * apart + 64
    rng = np.random.default_rng(block)
    given, before = random_bytes(block, nbytes), random_bytes(block + 1, nbytes)
    from_device, to_device = direction.startswith("device"), direction.endswith("device")
    with ExitStack() as held:
        source, put_source, _ = end(device, nbytes, from_device, kind, held)
        target, put_target, get_target = end(device, nbytes, to_device, kind, held)
        put_source(given)
        put_target(before)
        there, here = (rng.permutation(2 * count)[:count] * apart for _ in range(2))
        there, here = there + rng.integers(0, 7, count), here + rng.integers(0, 7, count)
        columns = (target + here, source + there, np.full(count, block))
        with Executor(device.backend(direction)) as executor:
            report = executor.run(
                Descriptors.from_columns(*(column.astype(np.uint64) for column in columns)),
                TIMEOUT_MS,
            )
        found = get_target()
        expected = before
        for at, to in zip(there.tolist(), here.tolist(), strict=True):
            expected[to : to + block] = given[at : at + block]
    where = f"{count} blocks from 0x{source:x} to 0x{target:x}"
    if report.status != 0:
        return f"status {report.status}, code {report.code}: {report.message}; {where}"
    return (wrong := difference(found, expected)) and f"{wrong}; {where}"


def end(device: CudaDevice, nbytes: int, on_device: bool, kind: str, held: ExitStack) -> Any:
    """Memory of one end: its address, what fills it, and what reads it."""
    if on_device:
        buffer = device.allocate(nbytes)
        held.callback(lambda kept=buffer: None)
        array = np.empty(nbytes, np.uint8)

        def read() -> Any:
            device.read(buffer.address, array)
            return array

        return buffer.address, lambda given: device.write(buffer.address, given), read
    memory = device.allocate_host(nbytes) if kind == "pinned" else bytearray(nbytes)
    view = np.frombuffer(memory, np.uint8)
    held.callback(lambda kept=memory: None)

    def fill(given: Any) -> None:
        view[:] = given

    return view.ctypes.data, fill, lambda: view


def try_offloading(notes: Notes) -> None:
    """swap_blocks out and in again, through a pinned cache; copy_cache and copy_blocks."""
    blocks, block = (16, 4096) if notes.quick else (512, 32 << 10)
    pool = json.dumps({"memory_size": 64 << 20, "page_shift": 16})
    with engine(**({} if notes.quick else {"llm.MemPoolConfig": pool})) as datadist:
        on_device, on_host = (
            datadist.allocate_blocks_cache(paged(2 if notes.quick else 3, blocks, block, value))
            for value in (Placement.DEVICE, Placement.HOST)
        )
        tensors = on_device.cache_desc.num_tensors
        given = random_bytes(1, tensors, blocks, block)
        datadist.write_cache(on_device, list(given))
        rng = np.random.default_rng(3)
        hot, cold = (rng.permutation(blocks)[: blocks // 2].tolist() for _ in range(2))
        datadist.swap_blocks(on_device, on_host, dict(zip(hot, cold, strict=True)))
        notes.same(
            "swapped out", np.stack(datadist.arrays(on_host, copy=True))[:, cold], given[:, hot]
        )
        datadist.write_cache(on_device, list(np.zeros_like(given)))
        datadist.swap_blocks(on_host, on_device, dict(zip(cold, hot, strict=True)))
        expected = np.zeros_like(given)
        expected[:, hot] = given[:, hot]
        notes.same("and in again", np.stack(datadist.arrays(on_device, copy=True)), expected)
        datadist.copy_blocks(on_device, {hot[0]: [hot[1], hot[2]]})
        expected[:, [hot[1], hot[2]]] = expected[:, [hot[0]]]
        notes.same("copied on the GPU", np.stack(datadist.arrays(on_device, copy=True)), expected)
        slots = [
            datadist.allocate_cache(CacheDesc(2, (4, 999), DataType.DT_UINT8, value))
            for value in (Placement.DEVICE, Placement.HOST)
        ]
        rows = random_bytes(2, 2, 4, 999)
        for src, dst in (slots, slots[::-1]):
            datadist.write_cache(src, list(rows))
            datadist.write_cache(dst, list(np.zeros_like(rows)))
            datadist.copy_cache(src, dst, 1, 3)
            name = f"copy_cache {src.cache_desc.placement.name} to {dst.cache_desc.placement.name}"
            notes.same(name, np.stack(datadist.arrays(dst, copy=True))[:, 3], rows[:, 1])


class CudaArray:
    """Memory of a program, as `__cuda_array_interface__` says it."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "stream": None,
        }


def try_registering(notes: Notes) -> None:
    """Memory of cuMemAlloc, as frameworks have it: by address and as an array of CUDA."""
    desc = paged(2, 64, 4096, Placement.DEVICE)
    given = random_bytes(1, 2, *desc.shape)
    with the_device() as device, engine() as datadist:
        driver = Driver(device.native.library.path)
        addresses = [driver.allocate(desc.tensor_nbytes) for _ in range(2)]
        notes.add("allocated by the program", "says", f"2 times {desc.tensor_nbytes} bytes")
        arrays = [CudaArray(address, desc.shape) for address in addresses]
        for name, tensors in (("by address", addresses), ("as arrays", arrays)):
            cache = datadist.register_blocks_cache(desc, tensors)
            datadist.write_cache(cache, list(given))
            datadist.copy_blocks(cache, {0: [1]})
            expected = given.copy()
            expected[:, 1] = given[:, 0]
            notes.same(name, np.stack(datadist.arrays(cache, copy=True)), expected)
            datadist.unregister_cache(cache.cache_id)
        notes.expect("described", CacheDesc.from_tensors(arrays, None).placement is desc.placement)
        for address in addresses:
            driver.free(address)
        with notes.refusal("what was freed", "LLM_PARAM_INVALID"):
            datadist.register_blocks_cache(desc, addresses)
        with notes.refusal("freed since", "LLM_PARAM_INVALID"):
            datadist.arrays(Cache(desc, -1, tuple(addresses)), copy=True)
        driver.close()


def try_events(notes: Notes) -> None:
    """Order a transfer after work of a stream, without the CPU."""
    desc = paged(2, 8, 4096, Placement.DEVICE)
    with the_device() as device, engine() as datadist:
        driver = Driver(device.native.library.path)
        if not driver.computes:
            notes.add("the kernel that computes", "skipped", "memory is set in place of it")
        cache = datadist.allocate_blocks_cache(desc)
        given, later = random_bytes(1, 2, *desc.shape), random_bytes(2, 2, *desc.shape)
        datadist.write_cache(cache, list(given))
        staging = driver.allocate(desc.nbytes)
        driver.write(staging, later.reshape(-1))
        event = driver.event()
        driver.compute(20_000)
        for tensor, address in enumerate(cache.tensor_addrs):
            at = staging + tensor * desc.tensor_nbytes
            driver.copy_later(address, at, desc.tensor_nbytes)
        driver.record(event)
        task = datadist.submit(Transfer(Rows(cache, [0]), Rows(cache, [1])), after=event)
        task.wait(timeout_ms=TIMEOUT_MS)
        driver.synchronize()
        expected = later.copy()
        expected[:, 1] = later[:, 0]
        notes.same("copied after the event", np.stack(datadist.arrays(cache, copy=True)), expected)
        driver.destroy_event(event)
        driver.free(staging)
        driver.close()


def try_fault(notes: Notes) -> None:
    """Let a kernel write where nothing is: kvplan says so, does not hang, and ends."""
    with the_device() as device:
        driver = Driver(device.native.library.path)
        if not driver.computes:
            driver.close()
            raise SkippedError("the stand-in has no kernel but kvplan's")
        with engine() as datadist:
            desc = paged(2, 8, 4096, Placement.DEVICE)
            cache = datadist.allocate_blocks_cache(desc)
            content = list(random_bytes(1, 2, *desc.shape))
            datadist.write_cache(cache, content)
            notes.expect("the fault is one", (code := driver.fault()) == 700, f"code {code}")
            with notes.refusal("a transfer behind it", "LLM_FAILED"):
                datadist.copy_blocks(cache, {0: [1]})
            with notes.refusal("writing behind it", "LLM_FAILED"):
                datadist.write_cache(cache, content)
        notes.add("the engine has ended", "ok")


def try_streams(notes: Notes) -> None:
    """Order work of a program's stream after a transfer, without the CPU."""
    desc = paged(4, 16 if notes.quick else 2048, 32 << 10, Placement.DEVICE)
    blocks = dict(enumerate(reversed(range(desc.shape[0]))))
    with the_device() as device, engine() as datadist:
        driver = Driver(device.native.library.path)
        stream = SimpleNamespace(cuda_stream=driver.stream)
        on_device = datadist.allocate_blocks_cache(desc)
        on_host = datadist.allocate_blocks_cache(
            paged(4, desc.shape[0], desc.shape[1], Placement.HOST)
        )
        given = random_bytes(1, 4, *desc.shape)
        datadist.write_cache(on_host, list(given))
        seen, found = driver.allocate(desc.nbytes), np.empty(desc.nbytes, np.uint8)

        def read_behind(task: TransferTask) -> None:
            began = time.perf_counter()
            task.block_stream(stream)
            micros = 1e6 * (time.perf_counter() - began)
            state = "are" if task.done else "are not"
            notes.add("block_stream", "says", f"{micros:.0f} us, when the bytes {state} there")
            for tensor, address in enumerate(on_device.tensor_addrs):
                at = seen + tensor * desc.tensor_nbytes
                driver.copy_later(at, address, desc.tensor_nbytes)
            driver.synchronize()

        swap = Transfer(Rows(on_host, list(blocks)), Rows(on_device, list(blocks.values())))
        task = datadist.submit(swap)
        read_behind(task)
        driver.read(seen, found)
        notes.same("read behind a transfer", found.reshape(given.shape), given[:, ::-1])
        task.wait(timeout_ms=TIMEOUT_MS)

        task = datadist.submit(swap)
        task.block_stream(stream)
        task.cancel()
        driver.synchronize()
        notes.add("the stream goes on behind one that was cancelled", "ok")

        task = datadist.submit(swap)
        with driver.capture():  # raises where it was spoilt
            try:
                task.block_stream(stream)
            except LLMException as error:
                good = error.status_code.name == "LLM_PARAM_INVALID"
                notes.expect("a stream that is captured", good, str(error.args[0]))
            else:  # of one that is done nothing is to be waited for, and the stream not looked at
                detail = "the transfer was done before"
                notes.expect("a stream that is captured", task.done, detail)
            with notes.refusal("a point of it", "LLM_PARAM_INVALID"):
                datadist.submit(Transfer(Rows(on_device, [0]), Rows(on_device, [1])), after=stream)
        notes.add("its capture goes on", "ok")
        task.wait(timeout_ms=TIMEOUT_MS)
        driver.free(seen)
        driver.close()
