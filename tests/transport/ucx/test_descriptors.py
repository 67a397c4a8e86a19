"""File descriptors run out, and are there again, at an end that has had links before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from kvplan.status import LLMException
from kvplan.transport.ucx.metadata import Metadata
from kvplan.transport.ucx.transport import UcxTransport
from tests.transport.ucx.lanes_peer import LanesPeer

pytestmark = pytest.mark.usefixtures("ucx")


def wanted(count: int, links: str) -> str:
    """A pattern of what is said then."""
    left = r"of which \d+ are left: raise the limit \(ulimit -n\), which is \d+"
    return f"UCX wants {count} file descriptors for {links}, {left}"


LIMIT = """
import os, resource
from kvplan.status import LLMException
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

def files():
    return {int(it) for it in os.listdir("/proc/self/fd")}

def leave(count):
    "The next `count` can be opened, but no more."
    used = files()
    free = [it for it in range(max(used) + count + 2) if it not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], hard))

def restore():
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

def said_by(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except LLMException as error:
        return error.status_code.name, error.args[0]
"""


@pytest.fixture
def transport(ucx: object) -> Iterator[UcxTransport]:
    with UcxTransport(mode="gathered", devices="lo") as transport:
        yield transport


@pytest.fixture
def peer(transport: UcxTransport) -> Iterator[LanesPeer]:
    """Its descriptors can be limited."""
    peer = LanesPeer(1)
    peer.run(LIMIT, "transport.ready()")
    yield peer
    peer.close()


def link_and_close(transport: UcxTransport, peer: LanesPeer) -> None:
    with peer.link(transport) as link:
        link.check()
    peer.run("link.close()")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8])
def test_links_can_be_made_when_they_are_there_again(
    transport: UcxTransport, peer: LanesPeer, count: int
) -> None:
    """Meanwhile both ends try: UCX must not be reached where it cannot accept."""
    link_and_close(transport, peer)
    peer.run(f"leave({count})")
    theirs = peer.metadata()
    peer.send(
        f"""
        result = said_by(
            transport.connect, {transport.metadata(())!r}, timeout_ms=100, session=b"-")
        """
    )
    with pytest.raises(LLMException):
        transport.connect(theirs, timeout_ms=100, session=b"-")
    said = peer.answer()
    peer.run("restore()")
    for _ in range(2):
        link_and_close(transport, peer)
    assert said[0] == "LLM_LINK_FAILED"
    assert re.fullmatch(wanted(16, "1 link"), said[1]), said


def test_whoever_asks_is_told(transport: UcxTransport, peer: LanesPeer) -> None:
    """Nobody gets an address to call at, and who is to be called says why not."""
    assert Metadata.from_bytes(peer.metadata()).addresses
    peer.run("leave(5)")
    assert Metadata.from_bytes(peer.metadata()).addresses == ()
    status, said = peer.run("result = said_by(transport.ready)")
    assert status == "LLM_LINK_FAILED"
    assert re.fullmatch(wanted(16, "1 link"), said), said
    peer.run("restore(); transport.ready()")
    assert Metadata.from_bytes(peer.metadata()).addresses


def test_what_others_that_are_being_made_will_want_is_left_to_them(
    transport: UcxTransport, peer: LanesPeer
) -> None:
    transport.ready()
    theirs = transport.metadata(())
    said = peer.run(
        f"""
        before = files()
        connecting = threading.Thread(target=said_by, args=(transport.connect, {theirs!r}),
            kwargs=dict(timeout_ms=5_000, session=b"nobody comes"))
        connecting.start()
        while files() <= before:
            pass
        leave(14)
        result = said_by(transport.connect, {theirs!r}, timeout_ms=100, session=b"-")
        restore()
        transport.close()
        connecting.join()
        """
    )
    assert said[0] == "LLM_LINK_FAILED"
    assert re.fullmatch(wanted(24, "2 links"), said[1]), said


def test_links_that_are_made_at_once_wait_for_each_other(
    transport: UcxTransport, peer: LanesPeer
) -> None:
    """There is room for all of them, but not for as much as all might want on the way."""
    transport.ready()
    sessions = [b"%d" % it for it in range(8)]
    theirs = peer.metadata()
    peer.send(
        f"""
        from concurrent.futures import ThreadPoolExecutor
        def connect(session):
            return transport.connect({transport.metadata(())!r}, timeout_ms=20_000, session=session)
        leave(40)
        with ThreadPoolExecutor({len(sessions)}) as threads:
            links = list(threads.map(connect, {sessions!r}))
        restore()
        result = len(links)
        """
    )
    connect = partial(transport.connect, theirs, timeout_ms=20_000)
    with ThreadPoolExecutor(len(sessions)) as threads:
        links = list(threads.map(lambda it: connect(session=it), sessions))
    assert peer.answer() == len(links)
    for link in links:
        link.check()
        link.close()


def test_they_run_out_while_it_is_opened(peer: LanesPeer) -> None:
    """After it has looked; it can be opened when they are there again."""
    said = peer.run(
        """
        from kvplan.transport.ucx.end import LazyEnds
        from kvplan.transport.ucx.library import find

        class Late(LazyEnds):
            def _make(self):
                leave(left)
                return super()._make()

        ends = Late(find(), 1, "gathered", {"NET_DEVICES": "lo"}, 16, "late", lambda natives: None)
        left = 6
        result = [said_by(ends.open), ends.failure]
        restore()
        left = 100
        result += [said_by(ends.open), len(ends.natives)]
        ends.close()
        restore()
        """
    )
    (status, reason), failure, later, count = said
    assert status == "LLM_LINK_FAILED"
    assert re.match(wanted(32, "a start"), reason)
    assert (failure, later, count) == (None, None, 1)
