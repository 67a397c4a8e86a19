"""Links between two processes: how they find each other, how they end, and who is told what."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_PEER_GONE,
    KVN_TIMEOUT,
    KVN_UNSUPPORTED,
)
from kvnative._ucx import UcxEnd, UcxError, UcxNativeLink
from tests.transport.owner import Owner
from tests.ucx.peer import TIMEOUT_MS, UcxPeer, open_end
from tests.ucx_library import found


def dead(link: UcxNativeLink) -> tuple[int, str]:
    """Its failure, which must come soon."""
    assert select.select([link.death_fd], [], [], TIMEOUT_MS / 1000)[0]
    assert not link.connected
    assert link.failure is not None
    return link.failure


def make(peer: Owner, token: bytes, address: str) -> str:
    """Code that makes a link there."""
    return f"links.append(end.link(bytes.fromhex('{token.hex()}'), {address}))"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


TOKENS = iter(range(1000, 10_000))


@pytest.fixture
def token() -> bytes:
    return next(TOKENS).to_bytes(16, "big")


@pytest.mark.parametrize(("here", "there"), [(True, False), (False, True), (True, True)])
def test_either_end_may_know_the_other(
    here: bool, there: bool, end: UcxEnd, steady_peer: UcxPeer, token: bytes
) -> None:
    address = f"bytes.fromhex('{end.address.hex()}')" if there else "None"
    steady_peer.run(make(steady_peer, token, address))
    link = end.link(token, steady_peer.address if here else None)
    assert (link.connected, link.way) == (False, "gathered")
    steady_peer.send(f"links[-1].connect({TIMEOUT_MS}); result = links[-1].way")
    link.connect(TIMEOUT_MS)
    assert steady_peer.answer() == "gathered over tcp/lo"
    assert (link.connected, link.way) == (True, "gathered over tcp/lo")
    assert link.failure is None
    link.connect(TIMEOUT_MS)  # at once


def test_the_peer_is_told_why_a_link_is_closed(end: UcxEnd, steady_peer: UcxPeer) -> None:
    link = steady_peer.link(end)
    steady_peer.run("links[-1].close('no more\\nof you')")
    assert dead(link) == (KVN_PEER_GONE, "the peer has closed the link: no more of you")
    assert steady_peer.run("result = links[-1].failure")[0] == KVN_CANCELLED
    link.close("too late")
    assert link.failure == (KVN_PEER_GONE, "the peer has closed the link: no more of you")


def test_a_connection_that_is_being_made_ends_with_its_end(end: UcxEnd, peer: UcxPeer) -> None:
    """UCX would make it anew, and the end would never go."""
    before = descriptors()
    peer.stop()
    with found():
        brief = open_end()
    link = brief.link(next(TOKENS).to_bytes(16, "big"), peer.address)
    with pytest.raises(UcxError):
        link.connect(50)
    brief.close()
    del link, brief
    assert descriptors() == before


def test_a_link_that_is_dropped_is_closed(end: UcxEnd, steady_peer: UcxPeer) -> None:
    link = steady_peer.link(end)
    steady_peer.run("del links[-1]")
    assert dead(link) == (KVN_PEER_GONE, "the peer has closed the link: the link was dropped")


def test_a_killed_peer_is_noticed_and_another_one_can_be_linked(
    end: UcxEnd, peer: UcxPeer, steady_peer: UcxPeer
) -> None:
    link = peer.link(end)
    other = steady_peer.link(end)
    peer.kill()
    status, message = dead(link)
    assert status == KVN_PEER_GONE
    assert message.startswith("the connection to the peer's UCX is lost: ")
    assert (other.connected, other.failure) == (True, None)
    with pytest.raises(UcxError, match="the connection to the peer's UCX is lost") as caught:
        link.connect(TIMEOUT_MS)
    assert caught.value.status == KVN_PEER_GONE
    again = steady_peer.link(end)
    again.close()
    assert other.connected


def test_who_is_not_expected_is_dropped_until_the_peer_makes_its_link(
    end: UcxEnd, steady_peer: UcxPeer, token: bytes
) -> None:
    count = "result = end.counters['unknown_tokens']"
    before = steady_peer.run(count)
    link = end.link(token, steady_peer.address)
    while steady_peer.run(count) == before:  # HELLO is on its way
        with pytest.raises(UcxError, match="has not answered within the time allowed") as caught:
            link.connect(30)
        assert caught.value.status == KVN_TIMEOUT
    assert link.failure is None
    steady_peer.run(make(steady_peer, token, "None"))
    link.connect(TIMEOUT_MS)
    assert link.connected


def test_a_peer_that_is_gone_before_it_is_called(end: UcxEnd, peer: UcxPeer, token: bytes) -> None:
    peer.kill()
    link = end.link(token, peer.address)
    with pytest.raises(UcxError) as caught:
        link.connect(TIMEOUT_MS)
    assert caught.value.status == KVN_PEER_GONE
    assert dead(link)[0] == KVN_PEER_GONE


def test_close_ends_a_connect_of_another_thread(end: UcxEnd, token: bytes) -> None:
    link = end.link(token)
    said: list[UcxError] = []

    def connect() -> None:
        try:
            link.connect(float("inf"))
        except UcxError as error:
            said.append(error)

    thread = threading.Thread(target=connect)
    rounds = end.counters["rounds"]
    thread.start()
    while end.counters["rounds"] == rounds:  # it drives
        pass
    link.close("never mind")
    thread.join()
    assert [(it.status, str(it)) for it in said] == [(KVN_CANCELLED, "never mind")]


def test_closing_an_end_closes_its_links(steady_peer: UcxPeer) -> None:
    with found():
        end = open_end()
    link, unconnected = steady_peer.link(end), end.link(b"n" * 16)
    end.close()
    end.close()
    assert link.failure == unconnected.failure == (KVN_CANCELLED, "its engine was closed")
    assert (
        steady_peer.run(
            "import select",
            "select.select([links[-1].death_fd], [], [], 20)",
            "result = links[-1].failure[1]",
        )
        == "the peer has closed the link: its engine was closed"
    )
    with pytest.raises(UcxError, match="this end of UCX is closed"):
        end.link(b"x" * 16)
    link.close()


def changed(address: bytes, at: int) -> bytes:
    return address[:at] + bytes([address[at] ^ 1]) + address[at + 1 :]


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (lambda it: b"", "peer_address is empty"),
        (lambda it: it[:16], "the peer's address has 16 bytes; it must have 17 to"),
        (lambda it: it[:-1], "is damaged, or not that of an end of UCX"),
        (lambda it: changed(it, 5), "is damaged"),
        (lambda it: changed(it, 40), "is damaged"),
    ],
)
def test_an_address_that_ucx_would_abort_for(
    of: Callable[[bytes], bytes], words: str, end: UcxEnd, token: bytes
) -> None:
    with pytest.raises(ValueError, match=words):
        end.link(token, of(end.address))
    end.link(token)  # the token is still free


def test_an_end_in_another_mode_is_refused(end: UcxEnd, token: bytes) -> None:
    with found():
        other = open_end("one_sided")
    with pytest.raises(UcxError, match="is in the mode one_sided and this one in gathered") as it:
        end.link(token, other.address)
    assert it.value.status == KVN_UNSUPPORTED
    other.close()


def test_arguments_of_a_link(end: UcxEnd, token: bytes) -> None:
    link = end.link(token)
    with pytest.raises(ValueError, match="there is a link with this token already"):
        end.link(token)
    with pytest.raises(ValueError, match="token has 3 bytes; it must have 16"):
        end.link(b"abc")
    with pytest.raises(ValueError, match="timeout_ms is 0; it must be > 0"):
        link.connect(0)
    with pytest.raises(TypeError, match=r"comes from UcxEnd\.link"):
        UcxNativeLink()
    link.close()
    end.link(token)


def test_ends_and_links_give_back_what_they_open(steady_peer: UcxPeer) -> None:
    def open_files() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    with found():
        open_end().close()  # what UCX opens once
        before = open_files()
        for _ in range(3):
            end = open_end()
            link = steady_peer.link(end)
            end.close()
            del link, end
            assert open_files() == before
