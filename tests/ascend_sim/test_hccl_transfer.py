"""The simulated HCCL: put and get between two processes, and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ascend_sim.hccl_end import DEVICE, PINNED, REGISTERED, config
from tests.ascend_sim.hccl_ends import NBYTES, Ends, table, two_ends

PARA, PTR, INTERNAL, NOT_FOUND, RUNTIME = 1, 2, 4, 6, 15
STALE = 507899


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with two_ends(tmp_path) as made:
        yield made


def put(ends: Ends, pieces: list[tuple[int, int, int]], rank: int = 0) -> int:
    """Put pieces of (local offset, remote offset, nbytes)."""
    here, there = ends.memory[rank], ends.memory[1 - rank]
    absolute = [(here + local, there + remote, n) for local, remote, n in pieces]
    stream = ends.streams[rank]
    return ends[rank].transfer("put", ends.comms[rank], 1 - rank, absolute, stream)


def synchronize(ends: Ends, rank: int = 0) -> int:
    return ends[rank].synchronize(ends.streams[rank])


@pytest.mark.parametrize("kind", [DEVICE, PINNED, REGISTERED])
def test_bytes_are_put_and_got(ends: Ends, kind: int) -> None:
    nbytes = (1 << 21) + 4096  # more than one piece of a copy
    ends.connect(nbytes, kind)
    content = bytes(range(256)) * (nbytes // 256)
    ends[0].write(ends.memory[0], content, kind)
    assert put(ends, [(0, 0, nbytes)]) == 0
    assert synchronize(ends) == 0
    assert ends[1].read(ends.memory[1], nbytes, kind) == content
    ends[1].write(ends.memory[1], content[::-1], kind)
    pieces = [(ends.memory[0], ends.memory[1], nbytes)]
    assert ends[0].transfer("get", ends.comms[0], 1, pieces, ends.streams[0]) == 0
    assert synchronize(ends) == 0
    assert ends[0].read(ends.memory[0], nbytes, kind) == content[::-1]


def test_both_directions_at_once(ends: Ends) -> None:
    ends.connect()
    for rank in (0, 1):
        ends[rank].write(ends.memory[rank], b"rank%d" % rank)
        assert put(ends, [(0, 100, 5)], rank) == 0
    assert [synchronize(ends, rank) for rank in (0, 1)] == [0, 0]
    assert ends[0].read(ends.memory[0] + 100, 5) == b"rank1"
    assert ends[1].read(ends.memory[1] + 100, 5) == b"rank0"


def test_transfers_run_in_the_order_of_the_stream(ends: Ends) -> None:
    ends.connect()
    ends[0].write(ends.memory[0], b"abcdefgh")
    for i in range(8):
        assert put(ends, [(i, 0, 1)]) == 0
    assert synchronize(ends) == 0
    assert ends[1].read(ends.memory[1], 1) == b"h"


def test_data_types_have_sizes(ends: Ends) -> None:
    ends.connect()
    sizes = {0: 1, 1: 2, 2: 4, 3: 2, 4: 4, 5: 8, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 2, 12: 16}
    for data_type, size in sizes.items():
        pieces = [(ends.memory[0], ends.memory[1], NBYTES // size)]
        arguments = (ends.comms[0], 1, pieces, ends.streams[0], data_type)
        assert ends[0].transfer("put", *arguments) == 0
        assert ends.log("HcclBatchPut")[-1]["bytes"] == NBYTES
    for unknown in (13, 18, 255, -1):
        arguments = (
            ends.comms[0],
            1,
            [(ends.memory[0], ends.memory[1], 1)],
            ends.streams[0],
            unknown,
        )
        assert ends[0].transfer("put", *arguments) == PARA


def test_the_size_of_a_batch_is_limited(ends: Ends) -> None:
    ends.connect()
    assert put(ends, [(i, i, 1) for i in range(256)]) == 0
    assert put(ends, [(i, i, 1) for i in range(257)]) == PARA
    assert put(ends, []) == 0
    assert synchronize(ends) == 0
    lines = ends.log("HcclBatchPut")
    sizes = [(line["descriptors"], line["bytes"]) for line in lines]
    assert sizes == [(256, 256), (257, 0), (0, 0)]
    assert {(line["name"], line["remote_rank"]) for line in lines} == {(ends.name, 1)}


def test_invalid_arguments_are_refused(ends: Ends) -> None:
    ends.connect()
    pieces = [(ends.memory[0], ends.memory[1], 1)]
    comm, stream = ends.comms[0], ends.streams[0]

    def transfer(comm: int, rank: int, stream: int, pieces: list[tuple[int, int, int]]) -> int:
        code: int = ends[0].transfer("get", comm, rank, pieces, stream)
        return code

    assert transfer(0, 1, stream, pieces) == PTR
    assert transfer(5, 1, stream, pieces) == PARA
    assert transfer(comm, 0, stream, pieces) == PARA  # its own rank
    assert transfer(comm, 2, stream, pieces) == PARA
    assert transfer(comm, 1, 0, pieces) == PTR
    assert transfer(comm, 1, 123456, pieces) == RUNTIME
    assert transfer(comm, 1, stream, [(ends.memory[0], ends.memory[1], 0)]) == PARA
    assert transfer(comm, 1, stream, [(0, ends.memory[1], 1)]) == PARA
    ends[0].use(1)
    assert transfer(comm, 1, ends[0].stream(), pieces) == PARA  # a stream of another device


def test_a_transfer_needs_a_prepared_communicator(ends: Ends) -> None:
    ends.init()
    ends.bind()
    ends.streams[0] = ends[0].stream()
    assert put(ends, [(0, 0, 1)]) == NOT_FOUND


OUTSIDE = {
    "before": [(0, -1, 2)],
    "after": [(0, NBYTES - 1, 2)],
    "far": [(0, 1 << 40, 1)],
    "local before": [(-1, 0, 2)],
    "local after": [(NBYTES - 1, 0, 2)],
}


@pytest.mark.parametrize("pieces", OUTSIDE.values(), ids=OUTSIDE)
def test_ranges_outside_of_regions_are_refused(
    ends: Ends, pieces: list[tuple[int, int, int]]
) -> None:
    ends.connect()
    assert put(ends, pieces) == INTERNAL
    ends[0].setting("aicpu", "1")
    assert put(ends, pieces) == PARA


def test_a_range_across_two_regions_is_refused(ends: Ends) -> None:
    """A range must not cross two regions, even adjacent ones."""
    ends.init()
    for rank, end in enumerate(ends.both):
        ends.memory[rank] = end.allocate(NBYTES)
        for half in (0, NBYTES // 2):
            _, handle = end.register(ends.memory[rank] + half, NBYTES // 2)
            assert end.bind(ends.comms[rank], handle) == 0
    assert ends.prepare() == [0, 0]
    ends.streams[0] = ends[0].stream()
    assert put(ends, [(0, 0, NBYTES // 2), (NBYTES // 2, NBYTES // 2, NBYTES // 2)]) == 0
    assert put(ends, [(0, NBYTES // 2 - 1, 2)]) == INTERNAL
    assert put(ends, [(NBYTES // 2 - 1, 0, 2)]) == INTERNAL


def test_pieces_before_an_invalid_one_are_issued(ends: Ends) -> None:
    ends.connect()
    ends[0].write(ends.memory[0], b"abcd")
    assert put(ends, [(0, 0, 1), (1, 1, 1), (2, NBYTES, 1), (3, 3, 1)]) == INTERNAL
    assert synchronize(ends) == 0
    assert ends[1].read(ends.memory[1], 4) == b"ab\xa5\xa5"


def test_memory_that_is_not_bound_is_refused(ends: Ends) -> None:
    ends.connect()
    address = ends[0].allocate(NBYTES)
    assert ends[0].register(address, NBYTES)[0] == 0
    offset = address - ends.memory[0]
    assert put(ends, [(offset, 0, 1)]) == INTERNAL
    assert ends[1].register(ends[1].allocate(NBYTES), NBYTES)[0] == 0


def test_memory_deregistered_at_the_other_end_is_refused(ends: Ends) -> None:
    ends.connect()
    assert ends[1].unbind(ends.comms[1], ends.handles[1]) == 0
    assert put(ends, [(0, 0, 1)]) == 0
    assert synchronize(ends) == 0  # memory stays registered after it is unbound
    assert ends[1].deregister(ends.handles[1]) == 0
    assert put(ends, [(0, 0, 1)]) == 0
    assert synchronize(ends) == STALE
    assert ends[0].async_error(ends.comms[0]) == (0, 0)


def test_memory_deregistered_without_notice_may_still_be_used(ends: Ends) -> None:
    """The transfer succeeds, like one over a mapping between devices of one server."""
    ends.connect()
    ends[0].setting("stale_code", "0")
    ends[1].unbind(ends.comms[1], ends.handles[1])
    ends[1].deregister(ends.handles[1])
    assert put(ends, [(0, 0, 1)]) == 0
    assert synchronize(ends) == 0


def test_a_second_registration_is_another_one(ends: Ends) -> None:
    ends.connect()
    ends[1].unbind(ends.comms[1], ends.handles[1])
    ends[1].deregister(ends.handles[1])
    assert ends[1].register(ends.memory[1], NBYTES)[0] == 0
    assert put(ends, [(0, 0, 1)]) == 0
    assert synchronize(ends) == STALE


def test_local_memory_that_is_freed_or_deregistered_is_refused(ends: Ends) -> None:
    ends.connect()
    ends[0].unbind(ends.comms[0], ends.handles[0])
    ends[0].deregister(ends.handles[0])
    assert put(ends, [(0, 0, 1)]) == INTERNAL
    ends[1].free(ends.memory[1])
    assert put(ends, [(0, 0, 1)], rank=1) == INTERNAL


def test_second_communicator_sees_later_memory(ends: Ends) -> None:
    """Memory that is registered later reaches the other end only by a new communicator."""
    ends.connect()
    later, comms = ends[1].allocate(NBYTES), [0, 0]
    _, handle = ends[1].register(later, NBYTES)
    for rank, end in enumerate(ends.both):
        _, comms[rank] = end.init(table(), rank, config("later"))
        assert end.bind(comms[rank], ends.handles[rank]) == 0
    assert ends[1].bind(comms[1], handle) == 0
    assert ends.call_both("prepare", *((comm,) for comm in comms)) == [0, 0]
    pieces = [(ends.memory[0], later, 4)]
    assert ends[0].transfer("put", ends.comms[0], 1, pieces, ends.streams[0]) == INTERNAL
    assert ends[0].transfer("put", comms[0], 1, pieces, ends.streams[0]) == 0
    assert synchronize(ends) == 0
