"""What is read again is compared as long as it is what was moved."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import CacheDesc, DataType, LLMException, LLMStatusCode, Transfers
from kvplan.execution import HostMemory
from tests.support.refusals import refused

DESC = CacheDesc(2, (8, 100), DataType.DT_UINT8)
PLAN = kvplan.plan_pull_blocks(DESC, DESC, [0, 1], [5, 3])


class Leased(HostMemory):
    """Memory that its owner gives to another request as soon as a check has passed."""

    arrays: list[np.ndarray]
    checks = 0
    ends_after = 0  # so many checks that pass

    def check(self) -> None:
        self.checks += 1
        if self.checks > self.ends_after:
            raise LLMException("released", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        if self.checks == self.ends_after:
            for it in self.arrays:
                it[:] = 9


@pytest.mark.parametrize("ends_after", [1, 2])
def test_a_lease_that_ends_while_bytes_are_compared_comes_first(ends_after: int) -> None:
    """Nothing was moved wrongly: the blocks are another request's."""
    arrays = [np.full(DESC.shape, 5, np.uint8) for _ in range(2)]
    src = Leased.from_arrays(arrays)
    assert isinstance(src, Leased)
    src.arrays, src.ends_after = arrays, 10
    dst = HostMemory.from_arrays([np.zeros(DESC.shape, np.uint8) for _ in range(2)])
    with Transfers(1) as transfers:
        transfers.execute(PLAN, src, dst)
        transfers.verify(PLAN, src, dst)
        # One check before what is read again, and one after it.
        src.checks, src.ends_after = 0, ends_after
        with refused("LLM_KV_CACHE_NOT_EXIST", "released"):
            transfers.verify(PLAN, src, dst)
