"""The data path: bytes between two processes, of which one waits in a read on a pipe."""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvplan
from kvnative._backend import KVN_OK
from kvnative._executor import Executor
from kvnative._tcp import TcpNativeLink, TcpService, tcp_backend
from kvplan import CacheDesc, DataType, Rows, Shard, Transfer
from kvplan.planning import reference
from tests.support.ends import assert_no_outcome_before_its_end
from tests.tcp.frames import Raw, answer
from tests.tcp.peer import (
    DIRECTIONS,
    TIMEOUT_MS,
    Bytes,
    Column,
    Span,
    TcpPeer,
    backend_of,
    blocks,
    both,
    descriptors,
    link_within,
)

directions = pytest.mark.parametrize("direction", DIRECTIONS)
KIB, MIB = 1 << 10, 1 << 20
MEMORY_NBYTES = 48 * MIB
NORESERVE = 0x4000  # Linux's MAP_NORESERVE; Python has the name from 3.13 on

BLOCKS, BLOCK, TENSORS = 40, 70_000, 3
DESC = CacheDesc(TENSORS, (BLOCKS, BLOCK), DataType.DT_UINT8, shard=Shard(num_layers=TENSORS))

SHAPES: dict[str, Callable[[], list[Span]]] = {
    "a byte": lambda: [(5, 7, 1)],
    "a block": lambda: [(4096, 12_288, 4096)],
    "one of 40 MiB": lambda: [(1, 3, 40 * MIB)],
    "blocks in any order": lambda: blocks(300, 32 * KIB),
    # More runs than fit into a request, and more requests than are in flight at a time.
    "16 bytes each": lambda: blocks(100_000, 16),
    "7 bytes each": lambda: blocks(5_000, 7),
    "adjacent at both ends": lambda: [(i * 4096, i * 4096, 4096) for i in range(3_000)],
    "adjacent there": lambda: [(i * 9000, i * 4096, 4096) for i in range(3_000)],
    "strided there": lambda: [(i * 512, i * 5000, 512) for i in range(9_000)],
    "strided there, from the end": lambda: [
        (i * 512, (8_999 - i) * 5000, 512) for i in range(9_000)
    ],
    "strides of touching pairs": lambda: [
        (i * 512, i // 2 * 5000 + i % 2 * 512, 512) for i in range(9_000)
    ],
    # No step of a run is that long.
    "far apart": lambda: [(i * 64, (i % 2) * 40 * MIB + i * 64, 64) for i in range(400)],
    "of several sizes": lambda: [(i * 5000, i * 5000, 1 + i * 37 % 5000) for i in range(2_000)],
    "the same source again": lambda: [(i * 1000, 70, 1000) for i in range(2_000)],
    "none": list,
}


@pytest.fixture(autouse=True)
def _as_it_was(steady_peer: TcpPeer) -> Iterator[None]:
    yield
    steady_peer.fill()


@pytest.fixture(scope="module")
def wide_link(service: TcpService, steady_peer: TcpPeer) -> TcpNativeLink:
    return steady_peer.link(service, connections=4)


class TestShapes:
    @pytest.mark.parametrize("name", SHAPES)
    @directions
    def test_every_shape_moves_the_bytes_that_numpy_moves(
        self,
        steady_peer: TcpPeer,
        steady_link: TcpNativeLink,
        local: Bytes,
        direction: str,
        name: str,
    ) -> None:
        spans = SHAPES[name]()
        if direction == "put" and name == "the same source again":
            spans = [(theirs, mine, nbytes) for mine, theirs, nbytes in spans]
        here, there = both(steady_peer.memory, direction, local, spans)
        with Executor(steady_peer.backend(steady_link, direction)) as executor:
            report = executor.run(steady_peer.descriptors(direction, local, spans), TIMEOUT_MS)
        total = sum(nbytes for _, _, nbytes in spans)
        assert (report.status, report.bytes_done) == (KVN_OK, total), report.message
        assert report.unconfirmed == ()
        assert np.array_equal(local, here)
        assert np.array_equal(steady_peer.memory, there)

    @pytest.mark.parametrize("name", ["a byte", "one of 40 MiB", "blocks in any order", "none"])
    @directions
    def test_several_connections_move_the_same_bytes(
        self,
        steady_peer: TcpPeer,
        wide_link: TcpNativeLink,
        local: Bytes,
        direction: str,
        name: str,
    ) -> None:
        spans = SHAPES[name]()
        here, there = both(steady_peer.memory, direction, local, spans)
        with Executor(steady_peer.backend(wide_link, direction)) as executor:
            report = executor.run(steady_peer.descriptors(direction, local, spans), TIMEOUT_MS)
        total = sum(nbytes for _, _, nbytes in spans)
        assert (report.status, report.bytes_done) == (KVN_OK, total), report.message
        assert np.array_equal(local, here)
        assert np.array_equal(steady_peer.memory, there)

    @directions
    def test_no_outcome_is_known_before_the_end_of_a_batch(
        self, steady_peer: TcpPeer, steady_link: TcpNativeLink, local: Bytes, direction: str
    ) -> None:
        moved = steady_peer.descriptors(direction, local, SHAPES["one of 40 MiB"]())
        assert_no_outcome_before_its_end(steady_peer.backend(steady_link, direction), moved)

    @given(data=st.data())
    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @directions
    def test_descriptors_of_any_size_move(
        self, steady_peer: TcpPeer, steady_link: TcpNativeLink, direction: str, data: st.DataObject
    ) -> None:
        some = st.one_of(st.integers(1, 300), st.sampled_from([4096, 8191, 70_000, 300_000]))
        sizes = data.draw(st.lists(some, max_size=60))
        order = np.random.default_rng(len(sizes)).permutation(len(sizes))
        starts = np.cumsum([0, *(sizes[i] for i in order)])
        spans = [(0, 0, 0)] * len(sizes)
        for place, index in enumerate(order):
            spans[index] = (int(sum(sizes[:index])), int(starts[place]), sizes[index])
        local = np.random.default_rng(3).integers(0, 256, sum(sizes) + 1, dtype=np.uint8)
        there = steady_peer.memory[: sum(sizes) + 1]
        expected = both(there, direction, local, spans)
        with Executor(steady_peer.backend(steady_link, direction)) as executor:
            report = executor.run(steady_peer.descriptors(direction, local, spans), TIMEOUT_MS)
        assert (report.status, report.bytes_done) == (KVN_OK, sum(sizes)), report.message
        assert np.array_equal(local, expected[0])
        assert np.array_equal(there, expected[1])

    @directions
    def test_a_plan_is_executed(
        self, steady_peer: TcpPeer, steady_link: TcpNativeLink, local: Bytes, direction: str
    ) -> None:
        transfer = Transfer(Rows(DESC, [7, 8, 9, 30, 2, 39]), Rows(DESC, [0, 20, 21, 22, 5, 39]))
        plan = kvplan.plan(transfer, local="dst" if direction == "get" else "src")
        nbytes = plan.part.src.tensor_nbytes
        sides = [steady_peer.memory, local]
        if direction == "put":
            sides.reverse()
        whole = [side[: TENSORS * nbytes].copy() for side in sides]
        reference.execute(plan, *(list(side.reshape(TENSORS, nbytes)) for side in whole))
        bases = [tensor * nbytes for tensor in range(TENSORS)]
        spans = [
            (bases[tensor] + mine, bases[tensor] + theirs, size)
            for tensor in range(TENSORS)
            for mine, theirs, size in (
                (dst, src, size) if direction == "get" else (src, dst, size)
                for src, dst, size in plan.part.segments
            )
        ]
        with Executor(steady_peer.backend(steady_link, direction)) as executor:
            report = executor.run(steady_peer.descriptors(direction, local, spans), TIMEOUT_MS)
        assert report.status == KVN_OK, report.message
        for side, expected in zip(sides, whole, strict=True):
            assert np.array_equal(side[: TENSORS * nbytes], expected)


class TestRanges:
    @directions
    def test_more_ranges_than_fit_into_a_request(
        self, steady_peer: TcpPeer, steady_link: TcpNativeLink, local: Bytes, direction: str
    ) -> None:
        """The backend has 200 ranges, some adjacent, in random order."""
        nbytes, slots = 50_000, np.arange(1, 201)
        steady_peer.run(
            f"for i in {slots.tolist()}:"
            f" service.add_range(i, base + i * {nbytes}, {nbytes}, True, i + 7)"
        )
        order = np.random.default_rng(4).permutation(slots).astype(np.uint64)
        addresses = order * np.uint64(nbytes) + np.uint64(steady_peer.base)
        sizes: Column = np.full(order.size, nbytes, dtype=np.uint64)
        backend = tcp_backend(
            steady_link, 0, direction, order, order + np.uint64(7), addresses, sizes
        )
        spans = [
            (i * 500, int(slot) * nbytes + 499 * (i % 3), 500)
            for i, slot in enumerate(np.random.default_rng(5).choice(slots, 3000))
        ]
        if direction == "put":  # write no byte twice
            spans = [(mine, mine * 5 + nbytes, size) for mine, _, size in spans]
        here, there = both(steady_peer.memory, direction, local, spans)
        with Executor(backend) as executor:
            report = executor.run(steady_peer.descriptors(direction, local, spans), TIMEOUT_MS)
        for slot in slots:
            steady_peer.remove_range(int(slot))
        assert report.status == KVN_OK, report.message
        assert np.array_equal(local, here)
        assert np.array_equal(steady_peer.memory, there)


class TestAtOnce:
    def test_both_directions_by_several_threads(
        self, steady_peer: TcpPeer, steady_link: TcpNativeLink, local: Bytes
    ) -> None:
        """Pulls and pushes share one connection, each with its own memory."""
        size, rounds = 3 * MIB, 4
        before = steady_peer.memory.copy()
        pushed = np.random.default_rng(6).integers(0, 256, 4 * size, dtype=np.uint8)
        results: list[tuple[int, str]] = []

        def move(direction: str, number: int) -> None:
            mine = (pushed if direction == "put" else local)[number * size :][:size]
            theirs = (number + (4 if direction == "put" else 0)) * size
            spans = [(at, theirs + at, 1000) for at in range(0, size - 999, 1000)]
            with Executor(steady_peer.backend(steady_link, direction)) as executor:
                for _ in range(rounds):
                    report = executor.run(
                        steady_peer.descriptors(direction, mine, spans), TIMEOUT_MS
                    )
                    results.append((report.status, report.message))

        threads = [
            threading.Thread(target=move, args=(direction, number))
            for number in range(4)
            for direction in DIRECTIONS
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [(KVN_OK, "")] * (len(threads) * rounds)
        moved = size // 1000 * 1000
        for number in range(4):
            mine, theirs = number * size, (number + 4) * size
            assert np.array_equal(local[mine:][:moved], before[mine:][:moved])
            assert np.array_equal(steady_peer.memory[theirs:][:moved], pushed[mine:][:moved])

    @directions
    def test_both_ends_send_requests(
        self, service: TcpService, steady_peer: TcpPeer, local: Bytes, direction: str
    ) -> None:
        """The peer transfers memory of this process at the same time."""
        link = steady_peer.link(service)
        size, slot = 8 * MIB, 9
        offered = np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)
        before = offered.copy()
        service.add_range(slot, offered.ctypes.data, size, True, 1)
        steady_peer.send(
            f"""
            from kvnative._executor import Executor
            from tests.tcp.peer import backend_of, descriptors
            there = {offered.ctypes.data}
            backend = backend_of(links[-1], {direction!r}, there, {size}, slot={slot})
            spans = [(at, at, 4096) for at in range(0, {size}, 4096)][::-1]
            with Executor(backend) as executor:
                result = [
                    executor.run(
                        descriptors({direction!r}, base + (16 << 20), there, spans), {TIMEOUT_MS}
                    ).message
                    for _ in range(4)
                ]
            """
        )
        spans = [(at, at, 4096) for at in range(0, size, 4096)]
        expected = both(steady_peer.memory[:size], direction, local, spans)
        with Executor(steady_peer.backend(link, direction)) as executor:
            reports = [
                executor.run(steady_peer.descriptors(direction, local, spans), TIMEOUT_MS)
                for _ in range(4)
            ]
        assert steady_peer.answer() == [""] * 4
        service.remove_range(slot)
        assert [report.message for report in reports] == [""] * 4
        assert np.array_equal(local, expected[0])
        assert np.array_equal(steady_peer.memory[:size], expected[1])
        theirs = steady_peer.memory[16 * MIB :][:size]
        assert np.array_equal(offered, theirs)
        if direction == "get":
            assert np.array_equal(offered, before)

    @directions
    def test_a_request_does_not_wait_for_others(
        self, steady_peer: TcpPeer, steady_link: TcpNativeLink, local: Bytes, direction: str
    ) -> None:
        """Only the threads of the services drive the transfers."""
        spans = [(i * MIB, (39 - i) * MIB, MIB) for i in range(40)]
        here, there = both(steady_peer.memory, direction, local, spans)
        with Executor(steady_peer.backend(steady_link, direction)) as executor:
            tasks = [
                executor.submit(steady_peer.descriptors(direction, local, spans[i::8]))
                for i in range(8)
            ]
            over = threading.Event()
            watch = threading.Timer(TIMEOUT_MS / 1000, over.set)
            watch.start()
            while not all(task.done for task in tasks) and not over.is_set():
                pass
            watch.cancel()
            assert [task.report.status for task in tasks] == [KVN_OK] * 8
        assert np.array_equal(local, here)
        assert np.array_equal(steady_peer.memory, there)

    @pytest.mark.parametrize("room", [520_000, 560_000, 600_000, 640_000])
    def test_a_request_does_not_wait_while_the_socket_takes_most(
        self, service: TcpService, room: int
    ) -> None:
        """The socket takes all but a few bytes at once, and the thread sends those."""
        (mine, theirs), unused = socket.socketpair(), socket.socketpair()
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
        mine.setblocking(False)
        unused[0].setblocking(False)
        link = service.link([mine.detach()], [unused[0].detach()], peer="a socket")
        raw = Raw(theirs)
        local = np.random.default_rng(10).integers(0, 256, MIB, dtype=np.uint8)
        spans = [(i * KIB, i * 3000 + i * i % 7, KIB) for i in range(KIB)]  # a large table of runs
        with Executor(backend_of(link, "put", 1 << 30, 1 << 30)) as executor:
            task = executor.submit(descriptors("put", local.ctypes.data, 1 << 30, spans))
            number, nbytes, _ = raw.read_request()
            assert raw.read(nbytes) == local.tobytes()
            raw.send(answer(number))
            assert task.wait(TIMEOUT_MS).status == KVN_OK
        link.close("the test is over")
        theirs.close()
        unused[1].close()

    def test_a_service_linked_with_itself(self, local: Bytes) -> None:
        """The service has both ends of the link."""
        service = TcpService(threads=2, max_ranges=1)
        source = np.random.default_rng(8).integers(0, 256, 4 * MIB, dtype=np.uint8)
        service.add_range(0, source.ctypes.data, source.nbytes, False, 1)
        near, _far = link_within(service, service)
        backend = backend_of(near, "get", source.ctypes.data, source.nbytes)
        spans = [(0, 0, source.nbytes)]
        with Executor(backend) as executor:
            report = executor.run(
                descriptors("get", local.ctypes.data, source.ctypes.data, spans), TIMEOUT_MS
            )
        assert report.status == KVN_OK, report.message
        assert np.array_equal(local[: source.nbytes], source)
        service.close()

    @pytest.mark.parametrize("step", [2**32 - 4096, 2**32, 2**32 + 4096])
    def test_steps_around_the_maximum_of_a_run_move(self, local: Bytes, step: int) -> None:
        """The maximum has 32 bits. The gap is only reserved address space."""
        with mmap.mmap(-1, 2 * step + 4096, mmap.MAP_PRIVATE | NORESERVE) as space:
            there = np.frombuffer(space, np.uint8)
            for i in range(3):
                there[i * step : i * step + 4096] = i + 1
            service = TcpService(threads=1, max_ranges=1)
            service.add_range(0, there.ctypes.data, there.nbytes, False, 1)
            near, _far = link_within(service, service)
            spans = [(i * 4096, i * step, 4096) for i in range(3)]
            with Executor(backend_of(near, "get", there.ctypes.data, there.nbytes)) as executor:
                report = executor.run(
                    descriptors("get", local.ctypes.data, there.ctypes.data, spans), TIMEOUT_MS
                )
            service.close()
            del there
        assert report.status == KVN_OK, report.message
        assert local[: 3 * 4096].reshape(3, 4096).tolist() == [[i] * 4096 for i in (1, 2, 3)]
