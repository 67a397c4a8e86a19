"""Verification compares the bytes only while both sides still belong to the request."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvnative._backend import ThreadPool, host_backend
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._report import Report
from kvplan import CacheDesc, DataType, LLMException, LLMStatusCode, Rows, Transfer, Transfers
from kvplan.execution import HostMemory
from kvplan.execution.binding import bind
from kvplan.execution.verification import SCRATCH_NBYTES, check_verifiable, verify, verify_every
from tests.support.refusals import refused

DESC = CacheDesc(2, (8, 100), DataType.DT_UINT8)
PLAN = kvplan.plan(Transfer(Rows(DESC, [0, 1]), Rows(DESC, [5, 3])), local="dst")


class Leased(HostMemory):
    """Memory that its owner gives to another request as soon as a check has passed."""

    arrays: list[np.ndarray]
    checks = 0
    ends_after = 0  # number of checks that pass

    def check(self) -> None:
        self.checks += 1
        if self.checks > self.ends_after:
            raise LLMException("released", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        if self.checks == self.ends_after:
            for array in self.arrays:
                array[:] = 9


def test_the_option_is_one_of_three_forms() -> None:
    options = ("off", "all", "sample:1/1", "sample:1/999999")
    assert [*map(verify_every, options)] == [0, 1, 1, 999999]
    for wrong in ("on", "sample:1/0", "sample:1/1000000", "sample:1/4 ", " sample:1/4"):
        with pytest.raises(ValueError, match=wrong):
            verify_every(wrong)


class OnDevice(HostMemory):
    """Memory that says of itself that a plain copy does not reach it."""

    on_device = True


def test_memory_of_a_device_on_either_side_is_not_verified() -> None:
    host, device = (
        kind.from_arrays([np.zeros(DESC.shape, np.uint8)]) for kind in (HostMemory, OnDevice)
    )
    check_verifiable(host, host)
    for sides in ((device, host), (host, device), (device, device)):
        with refused("LLM_FEATURE_NOT_ENABLED", "verify: memory of a device"):
            check_verifiable(*sides)


def test_each_read_has_the_remaining_time() -> None:
    """The limit of each read is in milliseconds, like the timeout of the call."""
    src, dst = (
        HostMemory.from_arrays([np.zeros(DESC.shape, np.uint8) for _ in range(2)]) for _ in "sd"
    )
    scratch = HostMemory.from_arrays([np.empty(1000, np.uint8)])
    descriptors = bind(PLAN, src, dst, one_space=True)
    limits: list[float | None] = []
    with Executor(host_backend(ThreadPool(1))) as executor:

        def read(some: Descriptors, limit_ms: float | None) -> Report:
            limits.append(limit_ms)
            return executor.run(some)

        for timeout_ms in (None, 60_000):
            verify(PLAN, descriptors, src, dst, scratch, read, 1, timeout_ms)
    without, left = limits
    assert without is None
    assert left is not None
    assert 1_000 < left <= 60_000


@pytest.mark.parametrize("ends_after", [1, 2])
def test_the_end_of_a_lease_is_reported_instead_of_wrong_bytes(ends_after: int) -> None:
    """The bytes differ because the blocks belong to another request, so the lease is the error."""
    arrays = [np.full(DESC.shape, 5, np.uint8) for _ in range(2)]
    src = Leased.from_arrays(arrays)
    assert isinstance(src, Leased)
    src.arrays, src.ends_after = arrays, 10
    dst = HostMemory.from_arrays([np.zeros(DESC.shape, np.uint8) for _ in range(2)])
    with Transfers(1) as transfers:
        transfers.execute(PLAN, src, dst)
        transfers.verify(PLAN, src, dst)
        # One check before the read, and one after the read.
        src.checks, src.ends_after = 0, ends_after
        with refused("LLM_KV_CACHE_NOT_EXIST", "released"):
            transfers.verify(PLAN, src, dst)


@pytest.mark.parametrize("more", [0, 1, SCRATCH_NBYTES // 2])
def test_a_descriptor_larger_than_the_scratch_memory_is_compared_whole(more: int) -> None:
    desc = CacheDesc(1, (2, SCRATCH_NBYTES + more), DataType.DT_UINT8)
    plan = kvplan.plan(Transfer(Rows(desc, [0]), Rows(desc, [1])), local="dst")
    given = np.random.default_rng(7).integers(0, 256, desc.shape, np.uint8)
    written = np.zeros(desc.shape, np.uint8)
    src, dst = HostMemory.from_arrays([given]), HostMemory.from_arrays([written])
    with Transfers(1) as transfers:
        transfers.execute(plan, src, dst)
        transfers.verify(plan, src, dst)
        for place in (0, SCRATCH_NBYTES - 1, desc.shape[1] - 1):
            written[1, place] ^= 1
            with refused("LLM_FAILED", "is not the same on both sides"):
                transfers.verify(plan, src, dst)
            written[1, place] ^= 1


def test_a_sample_names_the_block_that_differs() -> None:
    plan = kvplan.plan(
        Transfer(Rows(DESC, [0, 1, 2]), Rows(DESC, [5, 3, 7]), coalesce=kvplan.Coalesce.NONE),
        local="dst",
    )
    written = [np.zeros(DESC.shape, np.uint8) for _ in range(2)]
    src = HostMemory.from_arrays([np.zeros(DESC.shape, np.uint8) for _ in range(2)])
    dst = HostMemory.from_arrays(written)
    written[1][3] = 9
    message = ""
    with Transfers(1) as transfers:
        while not message:  # the first descriptor of a sample is chosen by lot
            try:
                transfers.verify(plan, src, dst, 3)
            except LLMException as error:
                message = str(error)
    assert f"verify: {plan.origin(4)} is not the same on both sides" in message
    assert "3" in str(plan.origin(4))
