"""Pulls and pushes of ranges of addresses, between caches of any kind."""

from __future__ import annotations

import pickle
from array import array
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from kvplan import (
    AddressRanges,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LLMException,
    Placement,
)
from kvplan.engine.ranges import _find, move_ranges_now
from kvplan.engine.runner import PlanEvent
from kvplan.execution.transfers import SMALL_NBYTES
from kvplan.recording import read
from kvplan.testing import observe_plans
from tests.datadist.conftest import MakeEngine
from tests.datadist.machine import Machine, on_host_only, where_memory_is_mapped
from tests.datadist.peer import Peer
from tests.support.lines import interrupted
from tests.support.refusals import refused

DESC = CacheDesc(3, (4, 256), DataType.DT_UINT8)
SIZE = 1024


@pytest.fixture
def there(peer: Peer) -> tuple[int, ...]:
    """The addresses of the tensors of a paged cache that the peer's engine has allocated."""
    return tuple(
        peer.run(
            """
            cache = datadist.allocate_blocks_cache(desc)
            for number, tensor in enumerate(datadist.arrays(cache)):
                tensor[:] = np.arange(1024, dtype=np.uint8).reshape(4, 256) + number
            result = cache.tensor_addrs
            """,
            desc=DESC,
        )
    )


def tensor(number: int) -> np.ndarray:
    return np.arange(SIZE).astype(np.uint8) + np.uint8(number)


@pytest.mark.over_tcp
@pytest.mark.over_hccl
def test_ranges_move_between_tensors(user: LlmDataDist, there: tuple[int, ...], peer: Peer) -> None:
    """The caches may be allocated ones, which peers map at other addresses."""
    cache = user.allocate_cache(DESC)
    here = cache.tensor_addrs
    ranges = AddressRanges(
        1,
        [here[1] + 5, here[0], here[2] + 100, here[1] + 205],
        [there[0] + 7, there[2] + 1000, there[1], there[0] + 207],
        [200, 24, 300, 30],
    )
    plan = user.plan(ranges)
    assert (plan.num_descriptors, plan.nbytes) == (3, 554)
    user.run(ranges)
    expected = np.zeros((3, SIZE), np.uint8)
    expected[1, 5:235] = tensor(0)[7:237]
    expected[0, :24] = tensor(2)[1000:]
    expected[2, 100:400] = tensor(1)[:300]
    found = np.stack(user.arrays(cache, copy=True)).reshape(3, SIZE)
    np.testing.assert_array_equal(found, expected)

    back = AddressRanges(1, [here[1] + 5], [there[2]], [230], "push")
    user.submit(back).wait(30_000)
    pushed = peer.run("result = datadist.arrays(cache, copy=True)[2].reshape(-1)")
    assert pushed[:230].tolist() == tensor(0)[7:237].tolist()
    assert pushed[230:].tolist() == tensor(2)[230:].tolist()


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_ranges_move_inside_of_one_engine(
    user: LlmDataDist, direction: Literal["pull", "push"]
) -> None:
    cache = user.allocate_cache(DESC)
    first, second, _ = cache.tensor_addrs
    arrays = [array.reshape(-1) for array in user.arrays(cache)]
    arrays[0][:], arrays[1][:] = 1, 2
    ranges = AddressRanges(2, [first + 5, first], [second, second + 100], [7, 3], direction)
    user.run(ranges)
    written, taken = (arrays[0], 2) if direction == "pull" else (arrays[1], 1)
    assert written.tolist().count(taken) == 10
    assert written[[5, 11] if direction == "pull" else [0, 6, 100]].tolist()[0] == taken
    assert "memory" in user.plan(ranges).explain()
    merged = user.plan(AddressRanges(2, [first, first + 3], [second, second + 3], [3, 4]))
    assert (merged.part.num_slices, merged.part.num_descriptors) == (2, 1)
    with refused("LLM_PARAM_INVALID", "notify must be None: a copy inside"):
        user.run(ranges, notify=b"lost")
    with refused("LLM_PARAM_INVALID", "notify_failure must be None"):
        user.submit(ranges, notify_failure=b"lost")


def test_invalid_ranges_are_refused(user: LlmDataDist, there: tuple[int, ...]) -> None:
    cache = user.allocate_cache(DESC)
    (here, *_) = cache.tensor_addrs
    with refused("LLM_NOT_YET_LINK"):
        user.run(AddressRanges(7, [here], [there[0]], [1]))
    with refused("LLM_KV_CACHE_NOT_EXIST", "remote range 0.*this engine has registered"):
        user.run(AddressRanges(2, [here], [there[0]], [1]))  # inside of this engine
    with refused("LLM_PARAM_INVALID", "overlap"):
        user.run(AddressRanges(2, [here], [here + 8], [9]))
    with refused("LLM_KV_CACHE_NOT_EXIST", "this engine has registered; the nearest is"):
        user.run(AddressRanges(1, [here - 1], [there[0]], [1]))
    with refused("LLM_KV_CACHE_NOT_EXIST", "cluster 1 has registered as writable; the nearest is"):
        user.run(AddressRanges(1, [here], [there[0] - 1], [1], direction="push"))
    with refused("LLM_PARAM_INVALID", "overlap: both are written"):
        user.run(
            AddressRanges(1, [here, here], [there[0], there[0] + 9], [10, 10], direction="push")
        )
    with pytest.raises(TypeError, match=r"transfer=.* must be Transfer, .* or AddressRanges"):
        user.run([here])  # type: ignore[arg-type]
    for columns in (([1], [1], []), ([], [], []), ([1], [1], [0]), ([0], [1], [1])):
        with refused("LLM_PARAM_INVALID"):
            AddressRanges(1, *columns)
    with pytest.raises(TypeError):
        AddressRanges(1, [1.5], [1], [1])
    with pytest.raises(ValueError, match="remote"):
        AddressRanges(1, [1], [-1], [1])


class Derived(np.ndarray):
    """A subclass, such as numpy.memmap."""


@pytest.mark.parametrize(
    "column",
    [
        pickle.loads(pickle.dumps(np.array([8, 9], np.uint64))),
        np.array([8, 9], np.ulonglong),
        np.array([8, 9], np.uint64).view(Derived),
        np.array([[8, 1]], np.uint64)[:, 0],
        array("Q", [8, 9]),
        (8, 9),
    ],
    ids=["pickled", "ulonglong", "derived", "one row", "array", "tuple"],
)
def test_columns_of_other_array_types_are_accepted(column: Any) -> None:
    made = AddressRanges(1, column, column, column)
    for found in (made.local, made.remote, made.nbytes):
        assert found.tolist() == [8, 9][: len(column)]


def test_read_only_memory_is_not_written(user: LlmDataDist, peer: Peer, machine: Machine) -> None:
    """Memory that either end has registered read-only can be read, but not written."""
    on_host_only(machine, "a device address has no flag that says read-only")
    array = np.zeros(SIZE, np.uint8)
    array.flags.writeable = False
    desc = CacheDesc(1, (1, SIZE), DataType.DT_UINT8, Placement.HOST)
    user.register_cache(desc, [array])
    there = peer.run(
        """
        array = np.ones(1024, np.uint8)
        array.flags.writeable = False
        datadist.register_cache(desc, [array])
        result = array.ctypes.data
        """,
        desc=desc,
    )
    own = user.allocate_cache(desc)
    into = AddressRanges(1, [array.ctypes.data], [there], [10])
    with refused("LLM_PARAM_INVALID", "read-only"):
        user.run(into)
    with refused("LLM_KV_CACHE_NOT_EXIST"):
        user.run(AddressRanges(1, [array.ctypes.data], [there], [10], "push"))
    user.run(AddressRanges(1, own.tensor_addrs, [there], [10]))
    assert user.arrays(own)[0].reshape(-1)[:11].tolist() == [1] * 10 + [0]


def test_repeated_small_ranges_are_copied_inline(
    user: LlmDataDist, peer: Peer, machine: Machine
) -> None:
    """Between memory of the programs, the calling thread copies, as the known pair tells it."""
    on_host_only(machine, "memory of a device has a stream")
    array = np.zeros(SIZE, np.uint8)
    desc = CacheDesc(1, (1, SIZE), DataType.DT_UINT8, Placement.HOST)
    own = user.register_cache(desc, [array])
    there, theirs = peer.run(
        """
        array = np.ones(1024, np.uint8)
        cache = datadist.register_cache(desc, [array])
        result = array.ctypes.data, cache.cache_id
        """,
        desc=desc,
    )
    here = array.ctypes.data
    ranges = AddressRanges(1, [here + 8, here], [there + 108, there + 100], [8, 8])
    for value in (1, 2):
        peer.run("array[:] = value", value=value)
        user.run(ranges)
        assert array[:17].tolist() == [value] * 16 + [0]
    counted = user.metrics()["operations"]["pull_ranges"]
    assert (counted["statuses"], counted["nbytes"]) == ({"LLM_SUCCESS": 2}, 32)
    (before,) = user.links()
    with observe_plans() as plans:
        user.run(ranges, notify=b"for a program that looks at plans")
    assert plans == [user.plan(ranges)]
    user.run(ranges, notify=b"at once")
    peer.run(
        """
        received = datadist.notifications()
        while len(received) < 2:
            assert received.wait(30_000)
        assert [one.data for one in received] == [b"for a program that looks at plans", b"at once"]
        """
    )
    (after,) = user.links()
    pulled = before.bytes_pulled, after.bytes_pulled
    assert (pulled, after.bytes_pushed, after.operations) == ((32, 64), 0, before.operations + 2)
    scattered = [here + 8 * i for i in range(100)], [there + 10 * i for i in range(100)]
    user.run(AddressRanges(1, *scattered, [8] * 100))  # more than one system call takes
    assert array[:801].tolist() == [2] * 800 + [0]
    array[17:] = 0
    shown: list[PlanEvent] = []
    remove = user.on_plan(shown.append)
    user.run(ranges)  # for a hook the plan is made, which it was not before
    remove()
    columns = [here + 8, here], [there + 108, there + 100], [8, 8]
    assert shown[0].plan == user.plan(AddressRanges(1, *columns))
    user.run(ranges)
    assert len(shown) == 1

    array[:] = 7
    fixed = np.zeros(16, np.uint8)
    small = CacheDesc(1, (1, 16), DataType.DT_UINT8, Placement.HOST)
    fixed.flags.writeable = False
    user.register_cache(small, [fixed])
    with refused("LLM_PARAM_INVALID", "read-only"):
        user.run(AddressRanges(1, [fixed.ctypes.data], [there], [8]))
    assert not fixed.any()
    peer.run("datadist.unregister_cache(number)", number=theirs)
    with refused("LLM_KV_CACHE_NOT_EXIST"):
        user.run(ranges)
    assert set(array.tolist()) == {7}
    peer.run("again = datadist.register_cache(desc, [array])", desc=desc)
    user.run(ranges)
    assert array[:17].tolist() == [2] * 16 + [7]
    user.unregister_cache(own.cache_id)
    array[:] = 7
    with refused("LLM_KV_CACHE_NOT_EXIST", "this engine has registered"):
        user.run(ranges)
    assert set(array.tolist()) == {7}


def test_small_ranges_with_a_lost_notification_count_once(
    user: LlmDataDist, there: tuple[int, ...], peer: Peer, machine: Machine
) -> None:
    where_memory_is_mapped(machine)
    cache = user.allocate_blocks_cache(DESC)
    ranges = AddressRanges(1, [cache.tensor_addrs[0]], [there[1]], [8])
    for _ in range(2):
        user.run(ranges)
    peer.stop()
    with refused("LLM_TIMEOUT", "pull_ranges: every byte has arrived"):
        user.run(ranges, notify=b"late", timeout_ms=20)
    peer.resume()
    counted = user.metrics()["operations"]["pull_ranges"]
    assert counted["statuses"] == {"LLM_SUCCESS": 2, "LLM_TIMEOUT": 1}


@pytest.mark.skipif(SMALL_NBYTES == 0, reason="without a GIL nothing moves at once")
def test_memory_that_is_withdrawn_in_the_middle_is_not_written(
    user: LlmDataDist, peer: Peer, machine: Machine
) -> None:
    """Withdraw it before each line of a small pull, which may be before or after the copy."""
    where_memory_is_mapped(machine)
    array = np.zeros(SIZE, np.uint8)
    desc = CacheDesc(1, (1, SIZE), DataType.DT_UINT8, Placement.HOST)
    there = peer.run(
        """
        array = np.full(1024, 7, np.uint8)
        datadist.register_cache(desc, [array])
        result = array.ctypes.data
        """,
        desc=desc,
    )
    steps = [move_ranges_now.__code__, _find.__code__]
    found: list[int] = []
    for line in range(1, 100):
        array[:] = 0
        cache = user.register_cache(desc, [array])
        ranges = AddressRanges(1, [array.ctypes.data], [there], [SIZE])

        def end(cache_id: int = cache.cache_id) -> None:
            user.unregister_cache(cache_id)
            found.append(int(array.max()))

        with suppress(LLMException):
            if not interrupted(line, partial(user.run, ranges), end, steps):
                break
        assert array.max() == found[-1], line
    assert {*found} == {0, 7}


def test_ranges_are_recorded(user: LlmDataDist, there: tuple[int, ...], tmp_path: Path) -> None:
    caches = [user.allocate_cache(DESC) for _ in range(3)]
    asked = [AddressRanges(1, cache.tensor_addrs, there, [100] * 3) for cache in caches]
    with user.record(tmp_path / "it.kvrec"):
        for ranges in asked:
            user.run(ranges, tag="a request")
    found = read(tmp_path / "it.kvrec").transfers
    for transfer, ranges, cache in zip(found, asked, caches, strict=True):
        assert (transfer.operation, transfer.tag) == ("pull_ranges", "a request")
        assert (transfer.nbytes, transfer.cache_id) == (300, cache.cache_id)
        assert transfer.plan == user.plan(ranges)


def test_ranges_are_verified_by_an_option(
    make_engine: MakeEngine, peer: Peer, there: tuple[int, ...], machine: Machine
) -> None:
    on_host_only(machine, "what a device has moved is not compared")
    user = make_engine(2, **{"kvplan.verify": "all"})
    user.link_clusters([ClusterInfo(1, peer.address)], timeout_ms=5000).raise_for_status()
    cache = user.allocate_cache(DESC)
    user.run(AddressRanges(1, cache.tensor_addrs, there, [100] * 3))
    assert user.arrays(cache)[2].reshape(-1)[:100].tolist() == tensor(2)[:100].tolist()


@pytest.mark.parametrize(
    ("local", "remote", "nbytes", "side"),
    [(0, 1, 1, "local"), (5, 1, 0, "local"), (2**64 - 1, 1, 2, "local"), (1, 0, 1, "remote"),
     (1, 2**64 - 1, 2, "remote")],
)  # fmt: skip
def test_an_impossible_range_is_named(local: int, remote: int, nbytes: int, side: str) -> None:
    with refused("LLM_PARAM_INVALID", f"{side} range 1 has address 0x"):
        AddressRanges(1, [1, local], [1, remote], [1, nbytes])


def test_ranges_into_read_only_memory_of_a_peer_say_so(
    user: LlmDataDist, peer: Peer, machine: Machine
) -> None:
    on_host_only(machine, "a device address has no flag that says read-only")
    there = peer.run(
        """
        array = np.ones(1024, np.uint8)
        array.flags.writeable = False
        datadist.register_cache(desc, [array])
        result = array.ctypes.data
        """,
        desc=CacheDesc(1, (1, SIZE), DataType.DT_UINT8, Placement.HOST),
    )
    own = user.allocate_cache(DESC)
    why = "remote range 0.*is in no memory that cluster 1 has registered as writable: it has"
    with refused("LLM_KV_CACHE_NOT_EXIST", why):
        user.run(AddressRanges(1, own.tensor_addrs[:1], [there], [10], "push"))


def test_small_ranges_move_inline_again_after_a_recording(
    user: LlmDataDist, peer: Peer, machine: Machine, tmp_path: Path
) -> None:
    on_host_only(machine, "memory of a device has a stream")
    there = peer.run(
        """
        array = np.full(1024, 7, np.uint8)
        datadist.register_cache(desc, [array])
        result = array.ctypes.data
        """,
        desc=CacheDesc(1, (1, SIZE), DataType.DT_UINT8, Placement.HOST),
    )
    ranges = AddressRanges(1, user.allocate_cache(DESC).tensor_addrs[:1], [there], [SIZE])
    engine = user._running()
    user.run(ranges)
    assert move_ranges_now(engine, ranges, 0.0, {})
    with user.record(tmp_path / "it.kvrec"):
        assert not move_ranges_now(engine, ranges, 0.0, {})
    assert move_ranges_now(engine, ranges, 0.0, {})


def test_they_have_no_layers(user: LlmDataDist, there: tuple[int, ...]) -> None:
    ranges = AddressRanges(1, user.allocate_cache(DESC).tensor_addrs, there, [1] * 3)
    with pytest.raises(TypeError, match="AddressRanges have no layers"):
        user.plan(ranges, by_layer=True)
    with pytest.raises(TypeError, match="AddressRanges have no layers"):
        user.layered(ranges)  # type: ignore[arg-type]
