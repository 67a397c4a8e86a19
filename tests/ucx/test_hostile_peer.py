"""Peers that break the protocol: their link fails, and nothing else does."""

from __future__ import annotations

import itertools
import select
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvnative._executor import KVN_OK, KVN_PEER_GONE, Executor
from kvnative._lower import Descriptors
from kvnative._ucx import UcxEnd, UcxNativeLink
from kvnative._ucx_gathered import gathered_backend
from tests.ucx.hostile import (
    ASK,
    CANCEL,
    DATA,
    DONE,
    FINAL,
    LAST,
    PULL,
    PUSH,
    HostileEnd,
    HostileLink,
    build_all,
    cancel,
    data,
    done,
    piece,
    pull,
    push,
    range_of,
)
from tests.ucx.peer import TIMEOUT_MS, Bytes, UcxPeer, u64
from tests.ucx_library import found

SLOT, GENERATION = 4, 77
NBYTES = 1 << 20
OPEN_PUSHES = 64

_TOKENS = itertools.count(1000)

Meet = Callable[[], tuple[UcxNativeLink, HostileLink]]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileEnd]:
    with found():
        end = HostileEnd(build_all(tmp_path_factory.mktemp("hostile")))
    yield end
    end.close()


@pytest.fixture(scope="module")
def memory(end: UcxEnd) -> Iterator[Bytes]:
    """What the attacked end has registered: half of it, so that the rest must stay."""
    memory = np.full(2 * NBYTES, 0x11, dtype=np.uint8)
    end.add_range(SLOT, memory.ctypes.data, NBYTES, True, GENERATION)
    yield memory
    end.remove_range(SLOT)


@pytest.fixture
def meet(end: UcxEnd, hostile: HostileEnd) -> Meet:
    """Makes links of the two: of the attacked end, and the hostile one's."""

    def make() -> tuple[UcxNativeLink, HostileLink]:
        token = next(_TOKENS).to_bytes(16, "big")
        attacked = end.link(token, hostile.address)
        link = hostile.link(token, end.address)
        attacked.connect(TIMEOUT_MS)
        link.connect()
        return attacked, link

    return make


def wait_for_failure(link: UcxNativeLink) -> str:
    assert select.select([link.death_fd], [], [], TIMEOUT_MS / 1000)[0], "the link did not fail"
    assert link.failure is not None
    status, message = link.failure
    assert status == KVN_PEER_GONE
    return message


def own(memory: Bytes, offset: int = 0, nbytes: int = 8) -> bytes:
    """A piece of the memory, and the range that it lies in."""
    return piece(memory.ctypes.data + offset, nbytes) + range_of(SLOT, GENERATION)


BROKEN = {
    "no header": (PULL, b"", b""),
    "short header": (PULL, pull(1, 0, 1, 1)[:-1], piece(0, 8) + range_of(0, 1)),
    "long header": (PULL, pull(1, 0, 1, 1) + b"x", piece(0, 8) + range_of(0, 1)),
    "no pieces": (PULL, pull(1, 0, 0, 0), b""),
    "too many pieces": (PULL, pull(1, 0, 8193, 1), piece(0, 0) * 8193 + range_of(0, 1)),
    "too many ranges": (PULL, pull(1, 0, 1, 257), piece(0, 8) + range_of(0, 1) * 257),
    "impossible counts": (PULL, pull(1, 0, 2**32 - 1, 2**32 - 1), piece(0, 8)),
    "tables cut": (PULL, pull(1, 0, 2, 1), piece(0, 8) + range_of(0, 1)),
    "tables too long": (PULL, pull(1, 0, 1, 1), piece(0, 8) + range_of(0, 1) + b"x"),
    "a range of nothing": (PULL, pull(1, 0, 1, 1), piece(0, 8, 1) + range_of(0, 1)),
    "no range": (PULL, pull(1, 0, 1, 0), piece(0, 8)),
    "wraps": (PULL, pull(1, 0, 1, 1), piece(2**64 - 4, 8) + range_of(0, 1)),
    "index wraps": (PULL, pull(1, 0, 1, 1, first=2**64 - 1), piece(0, 8) + range_of(0, 1)),
    "too large": (PULL, pull(1, 0, 2, 1), piece(0, 2**32 - 1) * 2 + range_of(0, 1)),
    "push of nothing": (PUSH, push(1, 0, 0, 0, ASK | LAST), b""),
    "push cut": (PUSH, push(1, 0, 1, 1, ASK | LAST), piece(0, 8) + range_of(0, 1) + b"1234567"),
    "push too long": (PUSH, push(1, 0, 1, 1, ASK | LAST), piece(0, 8) + range_of(0, 1) + b"9" * 9),
    "push of flags": (PUSH, push(1, 0, 1, 1, LAST), piece(0, 8) + range_of(0, 1) + b"8" * 8),
    "push of a gap": (PUSH, push(1, 1, 1, 1, ASK), piece(0, 8) + range_of(0, 1) + b"8" * 8),
    "push of an unknown end": (
        PUSH,
        push(1, 7, 1, 1, ASK | LAST),
        piece(0, 8) + range_of(0, 1) + b"8" * 8,
    ),
    "flags of data": (DATA, data(1, 0, 0, 0, 8), b"x"),
    "short data": (DATA, data(1, 0, 0, 0)[:-4], b"x"),
    "more than data": (DATA, data(1, 0, 0, 0), b"x" * (225 << 10)),
    "done of flags": (DONE, done(1, 0, reason=99), b""),
    "done of something": (DONE, done(1, 0, of=2), b""),
    "done with more": (DONE, done(1, 0), b"x"),
    "cancel of something": (CANCEL, cancel(1, of=2), b""),
    "cancel cut": (CANCEL, cancel(1)[:-1], b""),
}


class TestWhatIsSentToWhoServes:
    @pytest.mark.parametrize("name", BROKEN)
    def test_what_is_not_allowed_ends_the_link(self, end: UcxEnd, meet: Meet, name: str) -> None:
        attacked, link = meet()
        before = end.counters["broken"]
        assert link.say(*BROKEN[name]) >= KVN_OK
        assert " that is not allowed: " in wait_for_failure(attacked)
        assert end.counters["broken"] == before + 1

    @given(data=st.data())
    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_noise(self, end: UcxEnd, memory: Bytes, meet: Meet, data: st.DataObject) -> None:
        """Headers and payloads of any bytes, or nearly right ones: memory stays what it was."""
        attacked, link = meet()
        small = st.integers(0, 3)
        number = st.one_of(small, st.sampled_from([2**31, 2**32 - 1]))
        table = st.lists(
            st.one_of(
                st.builds(piece, st.integers(0, 2**64 - 1), number, number),
                st.builds(lambda it: piece(memory.ctypes.data + it, 9), st.integers(-9, NBYTES)),
                st.builds(range_of, st.sampled_from([SLOT, 5, 2**32 - 1]), st.integers(0, 80)),
                st.binary(max_size=20),
            ),
            max_size=4,
        ).map(b"".join)
        header = st.one_of(
            st.binary(max_size=60),
            st.builds(pull, small, small, number, number),
            st.builds(push, small, small, small, small, small),
        )
        guard = memory[NBYTES:].copy()
        for _ in range(4):
            link.say(data.draw(st.sampled_from([PULL, PUSH])), data.draw(header), data.draw(table))
        # An answer, or the end of the link, shows that all of it was looked at.
        link.say(PUSH, push(9, 5, 1, 1), own(memory) + b"8" * 8)
        wait_for_failure(attacked)
        np.testing.assert_array_equal(memory[NBYTES:], guard)

    def test_asking_for_too_much_at_once(self, memory: Bytes, meet: Meet) -> None:
        attacked, link = meet()
        link.say(PULL, pull(1, 0, 4, 1), own(memory, 0, NBYTES)[:16] * 4 + own(memory)[16:], 500)
        assert wait_for_failure(attacked).endswith(
            ("that are not answered yet", "it does not take the answers to those before")
        )

    def test_too_many_pushes_begun(self, memory: Bytes, meet: Meet) -> None:
        attacked, link = meet()
        for request in range(OPEN_PUSHES + 1):
            link.say(PUSH, push(request, 0, 1, 1), own(memory) + b"8" * 8)
        assert wait_for_failure(attacked).endswith(
            "there are too many requests that are not through"
        )

    def test_another_token(self, end: UcxEnd, memory: Bytes, meet: Meet) -> None:
        """A stranger, who knows addresses, slots and generations, gets and writes nothing."""
        attacked, link = meet()
        before, content = end.counters["unknown_tokens"], memory.copy()
        stranger = b"?" * 16
        link.say_raw(PUSH, stranger + push(1, 0, 1, 1, ASK | LAST), own(memory) + b"8" * 8)
        link.say_raw(PULL, stranger + pull(1, 0, 1, 1), own(memory))
        link.say(PUSH, push(1, 1, 1, 1), own(memory) + b"8" * 8)  # ends the link, after those
        wait_for_failure(attacked)
        assert end.counters["unknown_tokens"] == before + 2
        np.testing.assert_array_equal(memory, content)

    def test_other_links_go_on(
        self, steady_peer: UcxPeer, steady_link: UcxNativeLink, local: Bytes, meet: Meet
    ) -> None:
        attacked, link = meet()
        with Executor(steady_peer.backend(steady_link, "get")) as executor:
            task = executor.submit(steady_peer.descriptors("get", local, [(0, 0, 8 << 20)]))
            link.say(*BROKEN["impossible counts"])
            assert task.wait(TIMEOUT_MS).status == KVN_OK
        wait_for_failure(attacked)
        np.testing.assert_array_equal(local[: 8 << 20], steady_peer.memory[: 8 << 20])


LIES = {
    "longer than asked for": [(DATA, data(1 << 32, 0, 0, 0), b"x" * 4097)],
    "beyond the last piece": [(DATA, data(1 << 32, 0, 2, 0), b"x")],
    "beyond its piece": [(DATA, data(1 << 32, 0, 1, 3000), b"x")],
    "across the end": [(DATA, data(1 << 32, 0, 1, 2000), b"x" * 49)],
    "a skip out of all bounds": [(DATA, data(1 << 32, 0, 0, 2**32 - 1), b"x")],
    "another part": [(DATA, data(1 << 32, 1, 0, 0), b"x")],
    "a part that wraps around": [(DATA, data(1 << 32, 8, 0, 0), b"x")],
    "done before it came": [(DONE, done(1 << 32, 0), b"")],
    "final before it came": [(DATA, data(1 << 32, 0, 0, 0, FINAL), b"x")],
    "more than once": [
        (DATA, data(1 << 32, 0, 0, 0), b"x" * 4096),
        (DATA, data(1 << 32, 0, 0, 0), b"x"),
    ],
}


class TestWhatIsSentToWhoAsks:
    @pytest.mark.parametrize("name", LIES)
    def test_a_lie_ends_the_link(self, hostile: HostileEnd, meet: Meet, name: str) -> None:
        """The first request of a link has the number 1 << 32; it asks for two pieces of 2048."""
        attacked, link = meet()
        local = np.zeros(3 * 2048, dtype=np.uint8)
        backend = gathered_backend(attacked, "get", u64(0), u64(1), u64(1 << 20), u64(1 << 20))
        here = u64(local.ctypes.data, local.ctypes.data + 4096)
        with Executor(backend) as executor:
            task = executor.submit(
                Descriptors.from_columns(here, u64(1 << 20, (1 << 20) + 2048), u64(2048, 2048))
            )
            for lie in LIES[name]:
                link.say(*lie)
            report = task.wait(TIMEOUT_MS)
        assert report.status == KVN_PEER_GONE
        assert report.unconfirmed == ((0, 2),)
        assert " that is not allowed: " in report.message
        assert (local[2048:4096] == 0).all()

    def test_what_nobody_asked_for_is_dropped(self, meet: Meet) -> None:
        attacked, link = meet()
        for message, header in [
            (DATA, data(5, 0, 0, 0)),
            (DATA, data(2**64 - 1, 0, 0, 0)),
            (DONE, done(5, 0)),
            (DONE, done(7 << 32, 0, of=1)),
            (CANCEL, cancel(3)),
        ]:
            link.say(message, header)
        link.say(*BROKEN["cancel cut"])
        assert "CANCEL" in wait_for_failure(attacked)

    def test_confirming_what_was_not_pushed(self, meet: Meet) -> None:
        attacked, link = meet()
        local = np.zeros(2048, dtype=np.uint8)
        backend = gathered_backend(attacked, "put", u64(0), u64(1), u64(1 << 20), u64(1 << 20))
        with Executor(backend) as executor:
            task = executor.submit(
                Descriptors.from_columns(u64(1 << 20), u64(local.ctypes.data), u64(2048))
            )
            link.say(DONE, done(1 << 32, 2, of=1))
            report = task.wait(TIMEOUT_MS)
        assert report.status == KVN_PEER_GONE
        assert report.message.endswith("nobody asked for it")
