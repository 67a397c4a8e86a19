"""Memory that whoever has it unmapped without a word: an error, and no process dies of it.

One page of a descriptor goes each time: a hole that nothing else is mapped into.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvnative._executor import KVN_OK, KVN_PEER_GONE, KVN_UNMAPPED, Executor
from kvnative._ucx import UcxEnd, UcxLibrary, UcxNativeLink
from tests.ucx.peer import NBYTES, TIMEOUT_MS, Bytes, UcxPeer
from tests.ucx_library import found

PAGE = mmap.PAGESIZE
SLOT = 5
COUNT, GONE = 9, 5
PAGES = range(PAGE, NBYTES, 1 << 16)
Span = tuple[int, int, int]

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

directions = pytest.mark.parametrize("direction", ["get", "put"])
# Copied whole; copied piece by piece; shown; more than one message.
sizes = pytest.mark.parametrize("nbytes", [1000, 8192, 32768, 300_000])


@pytest.fixture
def mine() -> Iterator[Bytes]:
    """Memory that a test may unmap pages of."""
    address = libc.mmap(None, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE,
                        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)  # fmt: skip
    array = np.ctypeslib.as_array((ctypes.c_uint8 * NBYTES).from_address(address))
    array[:] = 0xA5
    yield array
    libc.munmap(address, NBYTES)


def unmap_here(memory: Bytes, offset: int) -> None:
    assert libc.munmap(memory.ctypes.data + offset, PAGE) == 0


def unmap_there(peer: UcxPeer, offset: int, *, after: str = "") -> None:
    """Let the peer unmap a page, as soon as its counter `after` is not 0; `peer.answer` tells."""
    peer.send(
        f"""
        import ctypes
        munmap = ctypes.CDLL(None).munmap
        munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        while {after!r} and not end.counters[{after!r}]:
            pass
        result = munmap(base + {offset}, {PAGE})
        """
    )


def spans_of(nbytes: int) -> list[Span]:
    """COUNT descriptors, each with pages of its own."""
    step = -(-nbytes // PAGE) * PAGE
    return [(i * step, i * step, nbytes) for i in range(COUNT)]


def last_page(span: Span) -> int:
    return (span[0] + span[2] - 1) // PAGE * PAGE


def others_move(
    peer: UcxPeer, link: UcxNativeLink, direction: str, local: Bytes, spans: Sequence[Span]
) -> None:
    """The link is as good as before."""
    with Executor(peer.backend(link, direction)) as executor:
        report = executor.run(peer.descriptors(direction, local, spans), TIMEOUT_MS)
    assert report.status == KVN_OK, report.message
    for here, there, nbytes in spans:
        np.testing.assert_array_equal(
            local[here : here + nbytes], peer.memory[there : there + nbytes]
        )


@directions
@sizes
def test_by_its_owner(
    peer: UcxPeer, end: UcxEnd, local: Bytes, direction: str, nbytes: int
) -> None:
    link, spans = peer.link(end), spans_of(nbytes)
    unmap_there(peer, last_page(spans[GONE]))
    assert peer.answer() == 0
    for first in (0, GONE):  # among others, and alone
        asked = spans[first:] if first == 0 else spans[GONE : GONE + 1]
        with Executor(peer.backend(link, direction)) as executor:
            report = executor.run(peer.descriptors(direction, local, asked), TIMEOUT_MS)
        assert (report.status, report.failed) == (KVN_UNMAPPED, GONE - first)
        assert report.message == (
            f"descriptor {GONE - first}: {nbytes} bytes at {peer.base + spans[GONE][1]:#x} of the"
            " peer, which has it registered, but not mapped"
        )
    others_move(peer, link, direction, local, spans[:GONE] + spans[GONE + 1 :])


@directions
@sizes
def test_by_the_caller(
    steady_peer: UcxPeer,
    steady_link: UcxNativeLink,
    mine: Bytes,
    direction: str,
    nbytes: int,
) -> None:
    spans = spans_of(nbytes)
    unmap_here(mine, last_page(spans[GONE]))
    with Executor(steady_peer.backend(steady_link, direction)) as executor:
        report = executor.run(steady_peer.descriptors(direction, mine, spans), TIMEOUT_MS)
    assert (report.status, report.code, report.failed) == (KVN_UNMAPPED, errno.EFAULT, GONE)
    assert report.message == (
        f"descriptor {GONE}: local memory: {nbytes} bytes at {mine.ctypes.data + spans[GONE][0]:#x}"
        " are not mapped"
    )
    assert steady_link.connected
    others_move(steady_peer, steady_link, direction, mine, spans[:GONE] + spans[GONE + 1 :])
    steady_peer.fill()


def test_what_lies_between_need_not_be_mapped(
    steady_peer: UcxPeer, steady_link: UcxNativeLink, mine: Bytes
) -> None:
    """In one message: the caller's pieces, and a range of the peer's, with holes between them."""
    spans = [(i * 2 * PAGE, i * PAGE, PAGE) for i in range(COUNT)]
    for i in (0, 1, GONE):
        unmap_here(mine, (2 * i + 1) * PAGE)
    for direction in ("get", "put"):
        others_move(steady_peer, steady_link, direction, mine, spans)


@directions
def test_in_mid_transfer_by_its_owner(
    peer: UcxPeer, end: UcxEnd, local: Bytes, direction: str
) -> None:
    link = peer.link(end)
    # 240 MiB, and then what goes as soon as something has moved.
    doomed = NBYTES - (1 << 20)
    spans = [*[(0, 0, doomed)] * 16, (doomed, doomed, NBYTES - doomed)]
    moved = "pulled_nbytes" if direction == "get" else "pushed_nbytes"
    unmap_there(peer, NBYTES - PAGE, after=moved)
    with Executor(peer.backend(link, direction)) as executor:
        report = executor.run(peer.descriptors(direction, local, spans), TIMEOUT_MS)
    assert peer.answer() == 0
    assert (report.status, report.failed) == (KVN_UNMAPPED, 16), report.message
    assert 0 < report.bytes_done < 16 * NBYTES
    others_move(peer, link, direction, local, spans[:1])


@directions
def test_in_mid_transfer_by_the_caller(
    peer: UcxPeer, end: UcxEnd, mine: Bytes, direction: str
) -> None:
    link = peer.link(end)
    doomed = NBYTES - (1 << 20)
    spans = [*[(0, 0, doomed)] * 16, (doomed, doomed, NBYTES - doomed)]
    with Executor(peer.backend(link, direction)) as executor:
        task = executor.submit(peer.descriptors(direction, mine, spans))
        while not task.done and not task.report.bytes_done:
            pass
        unmap_here(mine, NBYTES - PAGE)
        report = task.wait(TIMEOUT_MS)
    assert (report.status, report.failed) == (KVN_UNMAPPED, 16), report.message
    others_move(peer, link, direction, mine, spans[:1])


class TestOnItsWay:
    """The system was shown the memory and did not take the bytes yet: then the link fails.

    Or the next message was looked at first. Whichever it is, this process lives.
    """

    @pytest.fixture(autouse=True)
    def needs_a_build_without_assertions(self) -> None:
        with found() as library:
            version = UcxLibrary.load(library.path).version
        if version < (1, 14, 0):
            pytest.skip("UCX completes what could not be sent twice; Debian's 1.13 asserts against")

    def test_a_push(self, peer: UcxPeer, end: UcxEnd, mine: Bytes) -> None:
        link = peer.link(end)
        peer.stop()
        with Executor(peer.backend(link, "put")) as executor:
            task = executor.submit(peer.descriptors("put", mine, [(0, 0, NBYTES)]))
            for page in PAGES:
                unmap_here(mine, page)
            peer.resume()
            report = task.wait(TIMEOUT_MS)
        assert report.status in (KVN_UNMAPPED, KVN_PEER_GONE), report.message
        others_move(peer, peer.link(end), "get", mine, [(0, 0, PAGE)])

    def test_a_pull(self, peer: UcxPeer, end: UcxEnd, mine: Bytes) -> None:
        """This end serves the peer, which stops as soon as something has come."""
        link = peer.link(end)
        end.add_range(SLOT, mine.ctypes.data, mine.nbytes, True, 1)
        peer.pull_and_stop(mine, SLOT, times=16)
        for page in PAGES:
            unmap_here(mine, page)
        peer.resume()
        peer.answer()
        while not link.failure and not peer.run("result = task.done"):
            pass
        # Engines tell each other that a link has failed.
        status = peer.run("links[-1].close('lost'); result = task.wait(1000).status")
        assert status in (KVN_UNMAPPED, KVN_PEER_GONE)
        end.remove_range(SLOT)
        others_move(peer, peer.link(end), "get", mine, [(0, 0, PAGE)])
