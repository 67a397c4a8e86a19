"""A lack of memory anywhere in a transfer leaves nothing held, and does not crash."""

import gc
import os
import sys
from collections.abc import Callable

import numpy as np
import pytest

from kvnative._backend import Backend, ThreadPool, host_backend
from kvnative._executor import Executor
from kvnative._lower import Descriptors, lower
from tests.native.scatter import scatter
from tests.native.test_executor_processes import run
from tests.support.wrappers import fail_at, limit_batch

can_limit = pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer has reserved its memory"
)


def submitted(executor: Executor, descriptors: Descriptors) -> None:
    executor.submit(descriptors, keep=executor).wait()


def layered(executor: Executor, descriptors: Descriptors) -> None:
    task = executor.layered(descriptors, 3, keep=executor)
    for layer in (2, 0, 1):
        task.open(layer)
    task.states()
    task.wait()


def given_up(executor: Executor, descriptors: Descriptors) -> None:
    task = executor.layered(descriptors, 3, keep=executor)
    task.open(1)
    task.cancel()


@pytest.mark.skipif(
    sys.version_info >= (3, 14),
    reason="its compiler, with which Cython makes a traceback, crashes where memory ends",
)
@pytest.mark.parametrize("transfer", [submitted, layered, given_up])
@pytest.mark.parametrize(
    "layer",
    [lambda value: value, lambda value: limit_batch(value, 2), lambda value: fail_at(value, 4)],
)
def test_a_lack_of_memory_anywhere(
    transfer: Callable[[Executor, Descriptors], None],
    layer: Callable[[Backend], Backend],
) -> None:
    hooks = pytest.importorskip("_testcapi", reason="not every CPython has its test hooks")
    host = host_backend(ThreadPool(1))
    one = np.ones(1, np.uint64)
    failed, allocation = True, 0
    while failed:  # until the transfer needs fewer allocations than are permitted
        case = scatter([100] * 9)
        executor = Executor(layer(host))
        failed = False
        hooks.set_nomemory(allocation, allocation + 1)
        try:
            transfer(executor, case.descriptors)
        except MemoryError:
            failed = True
        finally:
            hooks.remove_mem_hooks()
        executor.close()
        gc.collect()
        lower(one, one, one, one, one, out=case.descriptors)  # no task holds them any more
        allocation += 1
    assert allocation > 1


LEAVE = """
import resource
from kvnative._lower import lower
def leave(nbytes):
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + nbytes,) * 2)
"""


@can_limit
def test_no_memory_for_layers_is_an_error_that_holds_nothing() -> None:
    run(
        LEAVE
        + """
column = np.ones(2_000_000, np.uint64)
many = lower(column, column, column, column[:1], column[:1])
leave(16 << 20)
try:
    executor.layered(many, 1)
except MemoryError as error:
    assert "2000000 descriptors in layers of 1" in str(error)
else:
    raise AssertionError
lower(*[column[:1]] * 5, out=many)
assert executor.run(case.descriptors).status == KVN_OK
"""
    )


@can_limit
def test_no_memory_to_lower_in_leaves_the_array_as_it_was() -> None:
    run(
        LEAVE
        + """
column = np.ones(2_000_000, np.uint64)
leave(16 << 20)
try:
    lower(column, column, column, column[:1], column[:1], out=case.descriptors)
except MemoryError as error:
    assert "bytes of descriptors" in str(error)
else:
    raise AssertionError
assert case.descriptors.count == len(case.nbytes)
assert executor.run(case.descriptors).status == KVN_OK
case.assert_moved()
"""
    )


@can_limit
def test_no_memory_for_a_layer_in_flight_is_an_outcome() -> None:
    run(
        LEAVE
        + """
small = scatter([16] * 100_000)
task = Executor(delay(executor.backend, 1e9)).layered(small.descriptors, 1)
leave(32 << 20)
opened = 0
while not task.sealed:
    opened += task.open(opened)
assert opened < 100_000
report = task.cancel()
assert report.status == KVN_NO_MEMORY, report
assert "no memory for a " in report.message
assert report.unconfirmed == ((0, 100_000),)
"""
    )


@can_limit
def test_no_memory_for_the_ranges_of_a_service_has_a_status() -> None:
    run(
        LEAVE
        + """
import errno
from kvnative._backend import CallError
from kvnative._tcp import TcpService
leave(16 << 20)
try:
    TcpService(1, max_ranges=2**24)
except CallError as error:
    assert (error.status, error.errno) == (KVN_NO_MEMORY, errno.ENOMEM), error
    assert str(error) == "no memory for 16777216 ranges"
else:
    raise AssertionError
"""
    )
