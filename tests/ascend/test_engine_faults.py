"""Failures of the device and of transfers: the engine reports them and still works afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvplan import (
    Cache,
    CacheDesc,
    CacheIndex,
    DataType,
    LlmDataDist,
    LLMException,
    LLMStatusCode,
    Placement,
    Rows,
    Transfer,
)
from tests.ascend.simulator import Controls
from tests.datadist.conftest import MakeEngine
from tests.datadist.peer import Peer
from tests.support.refusals import refused

# Two layers of 300 blocks: 600 descriptors are three batches of HCCL.
NUM_BLOCKS = 600
DESC = CacheDesc(2, (NUM_BLOCKS, 16), DataType.DT_INT32)
MINE = np.arange(0, NUM_BLOCKS, 2).tolist()
THEIRS = MINE[::-1]
SOON_MS, LONG_MS = 300, 30_000
Pushed = Callable[..., None]


@pytest.fixture
def there(peer: Peer) -> CacheIndex:
    peer.run(
        f"cache = datadist.allocate_blocks_cache(CacheDesc(2, {DESC.shape}, DataType.DT_INT32))"
    )
    return CacheIndex(1, 1)


@pytest.fixture
def cache(user: LlmDataDist, there: CacheIndex) -> Cache:
    """A full cache, linked with the peer: one block was pushed."""
    cache = user.allocate_blocks_cache(DESC)
    for number, array in enumerate(user.arrays(cache)):
        array[:] = np.arange(array.size).reshape(array.shape) + 1 + 10_000 * number
    user.push_blocks(cache, there, [1], [1])
    return cache


@pytest.fixture
def push(user: LlmDataDist, cache: Cache, there: CacheIndex) -> Pushed:
    def push(timeout_ms: float = LONG_MS) -> None:
        user.push_blocks(cache, there, MINE, THEIRS, timeout_ms=timeout_ms)

    return push


def at_the_peer(peer: Peer) -> NDArray[Any]:
    return np.array(peer.run("result = [array.tolist() for array in datadist.arrays(cache)]"))


def assert_arrived(
    user: LlmDataDist, cache: Cache, peer: Peer, error: LLMException | None = None
) -> int:
    """Check that confirmed descriptors have arrived; return their number."""
    missing: set[int] = set()
    if error is not None:
        missing = {number for first, last in error.unconfirmed for number in range(first, last)}
    theirs, arrays = at_the_peer(peer), user.arrays(cache)
    confirmed = 0
    for number in range(len(arrays) * len(MINE)):
        if number not in missing:
            tensor, entry = divmod(number, len(MINE))
            assert (theirs[tensor][THEIRS[entry]] == arrays[tensor][MINE[entry]]).all()
            confirmed += 1
    return confirmed


S = LLMStatusCode


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (1, S.LLM_PARAM_INVALID),
        (4, S.LLM_FAILED),
        (5, S.LLM_FEATURE_NOT_ENABLED),
        (9, S.LLM_TIMEOUT),
        (24, S.LLM_DEVICE_OUT_OF_MEMORY),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_refused_batch_fails_the_transfer(
    simulator: Controls, user: LlmDataDist, cache: Cache, peer: Peer, push: Pushed,
    batch: int, code: int, status: LLMStatusCode,
) -> None:  # fmt: skip
    simulator.add_fault(f"HcclBatchPut:{batch}={code}")
    with refused(status) as error:
        push()
    assert "HcclBatchPut" in str(error.value)
    assert str(code) in str(error.value)
    assert simulator.faults_left() == 0
    assert_arrived(user, cache, peer, error.value)
    push()
    assert_arrived(user, cache, peer)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (507053, S.LLM_DEVICE_MEM_ERROR),
        (507054, S.LLM_DEVICE_MEM_ERROR),
        (507057, S.LLM_SUSPECT_REMOTE_ERROR),
        (507013, S.LLM_FAILED),
    ],
)
def test_an_error_at_synchronization_fails_the_transfer(
    simulator: Controls, user: LlmDataDist, cache: Cache, peer: Peer, push: Pushed,
    code: int, status: LLMStatusCode,
) -> None:  # fmt: skip
    simulator.add_fault(f"HcclBatchPut:2=sync:{code}")
    with refused(status) as error:
        push()
    assert str(code) in str(error.value)
    assert_arrived(user, cache, peer, error.value)
    push()
    assert_arrived(user, cache, peer)


def test_a_transfer_that_hangs_times_out(
    simulator: Controls, user: LlmDataDist, cache: Cache, peer: Peer, push: Pushed
) -> None:
    for batch in (1, 3):
        simulator.add_fault(f"HcclBatchPut:{batch}=hang")
        while simulator.faults_left():  # on a busy machine the time may be over before the batch
            with refused(S.LLM_TIMEOUT) as error:
                push(SOON_MS)
        assert_arrived(user, cache, peer, error.value)
        push()
        assert_arrived(user, cache, peer)


def test_half_a_batch_does_not_count_as_success(
    simulator: Controls, user: LlmDataDist, cache: Cache, peer: Peer, push: Pushed
) -> None:
    simulator.add_fault("HcclBatchPut:2=partial:4")
    with refused(S.LLM_FAILED) as error:
        push()
    assert assert_arrived(user, cache, peer, error.value) < 2 * len(MINE)
    push()
    assert_arrived(user, cache, peer)


def test_a_failed_check_does_not_count_as_success(
    simulator: Controls, user: LlmDataDist, cache: Cache, peer: Peer, push: Pushed
) -> None:
    """The get after a push reads the words that show whether the memory is still registered."""
    simulator.add_fault("HcclBatchGet:1=4")
    with refused(S.LLM_FAILED) as error:
        push()
    assert assert_arrived(user, cache, peer, error.value) == 0
    push()
    assert_arrived(user, cache, peer)


def test_a_killed_peer_ends_the_transfer(
    simulator: Controls, user: LlmDataDist, cache: Cache, peer: Peer, there: CacheIndex
) -> None:
    simulator.add_fault("HcclBatchPut:1=hang")
    task = user.submit(Transfer(Rows(cache, MINE), Rows(there, THEIRS)))
    while simulator.faults_left():
        pass  # until the batch hangs
    peer.kill()
    with refused(S.LLM_LINK_FAILED):
        task.wait()
    with refused(S.LLM_LINK_FAILED):
        user.push_blocks(cache, there, MINE, THEIRS)


ON_HOST = CacheDesc(2, (NUM_BLOCKS, 16), DataType.DT_INT32, Placement.HOST)
TO_HOST = {block: block for block in range(0, NUM_BLOCKS, 2)}


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("aclrtMemcpyBatchAsync:1=507053", S.LLM_DEVICE_MEM_ERROR),
        ("aclrtMemcpyBatchAsync:1=sync:507054", S.LLM_DEVICE_MEM_ERROR),
        ("aclrtMemcpyBatchAsync:1=107000", S.LLM_PARAM_INVALID),
        ("aclrtMemcpyBatchAsync:1=partial:507899", S.LLM_FAILED),
        ("aclrtMemcpyBatchAsync:1=sync:507052", S.LLM_FAILED),
    ],
)
def test_a_failed_copy_of_the_device_is_reported(
    simulator: Controls, engine: LlmDataDist, fault: str, status: LLMStatusCode
) -> None:
    device, host = engine.allocate_blocks_cache(DESC), engine.allocate_blocks_cache(ON_HOST)
    for array in engine.arrays(device):
        array[:] = 5
    simulator.add_fault(fault)
    with refused(status) as error:
        engine.swap_blocks(device, host, TO_HOST)
    assert fault.rpartition("=")[2].rpartition(":")[2] in str(error.value)
    engine.swap_blocks(device, host, TO_HOST)
    assert all((array[::2] == 5).all() for array in engine.arrays(host))


def test_a_full_device_refuses_allocations(
    simulator: Controls, make_engine: MakeEngine, user: LlmDataDist
) -> None:
    simulator.set("hbm_bytes", 1 << 20)
    try:
        big = CacheDesc(1, (1 << 20,), DataType.DT_INT32)
        with refused(S.LLM_DEVICE_OUT_OF_MEMORY) as error:
            user.allocate_cache(big)
        assert "4194304" in str(error.value).replace(",", "")
        pool = {"MemPoolConfig": '{"memory_size": 4194304}'}
        with refused(S.LLM_DEVICE_OUT_OF_MEMORY):
            make_engine(3, **pool)
    finally:
        simulator.set("hbm_bytes", 64 << 30)
    user.allocate_cache(big)


def test_a_full_pool_refuses_allocations(make_engine: MakeEngine) -> None:
    engine = make_engine(2, MemPoolConfig='{"memory_size": 65536}')
    engine.allocate_cache(CacheDesc(1, (65536,), DataType.DT_INT8))
    small = CacheDesc(1, (1,), DataType.DT_INT8)
    with refused(S.LLM_OUT_OF_MEMORY):
        engine.allocate_cache(small)


def test_a_stream_that_cannot_be_aborted_is_still_destroyed(
    simulator: Controls, user: LlmDataDist, cache: Cache, peer: Peer, push: Pushed
) -> None:
    simulator.add_fault("HcclBatchPut:1=hang", "aclrtStreamAbort:1=507899")
    while simulator.faults_left():  # on a busy machine the time may be over before the batch
        with refused(S.LLM_TIMEOUT):
            push(SOON_MS)
    push()
    assert_arrived(user, cache, peer)
