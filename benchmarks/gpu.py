"""A CUDA GPU: many small copies beside one contiguous copy of the driver, and whole requests.

Without a GPU nothing is measured. tools/try_cuda.py prints the same rows on a machine that has
one; with the simulated driver of the tests it measures the simulation.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

import kvplan
from benchmarks import gpu_peer
from benchmarks.copying import execute
from benchmarks.gpu_driver import Driver, difference
from benchmarks.gpu_peer import CLUSTER, KEY, cache_of
from benchmarks.libraries import nixl_on_gpu
from benchmarks.pairs import LOOPBACK, Pair
from benchmarks.table import Row, Run, Topic, Unmeasured, timed
from kvnative._executor import Executor
from kvnative._lower import Descriptors, lower
from kvplan import ClusterInfo, KvCacheExtParam, LlmDataDist, LLMException, LlmRole, Rows, Transfer
from kvplan.execution.binding import bind
from kvplan.execution.layer_task import LayerTask
from kvplan.execution.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from kvplan.device.cuda import CudaDevice
    from kvplan.device.device import CopyDirection
    from kvplan.execution import TensorMemory
    from kvplan.types import Cache

TOPIC = Topic()
KIB, MIB = 1 << 10, 1 << 20
TENSORS = 64
REQUEST_BLOCKS, REQUEST_BLOCK = 64, 32 * KIB
ROUNDS = 31
NBYTES = "bytes that a gpu row moves"
"""Key of `Run.shared`: overrides the number of bytes with which a GPU is measured."""

_PIECE = 32 * MIB
_SPARE = 1.5
"""Blocks of a pool for each moved block, so that the moved blocks are scattered."""


def device_of(run: Run) -> CudaDevice:
    """Return the run's GPU.

    Raises:
        Unmeasured: no GPU can be used.
    """

    def make() -> CudaDevice:
        from kvplan.device.cuda import CudaDevice

        try:
            device = CudaDevice(0)
        except LLMException as error:
            raise Unmeasured(f"no CUDA GPU: {error.args[0]}") from error
        run.opened.callback(device.close)
        return device

    return cast("CudaDevice", run.share("gpu", make))


def driver_of(run: Run) -> Driver:
    """Return the run's bare driver."""

    def make() -> Driver:
        device = device_of(run)
        driver = Driver(device.native.library.path, device.id)
        run.opened.callback(driver.close)
        return driver

    return cast("Driver", run.share("gpu driver", make))


def nbytes_of(run: Run, usual: int) -> int:
    """Return the number of bytes that a row moves."""
    return int(run.shared.get(NBYTES, usual))


@dataclass(frozen=True)
class Scattered:
    """Random distinct blocks of every tensor, at both ends.

    Attributes:
        blocks: moved blocks of each tensor.
        pool: all blocks of each tensor.
    """

    blocks: int
    pool: int
    block: int

    @staticmethod
    def of(nbytes: int, block: int) -> Scattered:
        """Choose the number of blocks so that about `nbytes` are moved."""
        blocks = max(1, nbytes // block // TENSORS)
        return Scattered(blocks, int(blocks * _SPARE) + 1, block)

    @property
    def pool_nbytes(self) -> int:
        """Bytes of all tensors."""
        return TENSORS * self.pool * self.block

    @property
    def nbytes(self) -> int:
        """Moved bytes."""
        return TENSORS * self.blocks * self.block

    def tables(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the block tables of the source and of the destination."""
        rng = np.random.default_rng(self.block)
        first, second = (rng.permutation(self.pool)[: self.blocks] for _ in range(2))
        return first, second

    def descriptors(self, src: int, dst: int) -> Descriptors:
        """Return the descriptors between two pools that begin at these addresses."""
        desc = cache_of(TENSORS, self.pool, self.block)
        first, second = self.tables()
        transfer = Transfer(Rows(desc, first), Rows(desc, second), coalesce=False)
        segments = kvplan.plan(transfer, local="dst").part.segments
        starts = np.arange(TENSORS, dtype=np.uint64) * np.uint64(desc.tensor_nbytes)
        bases = (np.uint64(side) + starts for side in (src, dst))
        return lower(segments.src_offsets, segments.dst_offsets, segments.nbytes, *bases)


def words(nbytes: int, seed: int, first: int = 0) -> NDArray[np.uint8]:
    """Return bytes whose words all differ, which reveals bytes from a wrong place.

    Args:
        nbytes: number of bytes.
        seed: selects the content.
        first: offset of the first byte in memory with this content.
    """
    numbers = np.arange(first // 8, (first + nbytes) // 8, dtype=np.uint64)
    return (numbers + np.uint64(seed << 40)).view(np.uint8)


class Pool:
    """Memory of one end: device memory, or pinned host memory.

    It is filled and read piece by piece: the whole would need gigabytes of new host pages.
    """

    def __init__(self, device: CudaDevice, nbytes: int, *, on_device: bool) -> None:
        self._device, self.nbytes, self._on_device = device, nbytes, on_device
        self.buffer = device.allocate(nbytes) if on_device else device.allocate_host(nbytes)
        self.address = self.buffer.address

    def fill(self, seed: int) -> None:
        """Fill the memory with `words`."""
        for first in range(0, self.nbytes, _PIECE):
            self._put(first, words(min(_PIECE, self.nbytes - first), seed, first))

    def clear(self) -> None:
        """Fill the destination with zeros."""
        zeros = np.zeros(min(_PIECE, self.nbytes), np.uint8)
        for first in range(0, self.nbytes, _PIECE):
            self._put(first, zeros[: self.nbytes - first])

    def _put(self, first: int, array: NDArray[np.uint8]) -> None:
        if self._on_device:
            self._device.write(self.address + first, array)
        else:
            np.frombuffer(self.buffer, np.uint8)[first : first + array.nbytes] = array

    def pieces(self, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        """Yield the content in pieces of `nbytes`; each is valid until the next is requested."""
        array = np.empty(nbytes, np.uint8)
        for first in range(0, self.nbytes, nbytes):
            if self._on_device:
                self._device.read(self.address + first, array)
            else:
                array[:] = np.frombuffer(self.buffer, np.uint8)[first : first + nbytes]
            yield array


def check_scattered(case: Scattered, seed: int, tensors: Iterable[NDArray[np.uint8]]) -> None:
    """Check every byte of the target: the byte of its source, or still zero.

    Args:
        case: the moved blocks.
        seed: seed of the content of the source.
        tensors: tensors of the target, in order.

    Raises:
        AssertionError: a byte differs; the message has its place and value.
    """
    there, here = case.tables()
    nbytes = case.pool * case.block
    for tensor, found in enumerate(tensors):
        expected = np.zeros((case.pool, case.block), np.uint8)
        expected[here] = words(nbytes, seed, tensor * nbytes).reshape(expected.shape)[there]
        wrong = difference(found.reshape(expected.shape), expected)
        assert not wrong, f"tensor {tensor} of {TENSORS}, by block and byte: {wrong}"


_ENDS: dict[CopyDirection, tuple[bool, bool]] = {
    "device_to_device": (True, True),
    "host_to_device": (False, True),
    "device_to_host": (True, False),
}


def beside_contiguous(
    run: Run,
    name: str,
    case: Scattered,
    target: float,
    direction: CopyDirection = "device_to_device",
) -> Row:
    """Compare blocks that are scattered at both ends with one copy of as many bytes, in turns."""
    device, driver = device_of(run), driver_of(run)
    source, destination = (
        Pool(device, case.pool_nbytes, on_device=end) for end in _ENDS[direction]
    )
    source.fill(1)
    run.note("filled the source")
    destination.clear()
    run.note("cleared the target")
    descriptors = case.descriptors(source.address, destination.address)
    with Executor(device.backend(direction)) as executor:
        move = partial(execute, executor, descriptors)
        move()
        check_scattered(case, 1, destination.pieces(case.pool * case.block))
        run.note("compared every byte")
        ours, bare = run.medians(
            timed(move),
            timed(partial(driver.copy, destination.address, source.address, case.nbytes)),
            rounds=ROUNDS,
        )
    note = f"{len(descriptors):,} descriptors of {case.block // KIB} KiB; limit: one contiguous"
    figures = case.nbytes / ours / 1e9, "GB/s", case.nbytes / bare / 1e9
    return Row(name, *figures, "at least", target, note)


@TOPIC.row("gpu_4KiB_ratio")
def small_blocks(run: Run, name: str) -> Row:
    """Copy blocks of 4 KiB in a process, scattered at both ends, beside one contiguous copy."""
    return beside_contiguous(run, name, Scattered.of(nbytes_of(run, 256 * MIB), 4 * KIB), 0.50)


@TOPIC.row("gpu_32KiB_ratio")
def blocks(run: Run, name: str) -> Row:
    """Copy blocks of 32 KiB, likewise."""
    return beside_contiguous(run, name, Scattered.of(nbytes_of(run, 1024 * MIB), 32 * KIB), 0.80)


@TOPIC.row("gpu_256KiB_ratio")
def large_blocks(run: Run, name: str) -> Row:
    """Copy blocks of 256 KiB, likewise."""
    return beside_contiguous(run, name, Scattered.of(nbytes_of(run, 1024 * MIB), 256 * KIB), 0.80)


@TOPIC.row("gpu_from_pinned_ratio")
def from_pinned(run: Run, name: str) -> Row:
    """Swap-in: blocks of 32 KiB from pinned memory, beside one contiguous copy."""
    case = Scattered.of(nbytes_of(run, 512 * MIB), 32 * KIB)
    return beside_contiguous(run, name, case, 0.90, "host_to_device")


@TOPIC.row("gpu_to_pinned_ratio")
def to_pinned(run: Run, name: str) -> Row:
    """Swap-out, likewise."""
    case = Scattered.of(nbytes_of(run, 512 * MIB), 32 * KIB)
    return beside_contiguous(run, name, case, 0.90, "device_to_host")


@TOPIC.row("gpu_one_block_us")
def one_block(run: Run, name: str) -> Row:
    """Copy one block of 32 KiB, from the start of the call to its end."""
    device, driver = device_of(run), driver_of(run)
    source, target = (Pool(device, 32 * KIB, on_device=True) for _ in range(2))
    source.fill(1)
    columns = [
        np.array([value], dtype=np.uint64) for value in (target.address, source.address, 32 * KIB)
    ]
    descriptors = Descriptors.from_columns(*columns)
    with Executor(device.backend("device_to_device")) as executor:
        ours, bare = run.medians(
            timed(partial(execute, executor, descriptors), repeats=20),
            timed(partial(driver.copy, target.address, source.address, 32 * KIB), repeats=20),
            rounds=101,
        )
    (found,) = target.pieces(32 * KIB)
    wrong = difference(found, words(32 * KIB, 1))
    assert not wrong, wrong
    note = f"a bare copy of the driver and its wait: {1e6 * bare:.1f} us; limit: the budget"
    return Row(name, 1e6 * ours, "us", 15, note=note)


@contextmanager
def linked(case: Scattered, transport: str = "local") -> Iterator[LlmDataDist]:
    """Yield an engine that is linked with a process that has caches of this shape."""
    arguments = (TENSORS, case.pool, case.block, transport)
    command = [sys.executable, gpu_peer.__file__, *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        try:
            address = peer.stdout.readline().strip()
            if not address:
                raise Unmeasured(f"the peer's process exited with {peer.wait()}")
            with LlmDataDist(0, LlmRole.MIX) as datadist:
                datadist.initialize({"kvplan.accelerator": "cuda", "kvplan.transport": transport})
                clusters = [ClusterInfo(CLUSTER, address)]
                datadist.link_clusters(clusters, timeout_ms=60_000).raise_for_status()
                yield datadist
        finally:
            peer.stdin.close()


def memories_of(datadist: LlmDataDist, cache: Cache) -> tuple[TensorMemory, TensorMemory]:
    """Return the GPU caches of the peer and of this engine, as the engine finds them."""
    engine = datadist._running()
    link = engine.links.get(CLUSTER)
    theirs = link.memory(link.cache(KEY), writable=False)
    return theirs, engine.registry.resolve(cache).memory


def between_processes(run: Run, name: str, case: Scattered, target: float) -> Row:
    """Measure the same between two processes on one GPU, planned and lowered before."""
    device, driver = device_of(run), driver_of(run)
    bare_source, bare_target = (Pool(device, case.nbytes, on_device=True) for _ in range(2))
    with linked(case) as datadist, Transfers() as transfers:
        run.note("linked")
        desc = cache_of(TENSORS, case.pool, case.block)
        given, cache = (datadist.allocate_blocks_cache(desc) for _ in range(2))
        starts = range(0, desc.nbytes, desc.tensor_nbytes)
        content = [words(desc.tensor_nbytes, 2, start).reshape(desc.shape) for start in starts]
        run.note("made bytes")
        datadist.write_cache(given, content)
        run.note("filled a cache")
        everything = list(range(case.pool))
        datadist.push_blocks(given, KEY, everything, everything, timeout_ms=60_000)
        run.note("pushed all of it")
        there, here = case.tables()
        plan = datadist.plan(Transfer(Rows(KEY, there), Rows(cache, here), coalesce=False))
        theirs, own = memories_of(datadist, cache)
        descriptors = bind(plan, theirs, own, one_space=theirs.in_process)
        move = partial(transfers.execute, plan, theirs, own, None, descriptors)
        move()
        check_scattered(case, 2, datadist.arrays(cache, copy=True))
        run.note("compared every byte")
        ours, whole, bare = run.medians(
            timed(move),
            timed(partial(datadist.pull_blocks, KEY, cache, there, here, timeout_ms=60_000)),
            timed(partial(driver.copy, bare_target.address, bare_source.address, case.nbytes)),
            rounds=ROUNDS,
        )
        del theirs, own, move
    note = (
        f"{len(descriptors):,} descriptors of {case.block // KIB} KiB; pull_blocks with its "
        f"planning: {case.nbytes / whole / 1e9:.1f} GB/s; limit: one contiguous"
    )
    figures = case.nbytes / ours / 1e9, "GB/s", case.nbytes / bare / 1e9
    return Row(name, *figures, "at least", target, note)


@TOPIC.row("gpu_peer_4KiB_ratio")
def small_blocks_of_peer(run: Run, name: str) -> Row:
    """Copy blocks of 4 KiB between two processes on one GPU, beside one contiguous copy."""
    return between_processes(run, name, Scattered.of(nbytes_of(run, 256 * MIB), 4 * KIB), 0.50)


@TOPIC.row("gpu_peer_32KiB_ratio")
def blocks_of_peer(run: Run, name: str) -> Row:
    """Copy blocks of 32 KiB between two processes, likewise."""
    return between_processes(run, name, Scattered.of(nbytes_of(run, 1024 * MIB), 32 * KIB), 0.80)


@TOPIC.row("gpu_peer_256KiB_ratio")
def large_blocks_of_peer(run: Run, name: str) -> Row:
    """Copy blocks of 256 KiB between two processes, likewise."""
    return between_processes(run, name, Scattered.of(nbytes_of(run, 1024 * MIB), 256 * KIB), 0.80)


@TOPIC.row("gpu_request_over_nixl")
def request(run: Run, name: str) -> Row:
    """Pull by a whole call, with planning: 64 tensors x 64 blocks of 32 KiB of another process."""
    case = Scattered.of(nbytes_of(run, TENSORS * REQUEST_BLOCKS * REQUEST_BLOCK), REQUEST_BLOCK)
    device_of(run)
    with linked(case) as datadist:
        cache = datadist.allocate_blocks_cache(cache_of(TENSORS, case.pool, case.block))
        there, here = (table.tolist() for table in case.tables())
        pull = partial(datadist.pull_blocks, KEY, cache, there, here, timeout_ms=60_000)
        (ours,) = run.medians(timed(pull), rounds=ROUNDS)
        said = f"{TENSORS} x {case.blocks} blocks of 32 KiB in {1e6 * ours:.0f} us"
        try:
            peers = nixl_on_gpu()
        except Unmeasured as error:
            raise Unmeasured(f"kvplan: {said}; of NIXL: {error}") from error
        seconds = {}
        for peer in peers:
            with Pair(peer, LOOPBACK) as pair:
                seconds[peer.settings] = pair.seconds("request", case.blocks)
    best = min(seconds, key=lambda second: seconds[second])
    note = f"{said} beside {1e6 * seconds[best]:.0f} us of NIXL ({best}), planning included"
    return Row(name, 1 / ours, "/s", 1 / seconds[best], "at least", 5, note)


class LayerPush:
    """A push of a whole cache, layer by layer, behind work on a stream of the program.

    Args:
        layer_us: approximate computing time of a layer.
    """

    def __init__(
        self, datadist: LlmDataDist, driver: Driver, cache: Cache, blocks: int, layer_us: float
    ) -> None:
        self._datadist, self._driver, self._cache = datadist, driver, cache
        self._blocks = list(range(blocks))
        self._layer_us = layer_us
        self._events = [driver.event() for _ in range(TENSORS // 2)]
        self.takes_events = "event" in inspect.signature(LayerTask.ready).parameters

    def close(self) -> None:
        """Destroy the events."""
        for event in self._events:
            self._driver.destroy_event(event)

    def after(self) -> float:
        """Compute all layers, then push; return the seconds of the push."""
        for _ in self._events:
            self._driver.compute(self._layer_us)
        self._driver.synchronize()
        start = time.perf_counter()
        self._datadist.push_blocks(self._cache, KEY, self._blocks, self._blocks, timeout_ms=60_000)
        return time.perf_counter() - start

    def meanwhile(self) -> float:
        """Push each layer behind its work; return the seconds from the last work to the end."""
        task = self._datadist.layered(
            Transfer(
                Rows(self._cache, self._blocks),
                Rows(KEY, self._blocks),
                layers=KvCacheExtParam(tensor_num_per_layer=2),
            )
        )
        for layer, event in enumerate(self._events):
            self._driver.compute(self._layer_us)
            self._driver.record(event)
            self._ready(task.ready, layer, event)
        self._driver.synchronize()
        computed = time.perf_counter()
        task.wait(timeout_ms=60_000)
        return time.perf_counter() - computed

    def _ready(self, ready: Callable[..., None], layer: int, event: int) -> None:
        """Order a layer behind its event; if kvplan takes no events, wait for the event here."""
        if self.takes_events:
            ready(layer, event=event)
            return
        self._driver.wait_event(event)
        ready(layer)


@TOPIC.row("gpu_layerwise_visible_fraction")
def layerwise(run: Run, name: str) -> Row:
    """Rest of a layer-wise push after the last layer's work, beside a push after all layers."""
    case = Scattered.of(nbytes_of(run, 256 * MIB), 32 * KIB)
    driver = driver_of(run)
    with linked(case) as datadist:
        cache = datadist.allocate_blocks_cache(cache_of(TENSORS, case.pool, case.block))
        push = LayerPush(datadist, driver, cache, case.pool, layer_us=200)
        try:
            visible, blocking = run.medians(push.meanwhile, push.after, rounds=ROUNDS)
        finally:
            push.close()
    how = "behind events" if push.takes_events else "by a thread that waits for events"
    work = "a kernel on all multiprocessors" if driver.computes else "memory that is set"
    note = f"{TENSORS // 2} layers {how}, behind {work}; limit: the push after the compute"
    return Row(name, 1e3 * visible, "ms", 1e3 * blocking, "at most", 0.10, note)
