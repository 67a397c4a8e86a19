"""Registered or local memory that is not mapped: an error names it, and no signal is raised."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from kvnative._backend import KVN_OK, KVN_UNMAPPED
from kvnative._executor import Executor
from kvnative._report import Report
from kvnative._tcp import TcpNativeLink
from tests.tcp.peer import DIRECTIONS, PAGE, TIMEOUT_MS, Bytes, Span, TcpPeer, protect

SIZE = 4 << 20
directions = pytest.mark.parametrize("direction", DIRECTIONS)

# Layouts of descriptors: their size, and the offset of each, the same at both ends.
LAYOUTS: dict[str, tuple[int, list[int]]] = {
    "pages": (PAGE, [i * 3 * PAGE for i in range(200)]),
    "in any order": (1000, [int(i) * PAGE for i in np.random.default_rng(1).permutation(900)]),
    "adjacent": (1000, [i * 1000 for i in range(3000)]),
    "large": (1 << 20, [i << 20 for i in range(4)]),
    "more than a request": (SIZE, [0]),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
# The first descriptor, the last, and one between.
places = pytest.mark.parametrize("place", [0.0, 0.6, 1.0])


@pytest.fixture
def local() -> Iterator[Bytes]:
    """Memory whose pages a test may protect."""
    array = np.frombuffer(mmap.mmap(-1, SIZE), dtype=np.uint8)
    array[:] = 0xA5
    yield array
    protect(array.ctypes.data, SIZE, "all")


def spans_of(layout: str) -> list[Span]:
    nbytes, starts = LAYOUTS[layout]
    return [(at, at, nbytes) for at in starts]


def page_in(layout: str, place: float) -> int:
    """Return the offset of a page that the descriptor at that place in the list needs."""
    nbytes, starts = LAYOUTS[layout]
    return (starts[int(place * (len(starts) - 1))] + int(place * (nbytes - 1))) // PAGE * PAGE


def first_of(layout: str, page: int) -> int:
    """Return the first descriptor that needs the page."""
    nbytes, starts = LAYOUTS[layout]
    return next(i for i, at in enumerate(starts) if at < page + PAGE and page < at + nbytes)


def run(
    peer: TcpPeer, link: TcpNativeLink, direction: str, local: Bytes, spans: list[Span]
) -> Report:
    with Executor(peer.backend(link, direction)) as executor:
        return executor.run(peer.descriptors(direction, local, spans), TIMEOUT_MS)


def check(report: Report, layout: str, page: int, words: str) -> None:
    first = first_of(layout, page)
    assert (report.status, report.failed) == (KVN_UNMAPPED, first), report.message
    assert report.message.startswith(f"descriptor {first}: ")
    assert words in report.message
    assert report.unconfirmed[0][0] <= first
    assert report.unconfirmed[-1][1] == len(spans_of(layout))


def check_that_the_link_works(peer: TcpPeer, link: TcpNativeLink) -> None:
    into = np.zeros(PAGE, dtype=np.uint8)
    assert run(peer, link, "get", into, [(0, SIZE, PAGE)]).status == KVN_OK
    assert np.array_equal(into, peer.memory[SIZE:][:PAGE])
    assert link.failure is None


@directions
@layouts
@places
class TestUnmappedPage:
    def test_an_unmapped_page_of_the_peer_is_named(
        self,
        steady_peer: TcpPeer,
        steady_link: TcpNativeLink,
        local: Bytes,
        direction: str,
        layout: str,
        place: float,
    ) -> None:
        page = page_in(layout, place)
        steady_peer.run(
            "from tests.tcp.peer import protect", f"protect(base + {page}, {PAGE}, 'none')"
        )
        report = run(steady_peer, steady_link, direction, local, spans_of(layout))
        steady_peer.run(f"protect(base + {page}, {PAGE}, 'all')")
        check(report, layout, page, "of the peer, which has it registered, but not mapped")
        check_that_the_link_works(steady_peer, steady_link)

    def test_an_unmapped_page_of_this_process_is_named(
        self,
        steady_peer: TcpPeer,
        steady_link: TcpNativeLink,
        local: Bytes,
        direction: str,
        layout: str,
        place: float,
    ) -> None:
        page = page_in(layout, place)
        protect(local.ctypes.data + page, PAGE, "none")
        report = run(steady_peer, steady_link, direction, local, spans_of(layout))
        protect(local.ctypes.data + page, PAGE, "all")
        check(report, layout, page, "local memory: ")
        assert "are not mapped" in report.message
        check_that_the_link_works(steady_peer, steady_link)


def test_a_read_only_destination_is_named(
    steady_peer: TcpPeer, steady_link: TcpNativeLink, local: Bytes
) -> None:
    protect(local.ctypes.data, PAGE, "read")
    report = run(steady_peer, steady_link, "get", local, [(0, 0, PAGE)])
    assert report.status == KVN_UNMAPPED
    assert "are not mapped, or not writable" in report.message
    assert (local[:PAGE] == 0xA5).all()
    check_that_the_link_works(steady_peer, steady_link)


@directions
def test_others_continue(
    steady_peer: TcpPeer, steady_link: TcpNativeLink, local: Bytes, direction: str
) -> None:
    """Other transfers have requests between those of a refused one."""
    page = SIZE // 2
    protect(local.ctypes.data + page, PAGE, "none")
    good = [(at, 2 * SIZE + at, 8192) for at in range(0, page, 8192)]
    with Executor(steady_peer.backend(steady_link, direction)) as executor:
        tasks = [
            executor.submit(steady_peer.descriptors(direction, local, spans))
            for spans in [good[::2], [(page - (1 << 20), 0, 2 << 20)], good[1::2]]
        ]
        reports = [task.wait(TIMEOUT_MS) for task in tasks]
    protect(local.ctypes.data + page, PAGE, "all")
    assert [report.status for report in reports] == [KVN_OK, KVN_UNMAPPED, KVN_OK]
    assert np.array_equal(
        local[: page - (1 << 20)], steady_peer.memory[2 * SIZE :][: page - (1 << 20)]
    )
    check_that_the_link_works(steady_peer, steady_link)


def test_a_page_after_the_end_of_its_file_is_an_error(
    steady_peer: TcpPeer, steady_link: TcpNativeLink, local: Bytes
) -> None:
    """A page after the end of its file would raise SIGBUS when read; here it is an error."""
    steady_peer.run(
        """
        import mmap, tempfile
        file = tempfile.TemporaryFile()
        file.truncate(8192)
        short = np.frombuffer(mmap.mmap(file.fileno(), 8192), dtype=np.uint8)
        file.truncate(4096)
        service.add_range(1, short.ctypes.data, 8192, True, 1)
        """
    )
    there = int(steady_peer.run("result = short.ctypes.data"))
    spans = [(0, there - steady_peer.base, 4096), (4096, there + 4096 - steady_peer.base, 4096)]
    backend = steady_peer.backend(
        steady_link, "get", slot=1, offset=there - steady_peer.base, nbytes=8192
    )
    with Executor(backend) as executor:
        report = executor.run(steady_peer.descriptors("get", local, spans), TIMEOUT_MS)
    steady_peer.remove_range(1)
    assert (report.status, report.failed) == (KVN_UNMAPPED, 1)
    check_that_the_link_works(steady_peer, steady_link)
