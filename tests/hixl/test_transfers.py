"""Reading and writing ranges of another process's memory: arrivals, and refusals."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import Plan, hixl
from kvplan.hixl import TransferOpDesc
from tests.hixl.conftest import MakeEngine
from tests.hixl.peer import Peer
from tests.hixl.places import MIB, Memory, Place, free_name, pattern, registered

LONG_MS = 30_000
BLOCK = 16 << 10
pytestmark = [pytest.mark.over_tcp, pytest.mark.over_hccl]


def descs(
    memory: Memory, peer: Peer, ranges: Sequence[tuple[int, int, int]]
) -> list[TransferOpDesc]:
    return [TransferOpDesc(memory.address + a, peer.address + b, n) for a, b, n in ranges]


def test_blocks_are_read_and_written_in_any_order(
    connected: hixl.Hixl, memory: Memory, peer: Peer
) -> None:
    count = MIB // BLOCK
    here, there = (np.random.default_rng(number).permutation(count) for number in (1, 2))
    ranges = [(int(a) * BLOCK, int(b) * BLOCK, BLOCK) for a, b in zip(here, there, strict=True)]
    peer.fill(1)
    moved = descs(memory, peer, ranges)
    assert connected.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS
    expected = np.empty((count, BLOCK), np.uint8)
    expected[here] = pattern(seed=1).reshape(count, BLOCK)[there]
    np.testing.assert_array_equal(memory.array.reshape(count, BLOCK), expected)

    memory.array[:] = pattern(seed=2)
    assert connected.transfer_sync(peer.name, hixl.WRITE, moved, LONG_MS) == hixl.SUCCESS
    expected[there] = pattern(seed=2).reshape(count, BLOCK)[here]
    assert peer.bytes() == expected.tobytes()


def test_each_request_ends_once_and_keeps_its_callers_object(
    connected: hixl.Hixl, memory: Memory, peer: Peer
) -> None:
    peer.fill(3)
    requests = {}
    for i in range(8):
        args = hixl.TransferArgs()
        args.user_data = 100 + i
        moved = descs(memory, peer, [(i * BLOCK, i * BLOCK, BLOCK)])
        status, request = connected.transfer_async(peer.name, hixl.READ, moved, args)
        assert status == hixl.SUCCESS
        requests[request] = args.user_data
    assert len(requests) == 8
    first = next(iter(requests))
    while (told := connected.get_transfer_status(first))[1] == hixl.TransferStatus.WAITING:
        assert told[0] == hixl.SUCCESS
    assert told == (hixl.SUCCESS, hixl.TransferStatus.COMPLETED)
    again = connected.get_transfer_status(first)
    assert again == (hixl.PARAM_INVALID, hixl.TransferStatus.FAILED)
    ended = {first: requests[first]}
    query = hixl.GetTransferStatusArgs(max_query_count=3, skip_waiting=True)
    while len(ended) < len(requests):
        status, results = connected.get_all_transfer_status(query)
        assert status == hixl.SUCCESS
        assert len(results) <= 3
        for result in results:
            assert result.status == hixl.TransferStatus.COMPLETED
            assert result.req not in ended
            ended[result.req] = result.user_data
    assert ended == requests
    assert connected.get_all_transfer_status() == (hixl.SUCCESS, [])
    np.testing.assert_array_equal(memory.array[: 8 * BLOCK], pattern(seed=3)[: 8 * BLOCK])


def test_a_range_may_pass_from_a_registration_into_the_next(
    make_engine: MakeEngine, place: Place, peer: Peer
) -> None:
    engine = make_engine()
    array, address = place.zeros()
    third = MIB // 4 + 4096
    pieces = [(0, third), (third, third), (2 * third, MIB - 2 * third)]
    for start, nbytes in pieces:
        status, _ = engine.register_mem(hixl.MemDesc(address + start, nbytes), place.mem_type)
        assert status == hixl.SUCCESS
    peer.run(
        """
        assert engine.deregister_mem(memory.handle) == hixl.SUCCESS
        for start, nbytes in ((0, 4096 * 3), (4096 * 3, len(memory.array) - 4096 * 3)):
            desc = hixl.MemDesc(memory.address + start, nbytes)
            assert engine.register_mem(desc, place.mem_type)[0] == hixl.SUCCESS
        """
    )
    peer.fill(4)
    assert engine.connect(peer.name, 10_000) == hixl.SUCCESS
    memory = Memory(array, address, 0)
    ranges = [(0, 100, third + 5), (2 * third - 7, MIB // 2, 300), (third + 50, 4096 * 3 - 1, 2)]
    plan = engine.plan_transfer(peer.name, hixl.READ, descs(memory, peer, ranges))
    assert len(plan.parts) >= 4
    moved = descs(memory, peer, ranges)
    assert engine.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS
    expected = np.zeros(MIB, np.uint8)
    for a, b, n in ranges:
        expected[a : a + n] = pattern(seed=4)[b : b + n]
    np.testing.assert_array_equal(array, expected)


def test_registrations_of_the_peer_may_overlap_in_one_transfer(
    connected: hixl.Hixl, memory: Memory, peer: Peer
) -> None:
    peer.run(
        """
        assert engine.deregister_mem(memory.handle) == hixl.SUCCESS
        half = len(memory.array) // 2
        for start, nbytes in ((0, half + 8192), (half - 8192, half)):
            desc = hixl.MemDesc(memory.address + start, nbytes)
            assert engine.register_mem(desc, place.mem_type)[0] == hixl.SUCCESS
        """
    )
    peer.fill(8)
    half = MIB // 2
    ranges = [(0, 0, half + 20_000), (half + 30_000, 100, 8192), (half + 50_000, half - 50, 100)]
    moved = descs(memory, peer, ranges)
    assert connected.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS
    expected = np.zeros(MIB, np.uint8)
    for a, b, n in ranges:
        expected[a : a + n] = pattern(seed=8)[b : b + n]
    np.testing.assert_array_equal(memory.array, expected)
    expected[:] = pattern(seed=9)
    memory.array[:] = expected
    one = descs(memory, peer, [(0, 0, MIB - 8192)])
    assert connected.transfer_sync(peer.name, hixl.WRITE, one, LONG_MS) == hixl.SUCCESS
    assert peer.bytes()[: MIB - 8192] == expected[: MIB - 8192].tobytes()


REFUSED = {
    "no range": ([], "at least 1"),
    "no bytes": ([(0, 0, 0)], "0 bytes"),
    "behind what is registered here": ([(0, 0, 8), (MIB - 8, 0, 16)], "local range 1"),
    "behind what is registered there": ([(0, MIB - 8, 16)], "the nearest is"),
    "before what is registered there": ([(0, -16, 16)], "below the beginning of it"),
    "two that write the same byte": ([(0, 0, 10), (9, 100, 10)], "overlap: both are written"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_transfers_are_refused_with_a_reason_in_the_log(
    connected: hixl.Hixl,
    memory: Memory,
    peer: Peer,
    caplog: pytest.LogCaptureFixture,
    case: str,
) -> None:
    ranges, why = REFUSED[case]
    moved = descs(memory, peer, ranges)
    with caplog.at_level(logging.WARNING, "kvplan.hixl"):
        assert connected.transfer_sync(peer.name, hixl.READ, moved) == hixl.PARAM_INVALID
        assert connected.transfer_async(peer.name, hixl.READ, moved) == (hixl.PARAM_INVALID, 0)
    said = [record.getMessage() for record in caplog.records if record.name == "kvplan.hixl"]
    assert len(said) == 2
    assert all(why in item and peer.name in item for item in said), said
    assert not memory.array.any()


def test_the_plan_of_a_transfer_has_its_ranges(
    connected: hixl.Hixl, memory: Memory, peer: Peer
) -> None:
    adjacent = descs(memory, peer, [(100, 0, 50), (150, 50, 50), (0, 500, 20)])
    plan = connected.plan_transfer(peer.name, hixl.READ, adjacent)
    assert (plan.num_descriptors, plan.nbytes) == (2, 120)
    assert "3 slices -> 2 descriptors (1 merged)" in plan.explain()
    assert sorted(plan.part.segments) == [(0, 100, 100), (500, 0, 20)]
    assert plan.ranges is not None
    assert plan.ranges.text(0) == (
        f"local [{memory.address + 100:#x}, {memory.address + 200:#x}), "
        f"remote [{peer.address:#x}, {peer.address + 100:#x}), 100 bytes"
    )
    other = connected.plan_transfer(peer.name, hixl.READ, adjacent[:2])
    assert "equivalent" not in plan.diff(other).splitlines()[-1]
    assert Plan.from_dict(plan.to_dict()) == plan
    seen = []
    remove = connected.datadist.on_plan(lambda event: seen.append(event.plan))
    assert connected.transfer_sync(peer.name, hixl.READ, adjacent, LONG_MS) == hixl.SUCCESS
    remove()
    assert seen == [plan]


offsets = st.integers(0, 4000)
some_ranges = st.lists(st.tuples(offsets, offsets, st.integers(1, 500)), min_size=1, max_size=30)


class TestProperty:
    """A comparison of transfers of any ranges with plain bytes."""

    @pytest.fixture(scope="class", params=["host", "tcp"])
    @classmethod
    def pair(cls, request: pytest.FixtureRequest) -> Iterator[tuple[hixl.Hixl, Memory, Peer]]:
        place = Place(request.param, 2)
        peer = Peer(place.name, 8192)
        engine = hixl.Hixl()
        assert engine.initialize("127.0.0.1", place.options) == hixl.SUCCESS
        # As three registrations, of which two overlap and two are adjacent.
        array, address = place.zeros(8192)
        for start, nbytes in ((0, 1500), (1000, 2000), (3000, 5192)):
            desc = hixl.MemDesc(address + start, nbytes)
            assert engine.register_mem(desc, hixl.MEM_HOST)[0] == hixl.SUCCESS
        assert engine.connect(peer.name, 10_000) == hixl.SUCCESS
        yield engine, Memory(array, address, 0), peer
        engine.finalize()
        peer.end()

    @given(ranges=some_ranges, write=st.booleans(), sync=st.booleans())
    def test_bytes(
        self,
        pair: tuple[hixl.Hixl, Memory, Peer],
        ranges: list[tuple[int, int, int]],
        write: bool,
        sync: bool,
    ) -> None:
        engine, memory, peer = pair
        peer.fill(5)
        memory.array[:] = pattern(8192, 6)
        mine, theirs = bytearray(pattern(8192, 6)), bytearray(pattern(8192, 5))
        written: set[int] = set()
        clash = False
        for a, b, n in ranges:
            start = b if write else a
            bytes_of = set(range(start, start + n))
            clash = clash or not written.isdisjoint(bytes_of)
            written |= bytes_of
            if write:
                theirs[b : b + n] = pattern(8192, 6)[a : a + n].tobytes()
            else:
                mine[a : a + n] = pattern(8192, 5)[b : b + n].tobytes()
        op = hixl.WRITE if write else hixl.READ
        moved = descs(memory, peer, ranges)
        if sync:
            status = engine.transfer_sync(peer.name, op, moved, LONG_MS)
        else:
            status, request = engine.transfer_async(peer.name, op, moved)
            if status == hixl.SUCCESS:
                while (end := engine.get_transfer_status(request))[1] == 0:
                    pass
                assert end == (hixl.SUCCESS, hixl.TransferStatus.COMPLETED)
        if clash:
            assert status == hixl.PARAM_INVALID
            mine, theirs = bytearray(pattern(8192, 6)), bytearray(pattern(8192, 5))
        else:
            assert status == hixl.SUCCESS
        assert memory.array.tobytes() == mine
        assert peer.bytes() == theirs


def test_engines_of_one_process(make_engine: MakeEngine, place: Place) -> None:
    name = free_name()
    other = Place(place.name, 1)  # HCCL connects two devices
    owner, user = make_engine(name, **other.options), make_engine(free_name())
    theirs, mine = registered(owner, other), registered(user, place)
    theirs.array[:] = pattern(seed=7)
    assert user.connect(name, 10_000) == hixl.SUCCESS
    moved = [TransferOpDesc(mine.address + 5, theirs.address + 9, MIB // 2)]
    assert user.transfer_sync(name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS
    np.testing.assert_array_equal(mine.array[5 : 5 + MIB // 2], pattern(seed=7)[9 : 9 + MIB // 2])


def test_memory_of_the_host(connected: hixl.Hixl, peer: Peer) -> None:
    """Host memory may be an array, a bytearray, or a mapped file."""
    peer.fill(8)
    owner = bytearray(5000)
    view = np.frombuffer(owner, np.uint8)
    status, handle = connected.register_mem(
        hixl.MemDesc(view.ctypes.data, len(owner)), hixl.MEM_HOST
    )
    assert status == hixl.SUCCESS
    moved = [TransferOpDesc(view.ctypes.data + 1, peer.address + 2, 4999)]
    assert connected.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS
    assert owner == b"\0" + pattern(seed=8)[2:5001].tobytes()
    assert connected.deregister_mem(handle) == hixl.SUCCESS
    assert connected.transfer_sync(peer.name, hixl.READ, moved) == hixl.PARAM_INVALID
