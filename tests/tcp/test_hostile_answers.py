"""Peers with forbidden answers: the link fails, and memory outside of the request stays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvnative._backend import KVN_OK, KVN_PEER_GONE, KVN_UNMAPPED
from kvnative._executor import Executor
from kvnative._task import Task
from kvnative._tcp import TcpService
from tests.tcp.frames import DEREGISTERED, OUTSIDE, READ_ONLY, UNMAPPED, Attacked, answer, attack
from tests.tcp.peer import SECRET, TIMEOUT_MS, Bytes, Span, backend_of, descriptors

THERE, THERE_NBYTES = 1 << 30, 64 << 20  # of the peer, but never accessed
SIZE = 4096
SPANS: list[Span] = [(SIZE, 0, 1000), (3 * SIZE, 5000, 3096)]
GUARD = 0xA5


@pytest.fixture(scope="module")
def asker() -> Iterator[TcpService]:
    service = TcpService(1, max_ranges=1)
    yield service
    service.close()


@pytest.fixture(params=[None, SECRET], ids=["plain", "encrypted"])
def attacked(asker: TcpService, request: pytest.FixtureRequest) -> Iterator[Attacked]:
    attacker = attack(asker, secret=request.param)
    yield attacker
    attacker.close()


@pytest.fixture
def local() -> Bytes:
    """Memory of which a pull of SPANS may write two pieces."""
    return np.full(5 * SIZE, GUARD, dtype=np.uint8)


def submit(
    attacked: Attacked, direction: str, local: Bytes, spans: list[Span]
) -> tuple[Executor, Task]:
    executor = Executor(backend_of(attacked.link, direction, THERE, THERE_NBYTES))
    return executor, executor.submit(
        descriptors(direction, local.ctypes.data, THERE, spans), keep=local
    )


def check_guards(local: Bytes) -> None:
    outside = np.ones(local.size, dtype=bool)
    for mine, _, nbytes in SPANS:
        outside[mine:][:nbytes] = False
    assert (local[outside] == GUARD).all()


NO_ANSWER = "the peer sent an answer that does not match a request"
MORE = "the peer sent more bytes than were requested"
CLOSED = "the peer has closed the connection"

# To a pull of SPANS, whose request has number `n`.
LIES: dict[str, tuple[Callable[[int], bytes], str]] = {
    "another number": (lambda n: answer(n + 1), NO_ANSWER),
    "a number from nowhere": (lambda n: answer(2**64 - 1), NO_ANSWER),
    "reserved": (lambda n: answer(n, reserved=1), NO_ANSWER),
    "the reason of a lease": (lambda n: answer(n, 6), NO_ANSWER),  # no lease was used
    "no such reason": (lambda n: answer(n, 7), NO_ANSWER),
    "no reason at all": (lambda n: answer(n, 2**32 - 1), NO_ANSWER),
    "an offset behind the end": (lambda n: answer(n, OUTSIDE, SIZE), NO_ANSWER),
    "an offset far away": (lambda n: answer(n, DEREGISTERED, 2**64 - 1), NO_ANSWER),
    "bytes of a refusal": (lambda n: answer(n, DEREGISTERED) + b"x", MORE),
    "all bytes of a refusal": (lambda n: answer(n, UNMAPPED, 10) + bytes(SIZE + 24), MORE),
    "bytes and no second answer": (lambda n: answer(n) + b"\xff" * (SIZE + 24), NO_ANSWER),
    "a second answer of another": (lambda n: answer(n) + bytes(SIZE) + answer(n + 1), NO_ANSWER),
    "a second answer of no reason": (lambda n: answer(n) + bytes(SIZE) + answer(n, 9), NO_ANSWER),
    "a second answer far away": (
        lambda n: answer(n) + bytes(SIZE) + answer(n, UNMAPPED, SIZE),
        NO_ANSWER,
    ),
    "a second answer too early": (lambda n: answer(n) * 2 + b"\xff" * SIZE, NO_ANSWER),
    "noise": (lambda n: b"\xff" * 5000, NO_ANSWER),
    "text": (lambda n: b"HTTP/1.1 400 Bad Request\r\n\r\n", NO_ANSWER),
    "nothing": (lambda n: b"", CLOSED),
    "half an answer": (lambda n: answer(n)[:12], CLOSED),
    "half of the bytes": (lambda n: answer(n) + bytes(2000), CLOSED),
    "half a second answer": (lambda n: answer(n) + bytes(SIZE) + answer(n)[:23], CLOSED),
}


class TestToAPull:
    @pytest.mark.parametrize("name", LIES)
    @pytest.mark.parametrize("how", ["at once", "byte by byte"])
    def test_a_lie_ends_the_link(
        self, attacked: Attacked, local: Bytes, name: str, how: str
    ) -> None:
        lie, words = LIES[name]
        executor, task = submit(attacked, "get", local, SPANS)
        number, nbytes, _ = attacked.answers.read_request()
        assert nbytes == SIZE
        data = lie(number)
        if how == "byte by byte" and len(data) < 100:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # already failed
                for byte in data:
                    attacked.answers.send(bytes([byte]))
        else:
            attacked.answers.send(data)
        attacked.answers.finish()
        report = task.wait(TIMEOUT_MS)
        if words == MORE:  # than a refusal, which has ended the transfer
            assert report.status == KVN_UNMAPPED
            assert attacked.wait_for_failure() in (MORE, CLOSED)
        else:
            assert report.status == KVN_PEER_GONE
            assert report.message == words
            assert report.unconfirmed == ((0, 2),)
            assert attacked.wait_for_failure() == words
        check_guards(local)
        # The failure stays.
        assert executor.run(descriptors("get", 0, 0, [])).status in (KVN_OK, KVN_PEER_GONE)

    def test_surplus_bytes_do_not_answer_the_next_request(
        self, attacked: Attacked, local: Bytes
    ) -> None:
        executor, task = submit(attacked, "get", local, SPANS)
        number, nbytes, _ = attacked.answers.read_request()
        attacked.answers.send(answer(number) + bytes(nbytes) + answer(number) + b"more")
        assert task.wait(TIMEOUT_MS).status == KVN_OK
        task = executor.submit(descriptors("get", local.ctypes.data, THERE, SPANS[:1]))
        attacked.answers.send(b"!" * 20)
        report = task.wait(TIMEOUT_MS)
        assert (report.status, report.message) == (KVN_PEER_GONE, NO_ANSWER)
        check_guards(local)

    def test_an_answer_may_arrive_byte_by_byte(self, attacked: Attacked, local: Bytes) -> None:
        _executor, task = submit(attacked, "get", local, SPANS)
        number, _, _ = attacked.answers.read_request()
        content = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
        for byte in answer(number) + content.tobytes() + answer(number):
            attacked.answers.send(bytes([byte]))
        assert task.wait(TIMEOUT_MS).status == KVN_OK
        came = [local[mine:][:nbytes] for mine, _, nbytes in SPANS]
        assert np.array_equal(np.concatenate(came), content)
        check_guards(local)

    @pytest.mark.parametrize("reason", [DEREGISTERED, OUTSIDE, READ_ONLY, UNMAPPED])
    @pytest.mark.parametrize("second", [False, True])
    @pytest.mark.parametrize(("offset", "descriptor"), [(0, 0), (999, 0), (1000, 1), (4095, 1)])
    def test_a_refusal_names_the_descriptor(
        self,
        attacked: Attacked,
        local: Bytes,
        reason: int,
        second: bool,
        offset: int,
        descriptor: int,
    ) -> None:
        """An impossible offset counts as the last descriptor, and the link continues."""
        executor, task = submit(attacked, "get", local, SPANS)
        number, nbytes, _ = attacked.answers.read_request()
        if second:
            attacked.answers.send(answer(number) + bytes(nbytes))
        attacked.answers.send(answer(number, reason, offset))
        report = task.wait(TIMEOUT_MS)
        assert (report.status, report.failed) == (KVN_UNMAPPED, descriptor)
        assert report.message.startswith(f"descriptor {descriptor}: ")
        assert report.unconfirmed == ((0, 2),)
        check_guards(local)
        task = executor.submit(descriptors("get", local.ctypes.data, THERE, SPANS))
        number, nbytes, _ = attacked.answers.read_request()
        attacked.answers.send(answer(number) + bytes(nbytes) + answer(number))
        assert task.wait(TIMEOUT_MS).status == KVN_OK

    def test_answers_in_another_order(self, attacked: Attacked, local: Bytes) -> None:
        """Two requests are on the wire, and the peer answers the second one first."""
        executor, first = submit(attacked, "get", local, SPANS[:1])
        second = executor.submit(descriptors("get", local.ctypes.data, THERE, SPANS[1:]))
        attacked.answers.read_request()
        number, nbytes, _ = attacked.answers.read_request()
        attacked.answers.send(answer(number) + bytes(nbytes) + answer(number))
        reports = [task.wait(TIMEOUT_MS) for task in (first, second)]
        assert [report.message for report in reports] == [NO_ANSWER] * 2
        check_guards(local)

    @given(data=st.data())
    @settings(
        max_examples=4 * settings().max_examples,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    def test_noise(self, asker: TcpService, data: st.DataObject) -> None:
        """Valid answers with changed, missing or cut bytes lead to an outcome, and no damage."""
        with closing(attack(asker)) as opened:
            local = np.full(5 * SIZE, GUARD, dtype=np.uint8)
            _executor, task = submit(opened, "get", local, SPANS)
            number, nbytes, _ = opened.answers.read_request()
            frame = bytearray(answer(number) + bytes(nbytes) + answer(number) + bytes(30))
            places = st.one_of(st.integers(0, 24), st.integers(24 + SIZE, 48 + SIZE))
            for at, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=4)):
                frame[at] = byte
            cut = data.draw(st.integers(0, len(frame)))
            opened.answers.send(bytes(frame[:cut]))
            opened.answers.finish()
            report = task.wait(TIMEOUT_MS)
            assert report.status in (KVN_OK, KVN_PEER_GONE, KVN_UNMAPPED)
            assert (report.status == KVN_OK) == (report.unconfirmed == ())
            check_guards(local)


class TestToAPush:
    @pytest.mark.parametrize("reason", [0, DEREGISTERED])
    def test_before_its_bytes_were_sent(self, asker: TcpService, reason: int) -> None:
        """After the outcome, no byte of this memory is sent."""
        local = np.full(1 << 20, 0x11, dtype=np.uint8)
        with closing(attack(asker, room=1 << 16)) as opened:
            _executor, task = submit(opened, "put", local, [(0, 0, local.nbytes)])
            number, _, _ = opened.answers.read_request()
            opened.answers.send(answer(number, reason))
            report = task.wait(TIMEOUT_MS)
            local[:] = 0x5A  # the caller's again
            came = np.frombuffer(opened.answers.read(local.nbytes), dtype=np.uint8)
        assert not (came == 0x5A).any()
        assert (report.status, report.message) == (KVN_PEER_GONE, NO_ANSWER)
        assert report.unconfirmed == ((0, 1),)

    def test_an_answer_without_a_request(self, attacked: Attacked, local: Bytes) -> None:
        """A second answer to a push does not answer the next push."""
        executor, task = submit(attacked, "put", local, SPANS)
        number, nbytes, _ = attacked.answers.read_request()
        attacked.answers.read(nbytes)
        attacked.answers.send(answer(number) * 2)
        assert task.wait(TIMEOUT_MS).status == KVN_OK
        report = executor.run(descriptors("put", local.ctypes.data, THERE, SPANS), TIMEOUT_MS)
        assert (report.status, report.message) == (KVN_PEER_GONE, NO_ANSWER)

    @pytest.mark.parametrize(("offset", "descriptor"), [(0, 0), (999, 0), (1000, 1), (4095, 1)])
    def test_a_refusal_names_the_descriptor(
        self, attacked: Attacked, local: Bytes, offset: int, descriptor: int
    ) -> None:
        _executor, task = submit(attacked, "put", local, SPANS)
        number, nbytes, _ = attacked.answers.read_request()
        attacked.answers.read(nbytes)
        attacked.answers.send(answer(number, READ_ONLY, offset))
        report = task.wait(TIMEOUT_MS)
        assert (report.status, report.failed) == (KVN_UNMAPPED, descriptor)
        assert report.bytes_done == 0
        assert attacked.link.failure is None

    def test_a_reset_ends_the_transfer(self, attacked: Attacked, local: Bytes) -> None:
        _executor, task = submit(attacked, "put", local, SPANS)
        attacked.answers.read_request()
        attacked.answers.reset()
        report = task.wait(TIMEOUT_MS)
        assert report.status == KVN_PEER_GONE
        assert report.message
