"""Ranges that peers must not reach: removed, registered anew, read-only, and those under way."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import numpy as np
import pytest

from kvnative._executor import KVN_OK, KVN_PEER_GONE, KVN_UNMAPPED, Executor
from kvnative._ucx import UcxEnd, UcxNativeLink
from tests.ucx.peer import NBYTES, TIMEOUT_MS, Bytes, UcxPeer, blocks, open_end
from tests.ucx_library import found

DIRECTIONS = ["get", "put"]
SLOT = 5
HALF = NBYTES // 2
MESSAGE_NBYTES = 224 << 10
"""Of a pull's answer, at most; four of them are sent at once."""


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("nbytes", [4096, 300_000])
class TestStale:
    def test_a_range_that_was_removed(
        self,
        steady_peer: UcxPeer,
        steady_link: UcxNativeLink,
        local: Bytes,
        direction: str,
        nbytes: int,
    ) -> None:
        steady_peer.add_range(SLOT, 0, HALF, generation=3)
        steady_peer.remove_range(SLOT)
        spans = [(i * nbytes, i * nbytes, nbytes) for i in range(9)]
        with Executor(
            steady_peer.backend(steady_link, direction, slot=SLOT, generation=3, nbytes=HALF)
        ) as executor:
            report = executor.run(steady_peer.descriptors(direction, local, spans), TIMEOUT_MS)
        assert (report.status, report.failed, report.bytes_done) == (KVN_UNMAPPED, 0, 0)
        assert report.unconfirmed == ((0, 9),)
        assert report.message == (
            f"descriptor 0: {nbytes} bytes at {steady_peer.base:#x} of the peer, which has"
            " deregistered it"
        )
        assert (local == 0xA5).all()

    def test_a_range_registered_anew(
        self,
        steady_peer: UcxPeer,
        steady_link: UcxNativeLink,
        local: Bytes,
        direction: str,
        nbytes: int,
    ) -> None:
        # The same slot, the same address, but what lies there is something else by now.
        steady_peer.add_range(SLOT, 0, HALF, generation=4)
        before = steady_peer.memory.copy()
        with Executor(
            steady_peer.backend(steady_link, direction, slot=SLOT, generation=3, nbytes=HALF)
        ) as executor:
            descriptors = steady_peer.descriptors(direction, local, [(0, 0, nbytes)])
            report = executor.run(descriptors, TIMEOUT_MS)
        steady_peer.remove_range(SLOT)
        assert (report.status, report.failed) == (KVN_UNMAPPED, 0)
        assert (local == 0xA5).all()
        np.testing.assert_array_equal(steady_peer.memory, before)

    def test_more_than_is_registered(
        self,
        steady_peer: UcxPeer,
        steady_link: UcxNativeLink,
        local: Bytes,
        direction: str,
        nbytes: int,
    ) -> None:
        # What this end believes is more than what the peer has.
        steady_peer.add_range(SLOT, nbytes, nbytes, generation=3)
        before = steady_peer.memory.copy()
        for offset in (0, nbytes // 2, nbytes + 1, 2 * nbytes):
            with Executor(
                steady_peer.backend(steady_link, direction, slot=SLOT, generation=3)
            ) as executor:
                descriptors = steady_peer.descriptors(direction, local, [(0, offset, nbytes)])
                report = executor.run(descriptors, TIMEOUT_MS)
            assert (report.status, report.failed) == (KVN_UNMAPPED, 0)
            assert report.message.endswith("which has not registered all of it")
        steady_peer.remove_range(SLOT)
        for outside in (slice(nbytes), slice(2 * nbytes, None)):
            np.testing.assert_array_equal(steady_peer.memory[outside], before[outside])
        steady_peer.fill()


def test_a_range_that_must_not_be_written(
    steady_peer: UcxPeer, steady_link: UcxNativeLink, local: Bytes
) -> None:
    steady_peer.add_range(SLOT, 0, 8192, writable=False)
    before = steady_peer.memory.copy()
    spans = [(0, 8192, 4096), (0, 0, 4096)]  # the first in slot 0, which may be written
    with Executor(steady_peer.backend(steady_link, "put", slot=SLOT)) as executor:
        report = executor.run(steady_peer.descriptors("put", local, spans[1:]), TIMEOUT_MS)
    assert (report.status, report.failed) == (KVN_UNMAPPED, 0)
    assert report.message.endswith("which has registered it with writable=False")
    np.testing.assert_array_equal(steady_peer.memory, before)
    with Executor(steady_peer.backend(steady_link, "get", slot=SLOT)) as executor:
        report = executor.run(steady_peer.descriptors("get", local, spans[1:]), TIMEOUT_MS)
    assert report.status == KVN_OK, report.message
    steady_peer.remove_range(SLOT)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_range_that_goes_while_others_use_it(
    peer: UcxPeer, end: UcxEnd, local: Bytes, direction: str
) -> None:
    """Each round a transfer is under way when the range goes, or has not begun, or is over."""
    link = peer.link(end)
    spans = blocks(2000, 8192)
    outcomes = set()
    for generation in range(2, 14):
        peer.add_range(SLOT, 0, NBYTES, generation=generation)
        with Executor(peer.backend(link, direction, slot=SLOT, generation=generation)) as executor:
            task = executor.submit(peer.descriptors(direction, local, spans))
            # The peer ends the range, and its memory holds something else at once.
            peer.run(f"end.remove_range({SLOT}); memory[:] = {generation}")
            report = task.wait(TIMEOUT_MS)
        outcomes.add(report.status)
        if direction == "put":
            # Not a byte was written after that.
            assert (peer.memory == generation).all()
        elif report.status == KVN_OK:
            assert not (local[: len(spans) * 8192] == generation).all()
        for first, last in report.unconfirmed:
            assert first < last <= len(spans)
    assert outcomes <= {KVN_OK, KVN_UNMAPPED}
    assert KVN_UNMAPPED in outcomes
    assert link.connected


class TestMemoryUnderWay:
    def test_a_peer_that_does_not_take_it_loses_its_link(
        self, end: UcxEnd, peer: UcxPeer, local: Bytes
    ) -> None:
        """This end serves; the peer asks for more than sockets hold, and stops."""
        with_link = peer.link(end)
        local[:] = 7
        end.add_range(SLOT, local.ctypes.data, local.nbytes, True, 1)
        before = end.counters
        # Eight times the same: it stops long before the last byte.
        peer.pull_and_stop(local, SLOT, times=8)
        end.remove_range(SLOT)
        local[:] = 8
        after = end.counters
        if after["stalled"] > before["stalled"]:
            assert with_link.failure == (
                KVN_PEER_GONE,
                "the peer did not take what it had asked for while its memory was"
                " deregistered here",
            )
        peer.resume()
        peer.answer()
        status, message, sevens = peer.run(
            f"""
            report = task.wait({TIMEOUT_MS})
            result = report.status, report.message, bool((into <= 7).all())
            """
        )
        assert status in (KVN_UNMAPPED, KVN_PEER_GONE), message
        assert sevens

    def test_what_it_takes_meanwhile_is_not_confirmed(self, peer: UcxPeer, local: Bytes) -> None:
        """All of a part is under way when its owner withdraws it, and changes what lies there.

        Or the peer had all of it before it stopped, which is confirmed: then once more.
        """
        with found():
            end = open_end(UCX_TCP_SNDBUF="16k")
        some = local[: 4 * MESSAGE_NBYTES]
        for _ in range(20):
            link = peer.link(end)
            before = end.counters["pulled_nbytes"]
            some[:] = 7
            end.add_range(SLOT, some.ctypes.data, some.nbytes, True, 1)
            peer.pull_and_stop(some, SLOT, times=1)
            with ThreadPoolExecutor(2) as threads:
                removals = [threads.submit(end.remove_range, SLOT) for _ in range(2)]
                # One of them waits for the peer. When the other is refused, it does so.
                wait(removals, return_when=FIRST_COMPLETED)
                some[:] = 8
                peer.resume()
            assert [type(it.exception()) for it in removals].count(ValueError) == 1
            peer.answer()
            status, sevens = peer.run(
                f"result = task.wait({TIMEOUT_MS}).status, bool((into == 7).all())"
            )
            assert sevens or status != KVN_OK
            assert (status == KVN_PEER_GONE) == (not link.connected)
            all_sent = end.counters["pulled_nbytes"] - before == some.nbytes
            if status == KVN_UNMAPPED and all_sent:
                break
        else:
            pytest.fail("it never was all under way")
        end.close()

    @pytest.mark.usefixtures("ucx")
    def test_the_table(self) -> None:
        end = open_end()
        with pytest.raises(ValueError, match="slot 3 holds no range"):
            end.remove_range(3)
        end.add_range(3, 4096, 10, True, 1)
        with pytest.raises(ValueError, match="slot 3 holds a range already"):
            end.add_range(3, 4096, 10, True, 1)
        for slot, address, nbytes in [(65536, 1, 1), (1, 2**64 - 1, 2), (1, 4096, 0)]:
            with pytest.raises(ValueError, match=r"slot is 65536|must have at least one"):
                end.add_range(slot, address, nbytes, True, 1)
        end.remove_range(3)
        end.add_range(3, 4096, 10, True, 1)
        end.close()
        end.remove_range(3)
