"""A process of `chaos`: an engine that leases its blocks, and threads that transfer other blocks.

The oracle is bytes. Each word of a block identifies the request (by a stamp), the tensor, the
position among the request's blocks, and the position in the block. So bytes of another request,
block or position are detected.
"""

from __future__ import annotations

import gc
import queue
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan import (
    BlockLease,
    Cache,
    CacheDesc,
    ClusterInfo,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    LLMException,
    LlmRole,
    LLMStatusCode,
    Rows,
    Transfer,
)
from tests.faults.footprint import footprint

Words = NDArray[np.uint32]
NUM_TENSORS, NUM_BLOCKS, MAX_ROWS = 4, 12, 4
PAIRS = KvCacheExtParam(tensor_num_per_layer=2)
FREED = 1 << 15  # larger stamps are those of blocks that belong to no request
LONG_MS = 60_000
# The statuses of transfers that meet the end of their lease, link, process or engine.
EXPECTED = (
    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    LLMStatusCode.LLM_LINK_FAILED,
    LLMStatusCode.LLM_NOT_YET_LINK,
    LLMStatusCode.LLM_TIMEOUT,
    LLMStatusCode.LLM_ENGINE_FINALIZED,
)
NOT_LINKED = (
    LLMStatusCode.LLM_LINK_FAILED,
    LLMStatusCode.LLM_NOT_YET_LINK,
)


@dataclass(frozen=True)
class Job:
    """A transfer with a lease.

    Attributes:
        kind: "pull", "rows" (a pull that names blocks of the lease), "wait" (a submission that is
            awaited), "cancel" (a submission that is cancelled), "push" or "layers".
        lease: the lease as bytes.
        stamp: of the blocks of the lease, or of the bytes that are pushed to them.
        rows: blocks of the mover's own cache, one for each block of the lease.
        owner, address: the cluster that owns the lease, and its address.
        timeout_ms: of the transfer.
    """

    kind: str
    lease: bytes
    stamp: int
    rows: tuple[int, ...]
    owner: int
    address: str
    timeout_ms: int


def words(like: Words, stamp: int, tensor: int, position: int) -> Words:
    """Return the content of a block of this shape."""
    ramp = np.arange(like.size, dtype=np.uint32) * np.uint32(2654435761)
    return ramp + np.uint32(stamp * 65536 % 2**32 + tensor * 256 + position)


def write(arrays: list[Words], blocks: tuple[int, ...], stamp: int) -> None:
    for tensor, array in enumerate(arrays):
        for position, block in enumerate(blocks):
            array[block] = words(array[block], stamp, tensor, position)


def find_mismatch(arrays: list[Words], blocks: tuple[int, ...], stamps: tuple[int, ...]) -> str:
    """Describe the first word that has none of these stamps; "" if all words have one."""
    for tensor, array in enumerate(arrays):
        for position, block in enumerate(blocks):
            found = array[block]
            good = np.zeros(found.shape, bool)
            for stamp in stamps:
                good |= found == words(found, stamp, tensor, position)
            if not good.all():
                first = int(np.argmin(good))
                of = int((found - words(found, 0, tensor, position))[first]) / 65536
                return (
                    f"tensor {tensor}, block {block}, word {first} (of {(~good).sum()}): "
                    f"{int(found[first]):#x}, of stamp {of:g} and not of {stamps}"
                )
    return ""


class Mover(threading.Thread):
    """A thread that runs one transfer after another, into and out of caches of its own."""

    def __init__(self, home: Home) -> None:
        super().__init__(daemon=True)
        self.jobs: queue.Queue[Job | None] = queue.Queue()
        self._home, self._engine = home, home.engine
        self._target, self._source = (self._engine.allocate_blocks_cache(home.desc) for _ in "ab")
        self._pulled, self._pushed = (
            self._engine.arrays(value) for value in (self._target, self._source)
        )
        self._left = [array.copy() for array in self._pulled]
        self.start()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                outcome = self._try(job)
            except BaseException:
                outcome = f"CRASH: {traceback.format_exc()}"
            self._home.outcomes.append((job.stamp, job.kind, outcome))
            self.jobs.task_done()
        self.jobs.task_done()

    def _try(self, job: Job) -> str:
        """Run a job; return "moved", "cancelled", the name of a status, or "WRONG: reason"."""
        if any((now != was).any() for now, was in zip(self._pulled, self._left, strict=True)):
            return "WRONG: the target has changed since the last transfer had ended"
        for attempt in (1, 2):
            try:
                self._move(job, BlockLease.from_bytes(job.lease))
            except LLMException as error:
                status = error.status_code
                if job.kind == "cancel" and status is LLMStatusCode.LLM_CANCELLED:
                    return "cancelled" if "cancelled" in str(error) else f"{status.name}: {error}"
                if attempt == 2 or status not in NOT_LINKED:
                    return status.name if status in EXPECTED else f"{status.name}: {error}"
                try:
                    self._home.link(job.owner, job.address)
                except LLMException as refused:
                    return f"link: {refused.status_code.name}"
            else:
                return self._verdict(job)
            finally:
                self._left = [array.copy() for array in self._pulled]
        raise AssertionError

    def _move(self, job: Job, lease: BlockLease) -> None:
        engine, target, rows = self._engine, self._target, list(job.rows)
        if job.kind in ("push", "layers"):
            write(self._pushed, job.rows, job.stamp)
            if job.kind == "push":
                engine.push_blocks(self._source, lease, rows, timeout_ms=job.timeout_ms)
                return
            layered = engine.layered(Transfer(Rows(self._source, rows), Rows(lease), layers=PAIRS))
            try:
                for layer in layered.layers:
                    layered.ready(layer)
                layered.wait(job.timeout_ms)
            finally:
                layered.cancel()
            return
        write(self._pulled, job.rows, 0)
        self._left = [array.copy() for array in self._pulled]
        if job.kind == "pull":
            engine.pull_blocks(lease, target, None, rows, timeout_ms=job.timeout_ms)
        elif job.kind == "rows":  # small transfers are copied inline, without a timeout
            engine.pull_blocks(lease, target, list(lease.blocks), rows)
        else:
            task = engine.submit(Transfer(Rows(lease), Rows(target, rows)))
            if job.kind == "cancel":
                task.cancel()
            task.wait(job.timeout_ms)

    def _verdict(self, job: Job) -> str:
        """Return "moved" if exactly the blocks of the job have changed, else "WRONG: reason"."""
        if job.kind in ("push", "layers"):
            return "moved"
        others = [index for index in range(NUM_BLOCKS) if index not in job.rows]
        for now, was in zip(self._pulled, self._left, strict=True):
            if (now[others] != was[others]).any():
                return "WRONG: a pull has written to blocks that are not its own"
        if found := find_mismatch(self._pulled, job.rows, (job.stamp,)):
            return f"WRONG: pulled {found}"
        return "moved"


class Home:
    """The engine of this process between `start` and `end`, with its blocks and movers."""

    def __init__(self, kind: type[LlmDataDist], own: Any) -> None:
        self._kind, self._own = kind, own
        self.outcomes: list[tuple[int, str, str]] = []
        self._linking = threading.Lock()
        self._last = 0
        # Unregistered memory and its last content.
        self._unregistered: list[tuple[list[Words], list[Words]]] = []

    def start(
        self, cluster_id: int, options: dict[str, str], block_words: int, registered: bool
    ) -> str:
        """Start a new engine; return its address."""
        self.desc = CacheDesc(NUM_TENSORS, (NUM_BLOCKS, block_words), DataType.DT_UINT32)
        self.registered, self.cluster_id = registered, cluster_id
        self.engine = self._kind(cluster_id, LlmRole.MIX)
        self.engine.initialize(options)
        self._make()
        self.movers = [Mover(self) for _ in range(2)]
        assert self.engine.listen_address is not None
        return self.engine.listen_address

    def end(self) -> None:
        """Finalize the engine while transfers are in flight."""
        self.engine.finalize()
        for mover in self.movers:
            mover.jobs.put(None)
        for mover in self.movers:
            mover.join()
        self.forget()
        del self.engine, self.movers, self.cache, self.arrays, self.live, self.free
        gc.collect()

    def _make(self) -> None:
        if self.registered:
            views, given = self._own(self.cluster_id, self.desc)
            self.cache: Cache = self.engine.register_blocks_cache(self.desc, given)
            self.arrays: list[Words] = views
        else:
            self.cache = self.engine.allocate_blocks_cache(self.desc)
            self.arrays = self.engine.arrays(self.cache)
        self.live: dict[int, tuple[BlockLease, int]] = {}
        self.free: dict[int, int] = {}
        self._fill_free(tuple(range(NUM_BLOCKS)))

    def _fill_free(self, blocks: tuple[int, ...]) -> None:
        self._last += 1
        for block in blocks:
            self.free[block] = FREED + self._last % FREED
            write(self.arrays, (block,), self.free[block])

    def recycle(self) -> None:
        """Free the cache while transfers are in flight, and offer another one."""
        if self.registered:
            self.engine.unregister_cache(self.cache.cache_id)
            self._unregistered = [
                *self._unregistered[-1:],
                (self.arrays, [array.copy() for array in self.arrays]),
            ]
        else:
            self.engine.deallocate_cache(self.cache)
        self._make()

    def link(self, cluster_id: int, address: str, timeout_ms: int = 5000) -> None:
        with self._linking:
            if any(link.cluster_id == cluster_id for link in self.engine.links()):
                self.engine.unlink_clusters([cluster_id], timeout_ms, force=True)
            cluster = ClusterInfo(cluster_id, address)
            self.engine.link_clusters([cluster], timeout_ms).raise_for_status()

    def lease(self, number: int, count: int, stamp: int, ttl_ms: float | None) -> bytes:
        """Lease free blocks to a request, whose number is `stamp`."""
        blocks = tuple(sorted(self.free, key=lambda value: self.free[value])[:count])
        write(self.arrays, blocks, stamp)
        for block in blocks:
            del self.free[block]
        lease = self.engine.lease_blocks(self.cache, blocks, ttl_ms=ttl_ms)
        self.live[number] = (lease, stamp)
        return lease.to_bytes()

    def release(self, number: int, pushed: int | None, confirmed: bool) -> str:
        """End a lease and return its blocks to the free ones; return what is wrong in them.

        Args:
            number: of the lease. It is unknown if its cache has been freed.
            pushed: the stamp that a peer may have pushed.
            confirmed: True if that push has succeeded.
        """
        if number not in self.live:
            return ""
        lease, stamp = self.live[number]
        wrong = confirmed and find_mismatch(self.arrays, lease.blocks, (pushed or 0,))
        self.engine.release(lease)  # after LLM_TIMEOUT, the caller calls `release` again
        del self.live[number]
        stamps = (stamp,) if pushed is None else (stamp, pushed)
        wrong = wrong or find_mismatch(self.arrays, lease.blocks, stamps)
        self._fill_free(lease.blocks)
        return wrong and f"WRONG: {'surely ' * confirmed}pushed to {lease}: {wrong}"

    def check(self) -> str:
        """Return an error if free blocks or unregistered memory have changed, else ""."""
        for block, stamp in self.free.items():
            if found := find_mismatch(self.arrays, (block,), (stamp,)):
                return f"WRONG: written to a free block: {found}"
        for arrays, were in self._unregistered:
            if any((array != was).any() for array, was in zip(arrays, were, strict=True)):
                return "WRONG: written to memory that was unregistered"
        return ""

    def forget(self) -> None:
        """Drop memory that was unregistered."""
        self._unregistered.clear()

    def do(self, mover: int, job: Job) -> None:
        self.movers[mover].jobs.put(job)

    def join(self) -> None:
        for mover in self.movers:
            mover.jobs.join()

    def take(self) -> list[tuple[int, str, str]]:
        """Return the outcomes since the last call."""
        found = self.outcomes[:]
        del self.outcomes[: len(found)]
        return found


def held() -> dict[str, Any]:
    """Return the resources of this process.

    Of its memory only private pages count: peers map shared ones at any time.
    """
    found = dict(footprint())
    # The simulator keeps memory that a test has looked at, because arrays may outlive the memory of
    # a device.
    found["mappings"] -= Path("/proc/self/maps").read_text().count("/memfd:kvsim-device")
    status = Path("/proc/self/status").read_text()
    found["kib"] = int(status.partition("RssAnon:")[2].split()[0])
    found["threads"] = sorted(
        path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")
    )
    return found


def names(machine: str) -> dict[str, Any]:
    """Return the names of a peer on "host" or "ascend"."""
    if machine != "ascend":

        def plain(_: int, desc: CacheDesc) -> tuple[list[Words], list[Any]]:
            arrays = [np.zeros(desc.shape, np.uint32) for _ in range(desc.num_tensors)]
            return arrays, arrays

        return {"home": Home(LlmDataDist, plain), "held": held, "left": dict}
    from tests.ascend.device import OnDevice, SimulatedAscend

    def on_device(cluster_id: int, desc: CacheDesc) -> tuple[list[Words], list[Any]]:
        device = SimulatedAscend(cluster_id)
        views = [device.zeros(desc.shape, np.uint32) for _ in range(desc.num_tensors)]
        return views, device.addresses(views)

    left = SimulatedAscend(0).left
    return {"home": Home(OnDevice, on_device), "held": held, "left": left}
