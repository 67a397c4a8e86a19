"""Batch copies: checks, the copies issued before a refused item, and order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from tests.ascend_sim.acl_library import (
    DEVICE,
    HOST,
    SIZE_MAX,
    Acl,
    Location,
    Memories,
    in_process,
    memories,
)

INVALID, PARAM, UNSUPPORTED, TIMEOUT = 100000, 107000, 207000, 507046
UNTOUCHED = 77
ITEM, ITEMS = 64, 8
N = ITEM * ITEMS

ON_HOST, ON_DEVICE, ELSEWHERE = Location(0, HOST), Location(0, DEVICE), Location(1, DEVICE)
IN, OUT = (0, ON_DEVICE, ON_HOST), (0, ON_HOST, ON_DEVICE)


@pytest.fixture
def memory_set(acl: Acl) -> Iterator[Memories]:
    with memories(acl, N) as memory_set:
        acl.ok("aclrtMemset", memory_set.device, N, 0, N)
        for item in range(ITEMS):
            ctypes.memset(memory_set.pinned + item * ITEM, item + 1, ITEM)
            ctypes.memset(memory_set.pageable + item * ITEM, item + 1, ITEM)
        yield memory_set


def pairs(target: int, source: int) -> list[tuple[int, int, int]]:
    return [(target + i * ITEM, source + i * ITEM, ITEM) for i in range(ITEMS)]


def items(acl: Acl, memory_set: Memories) -> list[int]:
    """Return the first byte of each item on the device."""
    return list(acl.view(memory_set.device, N))[::ITEM]


@pytest.fixture(params=["sync", "async"])
def stream_of(request: pytest.FixtureRequest, memory_set: Memories) -> int | None:
    return memory_set.stream if request.param == "async" else None


ALL = list(range(1, ITEMS + 1))


@pytest.mark.parametrize("memory", ["pinned", "pageable"])
def test_batches_copy_in_both_directions(
    acl: Acl, memory_set: Memories, stream_of: int | None, memory: str
) -> None:
    host: int = getattr(memory_set, memory)
    assert acl.batch(pairs(memory_set.device, host), [IN], stream=stream_of) == (0, SIZE_MAX)
    acl.ok("aclrtSynchronizeStream", memory_set.stream)
    assert items(acl, memory_set) == ALL
    ctypes.memset(host, 0, N)
    assert acl.batch(pairs(host, memory_set.device), [OUT], stream=stream_of) == (0, SIZE_MAX)
    acl.ok("aclrtSynchronizeStream", memory_set.stream)
    assert list(ctypes.string_at(host, N))[::ITEM] == ALL


def test_both_directions_in_one_batch(
    acl: Acl, memory_set: Memories, stream_of: int | None
) -> None:
    both = pairs(memory_set.device, memory_set.pinned)
    both[4:] = pairs(memory_set.pageable, memory_set.device)[4:]
    attributes = [IN, (4, ON_HOST, ON_DEVICE)]
    assert acl.batch(both, attributes, stream=stream_of) == (0, SIZE_MAX)
    acl.ok("aclrtSynchronizeStream", memory_set.stream)
    assert items(acl, memory_set) == [1, 2, 3, 4, 0, 0, 0, 0]
    assert list(ctypes.string_at(memory_set.pageable, N))[::ITEM] == [1, 2, 3, 4, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"attributes": [(0, ON_HOST, ON_HOST)]}, (PARAM, 0)),
        ({"attributes": [OUT]}, (PARAM, 0)),
        ({"attributes": [(0, ELSEWHERE, ON_HOST)]}, (PARAM, 0)),
        ({"attributes": [(0, ON_DEVICE, Location(9, HOST))]}, (0, SIZE_MAX)),
        ({"attributes": [(0, ON_DEVICE, Location(0, 2))]}, (PARAM, 0)),
        ({"attributes": [IN, (3, *OUT[1:])]}, (PARAM, 3)),
        ({"attributes": [(1, *IN[1:])]}, (PARAM, SIZE_MAX)),
        ({"attributes": [IN, IN]}, (PARAM, SIZE_MAX)),
        ({"attributes": [IN, (ITEMS, *IN[1:])]}, (PARAM, SIZE_MAX)),
        ({"attributes": [IN, (5, *IN[1:]), (4, *IN[1:])]}, (PARAM, SIZE_MAX)),
        ({"attributes": [(i, *IN[1:]) for i in range(ITEMS + 1)]}, (PARAM, SIZE_MAX)),
        ({"attributes": []}, (PARAM, SIZE_MAX)),
        ({"capacities": [ITEM] * 7 + [ITEM - 1]}, (INVALID, UNTOUCHED)),
        ({"reserved": 1}, (INVALID, UNTOUCHED)),
    ],
)
def test_invalid_arguments_are_refused(
    acl: Acl,
    memory_set: Memories,
    stream_of: int | None,
    change: dict[str, object],
    expected: tuple[int, int],
) -> None:
    arguments = {"attributes": [IN], "stream": stream_of} | change
    assert acl.batch(pairs(memory_set.device, memory_set.pinned), **arguments) == expected  # type: ignore[arg-type]
    acl.ok("aclrtSynchronizeStream", memory_set.stream)


def test_an_empty_batch_is_refused(acl: Acl, stream_of: int | None) -> None:
    assert acl.batch([], [IN], stream=stream_of) == (INVALID, UNTOUCHED)


@pytest.mark.parametrize("kind", ["device to device", "host to host", "freed", "too long", "zero"])
def test_invalid_items_are_refused(
    acl: Acl, memory_set: Memories, stream_of: int | None, kind: str
) -> None:
    """The synchronous call copies nothing; the other one issues items before the refused one."""
    freed = acl.made("aclrtMalloc", ITEM, 0)
    acl.ok("aclrtFree", freed)
    target, source, nbytes = pairs(memory_set.device, memory_set.pinned)[5]
    culprit = {
        "device to device": (target, memory_set.device, nbytes),
        "host to host": (memory_set.pageable, source, nbytes),
        "freed": (freed, source, nbytes),
        "too long": (target, source, N),
        "zero": (target, source, 0),
    }[kind]
    batch = pairs(memory_set.device, memory_set.pinned)
    batch[5] = culprit
    place = {"device to device": (5, ON_DEVICE, ON_DEVICE), "host to host": (5, ON_HOST, ON_HOST)}
    attributes = [IN, place[kind], (6, *IN[1:])] if kind in place else [IN]
    assert acl.batch(batch, attributes, stream=stream_of) == (PARAM, 5)
    acl.ok("aclrtSynchronizeStream", memory_set.stream)
    assert items(acl, memory_set) == ([0] * 8 if stream_of is None else [*ALL[:5], 0, 0, 0])


def test_the_number_of_items_is_limited(acl: Acl, memory_set: Memories) -> None:
    many = [(memory_set.device, memory_set.pinned, 1)] * 4097
    assert acl.batch(many[:4096], [IN]) == (0, SIZE_MAX)
    assert acl.batch(many, [IN]) == (PARAM, SIZE_MAX)
    assert acl.batch(many, [IN], stream=memory_set.stream) == (0, SIZE_MAX)
    acl.ok("aclrtSynchronizeStream", memory_set.stream)


def test_pageable_items_wait_for_the_stream(acl: Acl, memory_set: Memories) -> None:
    acl.fault("aclrtMemsetAsync:1=sync:507899")
    acl.ok("aclrtMemsetAsync", memory_set.device, N, 9, N, memory_set.stream)
    batch = pairs(memory_set.device, memory_set.pageable)
    assert acl.batch(batch, [IN], stream=memory_set.stream) == (507899, SIZE_MAX)
    assert acl.batch(batch, [IN], stream=memory_set.stream) == (0, SIZE_MAX)
    assert items(acl, memory_set) == ALL  # before any synchronization


def test_pinned_items_do_not_wait(acl: Acl, memory_set: Memories) -> None:
    acl.fault("aclrtMemsetAsync:1=hang")
    acl.ok("aclrtMemsetAsync", memory_set.device, N, 9, N, memory_set.stream)
    assert acl.batch(
        pairs(memory_set.device, memory_set.pinned), [IN], stream=memory_set.stream
    ) == (0, SIZE_MAX)
    assert acl.aclrtSynchronizeStreamWithTimeout(memory_set.stream, 1) == TIMEOUT
    acl.ok("aclrtStreamAbort", memory_set.stream)
    assert items(acl, memory_set) == [0] * ITEMS


def test_order_inside_a_batch_is_shuffled_and_repeatable() -> None:
    program = """
        acl.aclInit(None)
        acl.ok("aclrtSetDevice", 0)
        device, host = acl.made("aclrtMalloc", 1, 0), acl.made("aclrtMallocHost", 100)
        ctypes.memmove(host, bytes(range(100)), 100)
        into = (0, Location(0, DEVICE), Location(0, HOST))
        last = []
        for _ in range(20):  # all to one byte: the last one stays
            assert acl.batch([(device, host + i, 1) for i in range(100)], [into])[0] == 0
            last.append(acl.view(device, 1)[0])
        answer(last)
    """
    orders = [in_process(program, seed=seed) for seed in (3, 3, 4)]
    assert len(set(orders[0])) > 5
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_a_product_without_batch_copies_refuses_them() -> None:
    answer = in_process(
        """
        acl.aclInit(None)
        acl.ok("aclrtSetDevice", 0)
        device, host = acl.made("aclrtMalloc", 8, 0), acl.made("aclrtMallocHost", 8)
        into = (0, Location(0, DEVICE), Location(0, HOST))
        stream = acl.made("aclrtCreateStream")
        answer([acl.batch([(device, host, 8)], [into], stream=each)[0] for each in (None, stream)])
        """,
        "batch-unsupported",
    )
    assert answer == [UNSUPPORTED, UNSUPPORTED]
