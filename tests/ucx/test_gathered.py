"""The gathered backend: bytes between two processes, of which one sits in a read on a pipe."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvnative._executor import KVN_INVALID, KVN_OK, KVN_UNMAPPED, Executor
from kvnative._lower import lower
from kvnative._ucx import UcxEnd, UcxNativeLink
from kvnative._ucx_gathered import gathered_backend
from kvplan import CacheDesc, DataType, plan_pull_blocks, plan_push_blocks
from kvplan.planning import reference
from tests.ucx.peer import NBYTES, TIMEOUT_MS, Bytes, UcxPeer, blocks, u64

DIRECTIONS = ["get", "put"]

BLOCKS, BLOCK, TENSORS = 40, 70_000, 3
DESC = CacheDesc(TENSORS, (BLOCKS, BLOCK), DataType.DT_UINT8)


def both(
    there: Bytes, direction: str, here: Bytes, spans: list[tuple[int, int, int]]
) -> tuple[Bytes, Bytes]:
    """What the transfer leaves here and there, by NumPy."""
    here, there = here.copy(), there.copy()
    for mine, theirs, nbytes in spans:
        if direction == "get":
            here[mine : mine + nbytes] = there[theirs : theirs + nbytes]
        else:
            there[theirs : theirs + nbytes] = here[mine : mine + nbytes]
    return here, there


@pytest.mark.parametrize("direction", DIRECTIONS)
class TestBytes:
    # One message or many; pieces that are shown, packed and cut; more of them than any table holds.
    @pytest.mark.parametrize(
        ("count", "nbytes"),
        [(1, 1), (1, 4096), (400, 32 << 10), (3000, 4096), (9000, 512), (20_000, 7), (3, 5 << 20)],
    )
    def test_blocks(
        self,
        steady_peer: UcxPeer,
        steady_link: UcxNativeLink,
        local: Bytes,
        direction: str,
        count: int,
        nbytes: int,
    ) -> None:
        spans = blocks(count, nbytes)
        here, there = both(steady_peer.memory, direction, local, spans)
        with Executor(steady_peer.backend(steady_link, direction)) as executor:
            descriptors = steady_peer.descriptors(direction, local, spans)
            report = executor.run(descriptors, TIMEOUT_MS)
        assert (report.status, report.bytes_done) == (KVN_OK, count * nbytes), report.message
        assert np.array_equal(local, here)
        assert np.array_equal(steady_peer.memory, there)
        steady_peer.fill()

    @given(data=st.data())
    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_sizes(
        self, steady_peer: UcxPeer, steady_link: UcxNativeLink, direction: str, data: st.DataObject
    ) -> None:
        sizes = data.draw(
            st.lists(
                st.one_of(
                    st.integers(1, 300), st.sampled_from([4096, 8191, 8192, 70_000, 300_000])
                ),
                max_size=60,
            )
        )
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
        np.testing.assert_array_equal(local, expected[0])
        np.testing.assert_array_equal(there, expected[1])

    def test_a_plan(
        self, steady_peer: UcxPeer, steady_link: UcxNativeLink, local: Bytes, direction: str
    ) -> None:
        # The tensors of the peer are ranges of their own, and adjacent.
        src, dst = [7, 8, 9, 30, 2, 39], [0, 20, 21, 22, 5, 39]
        make = plan_pull_blocks if direction == "get" else plan_push_blocks
        plan = make(DESC, DESC, src, dst)
        nbytes = plan.src.tensor_nbytes
        sides = [steady_peer.memory, local]
        if direction == "put":
            sides.reverse()
        whole = [side[: TENSORS * nbytes].copy() for side in sides]
        reference.execute(plan, *(list(side.reshape(TENSORS, nbytes)) for side in whole))

        slots = u64(*range(10, 10 + TENSORS))
        bases = np.arange(TENSORS, dtype=np.uint64) * np.uint64(nbytes)
        for slot, offset in zip(slots, bases, strict=True):
            steady_peer.add_range(int(slot), int(offset), nbytes)
        here, there = bases + np.uint64(local.ctypes.data), bases + np.uint64(steady_peer.base)
        backend = gathered_backend(
            steady_link, direction, slots, u64(1, 1, 1), there, u64(*[nbytes] * TENSORS)
        )
        segments = np.array(list(plan.segments), dtype=np.uint64).T.copy()
        ends = (there, here) if direction == "get" else (here, there)
        with Executor(backend) as executor:
            report = executor.run(lower(*segments, *ends), TIMEOUT_MS)
        assert report.status == KVN_OK, report.message
        for side, expected in zip(sides, whole, strict=True):
            np.testing.assert_array_equal(side[: TENSORS * nbytes], expected)
        for slot in slots:
            steady_peer.remove_range(int(slot))
        steady_peer.fill()

    def test_stages(
        self, steady_peer: UcxPeer, steady_link: UcxNativeLink, local: Bytes, direction: str
    ) -> None:
        spans = blocks(640, 16 << 10)
        here, there = both(steady_peer.memory, direction, local, spans)
        with Executor(steady_peer.backend(steady_link, direction)) as executor:
            task = executor.stage(steady_peer.descriptors(direction, local, spans), 20)
            for stage in range(31, -1, -1):
                task.open(stage)
            report = task.wait(TIMEOUT_MS)
        assert report.status == KVN_OK, report.message
        assert np.array_equal(local, here)
        assert np.array_equal(steady_peer.memory, there)
        steady_peer.fill()

    def test_the_progress_is_told(
        self, steady_peer: UcxPeer, steady_link: UcxNativeLink, local: Bytes, direction: str
    ) -> None:
        spans = [(0, 0, NBYTES)]
        seen = [0]
        with Executor(steady_peer.backend(steady_link, direction)) as executor:
            task = executor.submit(steady_peer.descriptors(direction, local, spans))
            while not task.done:
                seen.append(task.report.bytes_done)
            assert task.report.status == KVN_OK, task.report.message
            seen.append(task.report.bytes_done)
        assert seen == sorted(seen)
        assert seen[-1] == NBYTES
        steady_peer.fill()


class TestRefusals:
    def test_outside_every_range(
        self, steady_peer: UcxPeer, steady_link: UcxNativeLink, local: Bytes
    ) -> None:
        spans = [(0, 0, 4096), (0, NBYTES - 100, 101)]
        with Executor(steady_peer.backend(steady_link, "get")) as executor:
            report = executor.run(steady_peer.descriptors("get", local, spans))
        assert (report.status, report.failed, report.bytes_done) == (KVN_UNMAPPED, 1, 0)
        assert "are in none of its 1 ranges" in report.message

    def test_ranges_that_are_none(self, steady_link: UcxNativeLink) -> None:
        for slot, address, nbytes in [(0, 4096, 0), (0, 2**64 - 10, 11), (2**32, 4096, 1)]:
            with pytest.raises(ValueError, match="a range is empty"):
                gathered_backend(steady_link, "get", u64(slot), u64(1), u64(address), u64(nbytes))
        with pytest.raises(ValueError, match="1 slots, but 2 addresses"):
            gathered_backend(steady_link, "get", u64(1), u64(1), u64(1, 2), u64(1))
        with pytest.raises(ValueError, match="direction is 'up'"):
            gathered_backend(steady_link, "up", u64(1), u64(1), u64(1), u64(1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="generations: expected uint64"):
            gathered_backend(steady_link, "get", u64(1), np.zeros(1), u64(1), u64(1))  # type: ignore[arg-type]

    def test_a_link_that_is_not_connected(
        self, end: UcxEnd, steady_peer: UcxPeer, local: Bytes
    ) -> None:
        link = end.link(b"\xff" * 16, steady_peer.address)
        with Executor(steady_peer.backend(link, "get")) as executor:
            report = executor.run(steady_peer.descriptors("get", local, [(0, 0, 8)]), TIMEOUT_MS)
        assert report.status == KVN_INVALID
        assert report.message == "the link is not connected yet"
