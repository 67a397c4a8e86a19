"""The socket that sends descriptors of device memory: its clients, also hostile ones."""

from __future__ import annotations

import array
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest

from kvplan.device.sharing import AllocationRef, Exported
from kvplan.transport.local import LocalTransport
from kvplan.transport.local.descriptors import MAX_BATCH, DescriptorServer, ask, refusal, token_of
from kvplan.transport.local.link import LocalLink
from kvplan.transport.local.metadata import Metadata
from tests.support import lone_user
from tests.support.few_descriptors import spare_descriptors
from tests.support.held import Held
from tests.transport.owner import Owner

TOKEN, OTHER_TOKEN = token_of(b"a link"), token_of(b"another link")


def export(number: int, fd: int) -> Exported:
    device: Any = SimpleNamespace()
    return Exported(AllocationRef("0" * 32, 4096, 8, number, fd, "", is_pool=False), device, None)


@pytest.fixture
def server() -> Iterator[DescriptorServer]:
    server = DescriptorServer()
    server.admit(TOKEN)
    yield server
    server.close()


@pytest.fixture
def exported(server: DescriptorServer) -> Iterator[Exported]:
    """An export whose descriptor is a file of eight bytes."""
    fd = os.memfd_create("device memory")
    os.write(fd, b"content!")
    exported = export(7, fd)
    server.add(exported)
    yield exported
    os.close(fd)


def asked(server: DescriptorServer, token: bytes = TOKEN, number: int = 7) -> int:
    [(fd, nbytes)] = ask(os.getpid(), server.name, token, number)
    assert nbytes == 8
    return fd


def client(server: DescriptorServer) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.connect(f"\0{server.name}")
    made.settimeout(10)
    return made


def check_nothing_is_left(server: DescriptorServer, before: Held) -> None:
    """Check that the server has closed all connections but silent ones."""
    with client(server) as last:
        last.send(b"no request")
        assert last.recv(1) + last.recv(1) == b"\0"  # the server answers requests in order
    before.check_nothing_new()


def check_works(server: DescriptorServer) -> None:
    fd = asked(server)
    try:
        assert os.pread(fd, 8, 0) == b"content!"
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_a_link_gets_the_descriptor_of_an_export(
    server: DescriptorServer, exported: Exported
) -> None:
    before = Held.now()
    assert refusal(os.getpid(), server.name) is None
    with spare_descriptors(0):
        found = refusal(os.getpid(), server.name)
    assert re.fullmatch(r"Too many open files: RLIMIT_NOFILE is \d+ \(ulimit -n\)", str(found))
    check_works(server)
    check_nothing_is_left(server, before)


def test_unknown_links_and_exports_get_no_descriptor(
    server: DescriptorServer, exported: Exported
) -> None:
    for token, number in ((OTHER_TOKEN, 7), (TOKEN, 8), (b"", 7), (TOKEN[:-1], 7)):
        with pytest.raises(PermissionError, match="does not send a descriptor"):
            asked(server, token, number)
    check_works(server)
    server.dismiss(TOKEN)
    with pytest.raises(PermissionError):
        asked(server)


def test_a_closed_link_gets_no_descriptor(server: DescriptorServer, exported: Exported) -> None:
    session = b"of a handshake"
    with LocalTransport() as owner:
        metadata = Metadata.from_bytes(owner.metadata())
        with LocalLink(metadata, populate="off", session=session, server=server):
            os.close(asked(server, token_of(session)))
        with pytest.raises(PermissionError):
            asked(server, token_of(session))
    check_works(server)


def test_a_collected_export_is_refused(server: DescriptorServer) -> None:
    gone = export(9, 0)
    server.add(gone)
    del gone
    with pytest.raises(PermissionError):
        asked(server, number=9)


INVALID_REQUESTS = [
    TOKEN,
    TOKEN + b"\0" * 15,
    TOKEN + b"\0" * 7 + b"\7" + b"\0" * 9,
    TOKEN + b"\0" * 7 + b"\7" + b"\xff" * 8,
    b"x" * 4096,
    b"\0",
]


@pytest.mark.parametrize("request_", INVALID_REQUESTS, ids=len)
def test_invalid_requests_are_refused(
    server: DescriptorServer, exported: Exported, request_: bytes
) -> None:
    """Truncated and long requests, and requests that carry descriptors."""
    before = Held.now()
    with client(server) as hostile:
        fds = array.array("i", [hostile.fileno()] * 200)
        hostile.sendmsg([request_], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        assert socket.recv_fds(hostile, 1, 1)[:2] == (b"\0", [])
    check_works(server)
    check_nothing_is_left(server, before)


NUM_PIECES = 600


def numbered(first: int, count: int) -> list[tuple[int, int]]:
    """Make files of different sizes that contain their numbers, as many as can be open."""
    if first >= NUM_PIECES:
        raise IndexError(f"first={first} is out of range [0, {NUM_PIECES})")
    made: list[tuple[int, int]] = []
    for number in range(first, min(first + count, NUM_PIECES)):
        try:
            fd = os.memfd_create("a piece")
        except OSError:
            if made:
                break
            raise
        os.write(fd, number.to_bytes(8, "big"))
        made.append((fd, 100 + number))
    return made


@pytest.fixture
def pieces(server: DescriptorServer) -> Exported:
    device: Any = SimpleNamespace()
    ref = AllocationRef("0" * 32, 4096, 8, 11, -1, "", is_pool=False)
    exported = Exported(ref, device, None, numbered)
    server.add(exported)
    return exported


def check_all(server: DescriptorServer) -> list[int]:
    """Take all pieces, closing each batch before the next, and return the sizes of the batches."""
    batches: list[int] = []
    index = 0
    while index < NUM_PIECES:
        batch = ask(os.getpid(), server.name, TOKEN, 11, index)
        for fd, nbytes in batch:
            assert os.pread(fd, 8, 0) == index.to_bytes(8, "big")
            assert nbytes == 100 + index
            assert not os.get_inheritable(fd)
            os.close(fd)
            index += 1
        batches.append(len(batch))
    return batches


def test_more_pieces_than_a_message_holds(server: DescriptorServer, pieces: Exported) -> None:
    before = Held.now()
    whole, rest = divmod(NUM_PIECES, MAX_BATCH)
    assert check_all(server) == [MAX_BATCH] * whole + [rest]
    with pytest.raises(PermissionError, match=r"first=600 is out of range \[0, 600\)"):
        ask(os.getpid(), server.name, TOKEN, 11, NUM_PIECES)
    check_nothing_is_left(server, before)


def test_many_connections_without_a_request(server: DescriptorServer, exported: Exported) -> None:
    """Silent connections do not delay others; the oldest are replaced, and all of them time out."""
    before = Held.now()
    with ExitStack() as stack:
        silent = [stack.enter_context(client(server)) for _ in range(200)]
        check_works(server)
        assert silent[0].recv(1) == b""
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
        silent[-1].settimeout(10)
        assert silent[-1].recv(1) == b""
        check_works(server)
    check_nothing_is_left(server, before)


def test_clients_that_read_no_answers_or_are_gone(
    server: DescriptorServer, exported: Exported
) -> None:
    before = Held.now()
    with ExitStack() as stack:
        for number in range(100):
            deaf = stack.enter_context(client(server))
            deaf.send(TOKEN + (7).to_bytes(8, "big") + bytes(8))
            if number % 2:
                deaf.close()
        check_works(server)
    check_nothing_is_left(server, before)


def test_another_process_with_the_name_of_the_socket_is_refused(exported: Exported) -> None:
    """A descriptor that another process sends is not taken for the peer's, and is closed."""
    with closing(Owner()) as squatter:
        name = squatter.run(
            """
            import threading
            from kvplan.device.sharing import AllocationRef, Exported
            from kvplan.transport.local.descriptors import DescriptorServer, token_of
            server = DescriptorServer()
            server.admit(token_of(b"a link"))
            export = Exported(AllocationRef("0" * 32, 4096, 8, 7, 0, "", False), None, None)
            server.add(export)
            result = server.name
            """
        )
        before = Held.now()
        with pytest.raises(PermissionError, match=f"belongs to process {squatter.pid}, not"):
            ask(os.getpid(), name, TOKEN, 7)
        before.check_nothing_new()
        [(fd, _)] = ask(squatter.pid, name, TOKEN, 7)
        os.close(fd)


def test_a_peer_that_accepts_nothing_does_not_delay_a_handshake() -> None:
    """The backlog of the peer is full, so that another connection would wait."""
    with ExitStack() as stack:
        hostile = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        hostile.bind("")
        hostile.listen(0)
        name = hostile.getsockname()[1:].decode()
        while True:
            filling = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(filling.close)
            filling.setblocking(False)
            try:
                filling.connect(f"\0{name}")
            except BlockingIOError:
                break
        begun = time.monotonic()
        for _ in range(100):
            assert refusal(os.getpid(), name) is None
        assert time.monotonic() - begun < 100, "each would wait for a second"


def test_the_thread_ends(exported: Exported) -> None:
    before = Held.now()
    server = DescriptorServer()
    assert before.new().threads == frozenset()
    server.admit(TOKEN)
    server.close()
    server.close()
    before.check_nothing_new()
    assert refusal(os.getpid(), server.name) == "Connection refused"


def test_a_link_that_finds_no_thread_is_not_admitted() -> None:
    program = """
        import os
        from kvplan import LLMException
        from kvplan.transport.local.descriptors import DescriptorServer, ask
        from tests.transport.test_descriptors import OTHER_TOKEN, TOKEN, export
        from tests.support.lone_user import allow_threads, become

        become()
        server = DescriptorServer()
        server.add(exported := export(7, os.memfd_create("device memory")))
        for token, room in ((TOKEN, 1), (OTHER_TOKEN, None)):
            allow_threads(room)
            try:
                server.admit(token)
            except LLMException as error:
                assert room == 1 and error.status_code.name == "LLM_OUT_OF_MEMORY", error
        assert len(ask(os.getpid(), server.name, OTHER_TOKEN, 7)) == 1
        try:
            ask(os.getpid(), server.name, TOKEN, 7)
        except PermissionError as error:
            assert "the link has ended" in str(error)
        else:
            raise AssertionError("the link was never made")
    """
    lone_user.run(program)


def test_a_link_that_finds_no_thread_leaves_nothing_open() -> None:
    program = """
        from kvplan import LLMException
        from kvplan.transport.local import LocalTransport
        from kvplan.transport.local.descriptors import DescriptorServer
        from kvplan.transport.local.link import LocalLink
        from kvplan.transport.local.metadata import Metadata
        from tests.support.held import Held
        from tests.support.lone_user import allow_threads, become

        become()
        server, owner = DescriptorServer(), LocalTransport()
        metadata = Metadata.from_bytes(owner.metadata())
        allow_threads(1)
        held = Held.now()
        try:
            LocalLink(metadata, populate="off", session=b"of the handshake", server=server)
        except LLMException as error:
            assert error.status_code.name == "LLM_OUT_OF_MEMORY", error
            held.check_nothing_new()  # while the error is held
        else:
            raise AssertionError("there was a thread")
    """
    lone_user.run(program)
