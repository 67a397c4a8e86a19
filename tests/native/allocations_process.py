"""The program of test_allocations.py: runs an operation while each native allocation fails once."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

import kvplan
from kvnative._backend import KVN_OK, NativeError, ThreadPool, host_backend
from kvnative._executor import Executor
from kvnative._host import GenerationTable
from kvnative._lower import Descriptors
from kvnative._writers import Writer, WriterTable
from kvplan import (
    Cache,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    LLMException,
    LlmRole,
    Options,
    Rows,
    Transfer,
    Transfers,
)
from tests.support.held import Held

SHIM = ctypes.CDLL(None)  # the preloaded library
DESC = CacheDesc(2, (8, 1 << 15), DataType.DT_INT8)
BLOCKS, ORDER = [1, 3, 5], [6, 0, 2]


def filled(value: int) -> list[np.ndarray]:
    return [np.full(DESC.shape, value, np.int8) for _ in range(2)]


def assert_arrived(target: list[np.ndarray]) -> None:
    for array in target:
        assert (array[ORDER] == 7).all()
        assert not np.delete(array, ORDER, axis=0).any()


def executed() -> None:
    target = filled(0)
    with Transfers(2) as transfers:
        plan = kvplan.plan(Transfer(Rows(DESC, BLOCKS), Rows(DESC, ORDER)), local="dst")
        transfers.execute(plan, filled(7), target)
    assert_arrived(target)


def submitted() -> None:
    target = filled(0)
    with Transfers(2) as transfers:
        plan = kvplan.plan(Transfer(Rows(DESC, BLOCKS), Rows(DESC, ORDER)), local="dst")
        transfers.submit(plan, filled(7), target).wait()
    assert_arrived(target)


def layered() -> None:
    target = filled(0)
    with Transfers(2) as transfers:
        one = KvCacheExtParam(tensor_num_per_layer=1)
        plan = kvplan.plan(Transfer(Rows(DESC, BLOCKS), Rows(DESC, ORDER), layers=one), local="src")
        task = transfers.layered(plan, filled(7), target)
        for layer in (1, 0):
            task.ready(layer)
        task.wait()
    assert_arrived(target)


def guarded() -> None:
    """Write to memory of a process, in fact this one, in each of three ways."""
    generations, table = GenerationTable(8), WriterTable(4)
    try:
        writer = Writer(
            os.getpid(), generations_fd=generations.fd, generations_inode=generations.inode,
            num_slots=generations.num_slots, table_fd=table.fd, table_inode=table.inode,
            num_entries=table.num_entries, address=table.address,
        )  # fmt: skip
        words, pool = np.array(generations.take(), np.uint64).tobytes(), ThreadPool(1)
        around = writer.around(host_backend(pool), words)
        for backend in (writer.mapped(pool, words), writer.by_address(pool, words), around):
            sides = np.full(1 << 16, 7, np.uint8), np.zeros(1 << 16, np.uint8)
            columns = (sides[1].ctypes.data, sides[0].ctypes.data, 1 << 16)
            batch = Descriptors.from_columns(*(np.array([item], np.uint64) for item in columns))
            with Executor(backend) as executor:
                report = executor.run(batch, timeout_ms=60_000)
            if report.status != KVN_OK:
                raise MemoryError(report.message)
            assert (sides[1] == 7).all()
    finally:
        table.close()
        generations.close()


def engines(transport: str) -> None:
    with ExitStack() as held:
        caches: list[Cache] = []
        made = [held.enter_context(LlmDataDist(number, LlmRole.MIX)) for number in (1, 2)]
        for number, engine in enumerate(made):
            engine.initialize(Options(transport=transport, listen_ip_info="127.0.0.1:0"))
            caches.append(engine.allocate_blocks_cache(DESC))
            for array in engine.arrays(caches[-1]):
                array[:] = 0 if number else 7
        owner, user = made
        cluster = ClusterInfo(1, owner.listen_address or "")
        try:
            results = user.link_clusters([cluster], timeout_ms=5_000)
        except MemoryError as error:
            raise AssertionError("of several clusters each has a result") from error
        results.raise_for_status()
        user.pull_blocks(CacheIndex(1, caches[0].cache_id), caches[1], BLOCKS, ORDER)
        assert_arrived(user.arrays(caches[1]))
        lease = owner.lease_blocks(caches[0], BLOCKS, ttl_ms=60_000)
        user.pull_blocks(lease, caches[1], None, ORDER)
        owner.release(lease)
        user.unlink_clusters([1], timeout_ms=5_000).raise_for_status()


OPERATIONS: dict[str, Callable[[], None]] = {
    "executed": executed,
    "submitted": submitted,
    "layered": layered,
    "guarded": guarded,
    "local": lambda: engines("local"),
    "tcp": lambda: engines("tcp"),
}


def kept_allocations() -> int:
    """Return the number of native allocations that are neither freed nor held by a cycle."""
    gc.collect()
    return int(SHIM.failing_allocations_kept())


def main(name: str) -> None:
    """Print the result of each failed allocation: a status, an exception, or SUCCESS."""
    faulthandler.dump_traceback_later(100, exit=True)
    operation = OPERATIONS[name]
    operation()  # loads what stays loaded
    assert SHIM.failing_allocations_begin(ctypes.c_long(0))
    operation()
    count = SHIM.failing_allocations_end()
    before, kept = Held.now(), kept_allocations()
    outcomes: list[str] = []
    for number in range(1, count + 1):
        SHIM.failing_allocations_begin(ctypes.c_long(number))
        try:
            operation()
        except (LLMException, NativeError, MemoryError) as error:
            sys.stderr.write(f"{number}: {error!r}\n")
            status = getattr(error, "status_code", None)
            outcomes.append(type(error).__name__ if status is None else status.name)
        else:
            outcomes.append("SUCCESS")
        finally:
            SHIM.failing_allocations_end()
        left = kept_allocations() - kept
        assert left <= 0, f"{left} allocations are left once that of number {number} has failed"
        operation()
        left = kept_allocations() - kept
        assert left <= 0, f"{left} allocations are left by an operation"
    before.check_nothing_new()
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1])
