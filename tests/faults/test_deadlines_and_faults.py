"""Transfers that time out, or fail at one descriptor: confirmed descriptors have arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvnative._backend import (
    KVN_DENIED,
    KVN_DEVICE_MEMORY,
    KVN_FAILED,
    KVN_NO_DEVICE_MEMORY,
    KVN_NO_MEMORY,
    KVN_PEER_GONE,
    KVN_SUSPECT_REMOTE,
    KVN_UNMAPPED,
    Backend,
)
from kvplan import (
    AddressRanges,
    CacheDesc,
    CacheIndex,
    CacheKey,
    DataType,
    LinkState,
    LlmDataDist,
    LLMStatusCode,
    Transfers,
)
from tests.faults.conftest import MakeEngine
from tests.faults.contents import make_cache, pattern
from tests.faults.outcomes import COUNT, assert_confirmed, unconfirmed
from tests.faults.peer import Peer
from tests.faults.states import link_of
from tests.faults.transfers import link, move
from tests.support.refusals import refused
from tests.support.wrappers import delay, fail_at, limit_bandwidth, limit_batch

FOR_EVER_MS = 600_000
SLOT_NBYTES = 256 * COUNT
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
Wrap = Callable[[Backend], Backend]
MakeFaulty = Callable[[Wrap], LlmDataDist]
directions = pytest.mark.parametrize("direction", ["pull", "push"])
memories = pytest.mark.parametrize("memory", ["allocated", "registered"])


@pytest.fixture
def make_faulty(make_engine: MakeEngine) -> Iterator[MakeFaulty]:
    """A function that makes an engine of cluster 2 whose transfers have faults."""
    with ExitStack() as held:

        def make(wrap: Wrap) -> LlmDataDist:
            transfers = held.enter_context(Transfers(1, wrap))
            held.callback(transfers.close, cancel=True)
            return make_engine(2, transfers=transfers)

        yield make


def one_at_a_time(rate: float) -> Wrap:
    return lambda backend: limit_batch(limit_bandwidth(backend, rate), 1)


@memories
@directions
def test_a_deadline_passes_amid_the_descriptors(
    make_faulty: MakeFaulty, peer: Peer, direction: str, memory: str
) -> None:
    """The confirmed descriptors have arrived, and no byte moves after the call."""
    user = make_faulty(one_at_a_time(SLOT_NBYTES / 0.16))  # 20 ms for each descriptor
    remote = peer.make_cache(memory, seed=1 if direction == "pull" else None)
    cache, arrays = make_cache(user, memory, None if direction == "pull" else 2)
    link(user, peer)
    with refused(TIMEOUT) as error:
        move(user, direction, remote, cache, timeout_ms=70)
    missing = unconfirmed(error.value)
    assert missing
    first = min(missing)
    assert missing == set(range(first, COUNT))  # the descriptors move one after the other
    if direction == "pull":
        assert_confirmed(error.value, arrays, pattern(1))
        assert not any(arrays[index].any() for index in range(first + 1, COUNT))
    else:
        assert peer.run("result = [bool(it.any()) for it in arrays]")[first + 1 :] == (
            [False] * (COUNT - first - 1)
        )
        assert peer.run(
            "result = all((arrays[i][0] == pattern(2)[i][0]).all() for i in range(first))",
            first=first,
        )
    mine = link_of(user, 1)
    assert mine is not None
    assert (mine.state, mine.in_flight, mine.last_error) == (LinkState.LINKED, 0, str(error.value))
    assert (mine.bytes_pulled, mine.bytes_pushed) == (0, 0)
    assert peer.state(2) == "LINKED"
    move(user, direction, remote, cache)
    if direction == "pull":
        assert_confirmed(None, arrays, pattern(1))


@memories
@directions
def test_a_transfer_that_moves_nothing_in_time(
    make_faulty: MakeFaulty, peer: Peer, direction: str, memory: str
) -> None:
    user, remote = make_faulty(lambda value: delay(value, FOR_EVER_MS)), peer.make_cache(memory)
    cache, _ = make_cache(user, memory, 2)
    link(user, peer)
    for _ in range(3):
        with refused(TIMEOUT) as error:
            move(user, direction, remote, cache, timeout_ms=5)
        assert unconfirmed(error.value) == set(range(COUNT))
    assert user.metrics()["in_flight"] == 0
    user.unlink_clusters([1], timeout_ms=10_000).raise_for_status()
    assert peer.state(2) is None


def test_a_call_without_a_deadline_has_that_of_the_option(
    make_engine: MakeEngine, peer: Peer
) -> None:
    with Transfers(1, lambda value: delay(value, FOR_EVER_MS)) as transfers:
        user = make_engine(2, transfers=transfers, sync_kv_cache_wait_time=50)
        remote, (cache, _) = peer.make_cache("allocated"), make_cache(user, "allocated", 2)
        link(user, peer)
        with refused(TIMEOUT) as error:
            user.pull_cache(CacheIndex(1, remote), cache)
        assert unconfirmed(error.value) == set(range(COUNT))
        transfers.close(cancel=True)


@memories
@directions
def test_each_descriptor_fails_once(
    make_faulty: MakeFaulty, peer: Peer, direction: str, memory: str
) -> None:
    for index in range(COUNT):
        user = make_faulty(lambda value, index=index: fail_at(limit_batch(value, 3), index))  # type: ignore[misc]
        remote = peer.make_cache(memory, seed=1 if direction == "pull" else None)
        cache, arrays = make_cache(user, memory, None if direction == "pull" else 2)
        link(user, peer)
        with refused(LLMStatusCode.LLM_FAILED) as error:
            move(user, direction, remote, cache)
        assert error.value.unconfirmed == ((index, COUNT),)
        assert error.value.origin is not None
        assert error.value.origin.src_tensor == index
        if direction == "pull":
            assert_confirmed(error.value, arrays, pattern(1))
        moved = arrays if direction == "pull" else None
        found = (
            [bool(array.any()) for array in moved]
            if moved is not None
            else peer.run("result = [bool(it.any()) for it in arrays]")
        )
        assert found == [True] * index + [False] * (COUNT - index)
        mine = link_of(user, 1)
        assert mine is not None
        assert (mine.state, mine.last_error) == (LinkState.LINKED, str(error.value))
        assert peer.state(2) == "LINKED"
        user.finalize()
        peer.wait_for_state(2, "CLOSED")
        peer.run("datadist.unlink_clusters([2]).raise_for_status()")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (KVN_PEER_GONE, LLMStatusCode.LLM_LINK_FAILED),
        (KVN_DENIED, LLMStatusCode.LLM_LINK_FAILED),
        (KVN_UNMAPPED, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),
        (KVN_NO_MEMORY, LLMStatusCode.LLM_OUT_OF_MEMORY),
        (KVN_FAILED, LLMStatusCode.LLM_FAILED),
        (KVN_DEVICE_MEMORY, LLMStatusCode.LLM_DEVICE_MEM_ERROR),
        (KVN_SUSPECT_REMOTE, LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR),
        (KVN_NO_DEVICE_MEMORY, LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY),
    ],
)
def test_a_fault_is_reported_by_its_own_status_and_consumes_no_key(
    make_faulty: MakeFaulty, make_engine: MakeEngine, peer: Peer, status: int, code: LLMStatusCode
) -> None:
    key = CacheKey(1, 7)
    peer.run(
        """
        cache = datadist.allocate_cache(DESC, [CacheKey(1, 7)])
        for array, tensor in zip(datadist.arrays(cache), pattern(1)):
            array[:] = tensor
        """
    )
    user, other = make_faulty(lambda value: fail_at(value, 5, status=status)), make_engine(3)
    cache, arrays = make_cache(user, "allocated", None)
    theirs, their_arrays = make_cache(other, "allocated", None)
    link(user, peer)
    link(other, peer)
    for _ in range(2):
        with refused(code) as error:
            user.pull_cache(key, cache)
        assert unconfirmed(error.value) == {5, 6, 7}
        assert_confirmed(error.value, arrays, pattern(1))
    other.pull_cache(key, theirs)
    assert_confirmed(None, their_arrays, pattern(1))
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        user.pull_cache(key, cache)


def test_late_ranges_name_the_first_that_may_be_missing(
    make_engine: MakeEngine, peer: Peer
) -> None:
    """The result is the same for each verb."""
    with Transfers(1, lambda value: delay(value, FOR_EVER_MS)) as transfers:
        user = make_engine(2, transfers=transfers)
        desc = CacheDesc(1, (1, 4096), DataType.DT_INT8)
        there = peer.run("result = datadist.allocate_cache(desc).tensor_addrs[0]", desc=desc)
        (here,) = user.allocate_cache(desc).tensor_addrs
        link(user, peer)
        ranges = AddressRanges(1, [here + 64], [there + 32], [16])
        for begin in (
            lambda: user.run(ranges, timeout_ms=5),
            lambda: user.submit(ranges).wait(timeout_ms=5),
        ):
            with refused(TIMEOUT, rf"the first that is not confirmed: local \[{here + 64:#x}, "):
                begin()
        transfers.close(cancel=True)
