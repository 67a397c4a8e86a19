"""Python's memory may end anywhere in a transfer: then nothing stays held, and nothing crashes."""

import gc
from collections.abc import Callable

import numpy as np
import pytest

from kvnative._executor import Backend, Executor, ThreadPool, fail_at, host_backend, limit_batch
from kvnative._lower import Descriptors, lower
from tests.native.scatter import scatter

hooks = pytest.importorskip("_testcapi", reason="not every build of CPython has its test hooks")


def submitted(executor: Executor, descriptors: Descriptors) -> None:
    executor.submit(descriptors, keep=executor).wait()


def staged(executor: Executor, descriptors: Descriptors) -> None:
    task = executor.stage(descriptors, 3, keep=executor)
    for stage in (2, 0, 1):
        task.open(stage)
    task.states()
    task.wait()


def given_up(executor: Executor, descriptors: Descriptors) -> None:
    task = executor.stage(descriptors, 3, keep=executor)
    task.open(1)
    task.cancel()


@pytest.mark.parametrize("transfer", [submitted, staged, given_up])
@pytest.mark.parametrize(
    "layer", [lambda it: it, lambda it: limit_batch(it, 2), lambda it: fail_at(it, 4)]
)
def test_wherever_memory_ends(
    transfer: Callable[[Executor, Descriptors], None], layer: Callable[[Backend], Backend]
) -> None:
    host = host_backend(ThreadPool(1))
    one = np.ones(1, np.uint64)
    failed, allocation = True, 0
    while failed:  # until the transfer needs fewer allocations than are let through
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
        lower(one, one, one, one, one, out=case.descriptors)  # nobody holds them any more
        allocation += 1
    assert allocation > 1
