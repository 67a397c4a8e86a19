"""Links over TCP begin and end: in one process, over real sockets."""

from __future__ import annotations

import errno
import gc
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from weakref import ref

import numpy as np
import pytest

from kvplan.status import LLMException, LLMStatusCode, link_failed
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.tcp.metadata import Metadata
from kvplan.transport.tcp.transport import TcpTransport, connections_of
from tests.support.held import Held
from tests.support.refusals import refused
from tests.transport.tcp.peer import linked
from tests.transport.tcp.streams import Accepted, Dialled

FILES = Path("/proc/self/fd")
PEER = Metadata("0" * 32, "node7", 7, 2, False).to_bytes()
Ends = tuple[TcpTransport, TcpTransport]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with TcpTransport(connections=2) as one, TcpTransport(connections=3) as two:
        yield one, two


def test_both_ends_are_linked_until_one_closes(ends: Ends) -> None:
    links = linked(*ends)
    for link in links:
        link.check()
        assert re.fullmatch(r"127\.0\.0\.1\S* \S+ 127\.0\.0\.1\S*, 2 connections", link.way)
    links[0].close()
    links[0].close()
    with refused(LLMStatusCode.LLM_NOT_YET_LINK, "is closed"):
        links[0].check()
    assert links[0].death_fd is None
    assert links[1].death_fd is not None
    assert select.select([links[1].death_fd], [], [], 10)[0]
    with refused(LLMStatusCode.LLM_LINK_FAILED):
        links[1].check()


def test_a_link_does_not_hold_the_streams_that_opened_its_connections(ends: Ends) -> None:
    opened: list[ref[Dialled]] = []

    def dialled(port: int) -> Dialled:
        streams = Dialled(port)
        opened.append(ref(streams))
        return streams

    links = linked(*ends, dialled)
    gc.collect()
    assert opened[0]() is None
    links[0].check()


def test_users_of_a_closed_link_get_the_reason_it_was_closed_with(ends: Ends) -> None:
    link, _ = linked(*ends)
    memory = np.zeros(8, np.uint8)
    ends[1].register(memory)
    there = link.memory([memory.ctypes.data], 8, metadata=ends[1].metadata())
    link.close(LLMException("unlinked", status_code=LLMStatusCode.LLM_NOT_YET_LINK))
    link.close()
    for use in (link.check, there.check, lambda: link.memory([1], 1)):
        with refused(LLMStatusCode.LLM_NOT_YET_LINK, r"^unlinked"):
            use()


def test_closing_a_transport_closes_its_links(ends: Ends) -> None:
    link, other = linked(*ends)
    ends[0].close()
    with pytest.raises(LLMException, match="the transport is closed"):
        link.check()
    assert link.death_fd is None
    assert other.death_fd is not None
    assert select.select([other.death_fd], [], [], 10)[0]


def test_a_closed_link_leaves_nothing_open(ends: Ends) -> None:
    """A closed link keeps no thread or file, even while it is referenced."""
    linked(*ends)[0].close()  # the threads of both ends, and their event files
    before, kept = Held.now(), []
    for _ in range(3):
        kept += linked(*ends)
        sockets, tells_of_death = 2 * 2, 1
        assert len(before.new().descriptors) == 2 * (sockets + tells_of_death)
        before.check_new_are_not_inherited()
        for link in kept:
            link.close()
    before.check_nothing_new()


def test_threads_begin_with_the_first_link_and_end_with_the_transport() -> None:
    before = Held.now()
    with TcpTransport(connections=2) as one, TcpTransport(connections=3) as two:
        one.register(np.zeros(8, np.uint8))
        before.check_nothing_new()
        links = linked(one, two)
        before.check_new_threads({"kvplan"})
        assert len(links) == 2  # keeps the links until here
    before.check_nothing_new()


@pytest.mark.parametrize(
    ("cores", "number"), [(1, 1), (3, 1), (4, 2), (7, 2), (8, 4), (15, 4), (16, 8), (192, 8)]
)
def test_connections_by_cores(cores: int, number: int) -> None:
    assert connections_of(cores) == number


def test_arguments_out_of_range_are_refused() -> None:
    for number in (0, 17):
        with pytest.raises(LLMException, match=rf"connections={number} is out of range \[1, 16\]"):
            TcpTransport(connections=number)
    with pytest.raises(LLMException, match=r"max_registrations=0 .*\[1, 65536\]"):
        TcpTransport(max_registrations=0)
    with refused(
        LLMStatusCode.LLM_FEATURE_NOT_ENABLED, r"congestion='none7' .*must be one of .*reno"
    ):
        TcpTransport(congestion="none7")
    for us in (-1, 10_001):
        with pytest.raises(LLMException, match=rf"busy_poll_us={us} .*\[0, 10000\]"):
            TcpTransport(busy_poll_us=us)


def test_congestion_control_is_set_on_every_connection(ends: Ends) -> None:
    """The other end has the congestion control of the system."""
    with TcpTransport(connections=2, congestion="reno") as one:
        before = set(FILES.iterdir())
        links = linked(one, ends[1])
        new = [path for path in set(FILES.iterdir()) - before if path.is_socket()]
        found = sorted(congestion for item in new if (congestion := congestion_of(item)))
        assert len(links) == 2  # keeps the links until here
    usual = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    assert found == sorted(["reno"] * 4 + [usual] * 4)


@pytest.mark.skipif(os.getuid() != 0, reason="some kernels require CAP_NET_ADMIN")
def test_busy_polling_is_set_on_every_connection_of_one_end(ends: Ends) -> None:
    with TcpTransport(connections=2, busy_poll_us=50) as one:
        before = set(FILES.iterdir())
        links = linked(one, ends[1])
        new = [path for path in set(FILES.iterdir()) - before if path.is_socket()]
        found = [busy_poll_of(item) for item in new if congestion_of(item)]
        assert len(links) == 2  # keeps the links until here
    assert sorted(found) == [0] * 4 + [50] * 4


def test_busy_polling_that_the_kernel_forbids_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidding(socket.socket):
        def setsockopt(self, *_option: object) -> None:
            raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(socket, "socket", Forbidding)
    TcpTransport(busy_poll_us=0).close()
    with refused(
        LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "busy_poll_us=50 .*: not permitted; .*CAP_NET_ADMIN"
    ):
        TcpTransport(busy_poll_us=50)


@pytest.mark.parametrize("refuses", range(4))
def test_if_one_connection_refuses_congestion_control_all_are_closed(refuses: int) -> None:
    class Mixed(Dialled):
        """A stream one of whose sockets is UDP, which has no congestion control."""

        def open(self, indices: Sequence[int], timeout_s: float) -> list[socket.socket]:
            kinds = [
                socket.SOCK_DGRAM if index == refuses else socket.SOCK_STREAM for index in indices
            ]
            self.opened = [socket.socket(socket.AF_INET, kind) for kind in kinds]
            return self.opened

    streams = Mixed(1)
    with TcpTransport(connections=2, congestion="reno") as transport:
        with refused(LLMStatusCode.LLM_LINK_FAILED, "cannot be reached over tcp"):
            transport.connect(PEER, timeout_ms=20_000, streams=streams)
        assert [index.fileno() for index in streams.opened] == [-1] * 4


def congestion_of(file: Path) -> str:
    with socket.socket(fileno=os.dup(int(file.name))) as connection:
        if connection.family != socket.AF_INET:
            return ""
        name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        return name.rstrip(b"\0").decode()


def busy_poll_of(file: Path) -> int:
    with socket.socket(fileno=os.dup(int(file.name))) as connection:
        return connection.getsockopt(socket.SOL_SOCKET, 46)  # SO_BUSY_POLL, asm-generic/socket.h


def test_a_link_without_streams_is_refused(ends: Ends) -> None:
    with refused(LLMStatusCode.LLM_LINK_FAILED, r"process 7 of node7 .* over tcp: streams=None"):
        ends[0].connect(PEER, timeout_ms=1000)


def test_an_unreachable_peer_is_named(ends: Ends) -> None:
    one, two = ends
    assert one.refusal(two.metadata(())) is None
    assert "is this transport itself" in str(one.refusal(one.metadata(())))
    assert "cannot be decoded" in str(one.refusal(b"\x81"))
    with pytest.raises(LLMException, match="is this transport itself"):
        one.connect(one.metadata(()), timeout_ms=1000, streams=Dialled(1))


class Failing(Dialled):
    """A peer whose connections cannot be opened."""

    def open(self, indices: Sequence[int], timeout_s: float) -> list[socket.socket]:
        raise link_failed("no route")


def test_a_link_without_connections_leaves_nothing_open(ends: Ends) -> None:
    for thread in linked(*ends):  # the threads, and their event files
        thread.close()
    before = Held.now()
    with refused(LLMStatusCode.LLM_LINK_FAILED, "no route"):
        ends[0].connect(PEER, timeout_ms=20_000, streams=Failing(1))
    before.check_nothing_new()


def test_a_refused_link_does_not_hold_its_streams(ends: Ends) -> None:
    streams = Failing(1)
    opened = ref(streams)
    with refused(LLMStatusCode.LLM_LINK_FAILED, "no route"):
        ends[0].connect(PEER, timeout_ms=20_000, streams=streams)
    del streams
    gc.collect()
    assert opened() is None


def test_a_transport_that_is_closed_during_a_connect_starts_no_thread() -> None:
    transport = TcpTransport(encrypt=True)

    class Closing(Dialled):
        """Streams that are asked for their secret when another thread has closed the transport."""

        @property
        def private(self) -> bool:  # type: ignore[override]
            transport.close()
            return True

    before = Held.now()
    with refused(LLMStatusCode.LLM_FAILED, "the transport is closed"):
        transport.connect(PEER, timeout_ms=20_000, streams=Closing(1))
    before.check_nothing_new()


def test_a_connect_to_a_peer_that_never_comes_times_out(ends: Ends) -> None:
    for thread in linked(*ends):  # the threads, and their event files
        thread.close()
    before, began = Held.now(), time.monotonic()
    with closing(Accepted()) as listening:
        Dialled(listening.port).open_one(2, 1).close()  # one of four
        with refused(LLMStatusCode.LLM_LINK_FAILED, "has not come: timed out"):
            ends[0].connect(PEER, timeout_ms=100, streams=listening)
    assert 0.1 <= time.monotonic() - began < 10
    before.check_nothing_new()


def test_closing_a_transport_ends_pending_connects() -> None:
    transport, listening = TcpTransport(connections=2), Accepted()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(transport.connect, PEER, timeout_ms=60_000, streams=listening)
        Dialled(listening.port).open_one(0, 10).close()  # a connection for the pending connect
        while listening.accepted < 1:
            pass
        transport.close()
        with pytest.raises(LLMException, match="has not come: it was closed"):
            call.result(10)
    with pytest.raises(LLMException, match="the transport is closed"):
        transport.connect(PEER, timeout_ms=1000, streams=listening)


def test_the_number_of_registrations_is_limited() -> None:
    memory = np.zeros(8, np.uint8)
    with TcpTransport(max_registrations=2) as transport:
        first = transport.register(memory)
        transport.register(memory)
        with refused(LLMStatusCode.LLM_OUT_OF_MEMORY, "all 2 registrations are taken"):
            transport.register(memory)
        transport.deregister(first)
        transport.deregister(first)
        with pytest.raises(
            LLMException, match="is not registered with this transport, or has ended"
        ):
            transport.metadata([first])
        again = transport.register(memory)
        assert again.range.slot == first.range.slot
        assert again.range.generation != first.range.generation


@pytest.mark.parametrize("linked_before", [False, True])
def test_memory_is_held_as_long_as_it_is_registered(linked_before: bool) -> None:
    """The owner may resize memory that is deregistered or refused, or whose transport is closed."""
    memory, other = bytearray(8), bytearray(8)
    with TcpTransport(max_registrations=1) as transport, TcpTransport() as peer:
        if linked_before:
            linked(transport, peer)
        kept = [transport.register(memory)]
        with pytest.raises(BufferError):
            memory.append(1)
        with refused(LLMStatusCode.LLM_OUT_OF_MEMORY, "all 1 registrations are taken"):
            transport.register(other)
        other.append(1)
        transport.deregister(kept[0])
        memory.append(1)
        kept.append(transport.register(memory))
    memory.append(1)
    assert len(kept) == 2


def test_memory_of_a_device_is_refused(ends: Ends) -> None:
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, r"is on a device.*Placement.HOST"):
        ends[0].register(DeviceRange(4096, 4096))
    assert ends[0].reaches == {"host"}


def test_metadata_of_another_transport_is_refused(ends: Ends) -> None:
    link, _ = linked(*ends)
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "this link is to another"):
        link.memory([4096], 8, metadata=PEER)


def test_a_forked_child_leaves_all_to_its_parent(ends: Ends) -> None:
    one, two = ends
    link, other = linked(one, two)
    if (child := os.fork()) == 0:
        status = 1
        try:
            for use in (link.check, one.metadata, lambda: one.refusal(PEER)):
                with pytest.raises(LLMException, match="forked child"):
                    use()
            link.close()
            one.close()
            with TcpTransport(connections=1) as own, TcpTransport(connections=1) as peer:
                for thread in linked(own, peer):
                    thread.check()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    link.check()
    other.check()


def test_a_transport_is_closed_while_other_threads_use_it() -> None:
    """Every call ends with the same error, at both ends."""

    def churn(transport: TcpTransport) -> None:
        while True:
            transport.deregister(transport.register(np.zeros(64, np.uint8)))

    def link(one: TcpTransport, two: TcpTransport) -> None:
        while True:
            for thread in linked(one, two):
                thread.check()

    for _ in range(10):
        with TcpTransport(connections=2) as one, TcpTransport(connections=2) as two:
            linked(one, two)
            with ThreadPoolExecutor(4) as threads:
                churning = [threads.submit(churn, end) for end in (one, one, two)]
                linking = threads.submit(link, one, two)
                one.close()
                two.close()
                ended = [future.exception(20) for future in (*churning, linking)]
            for error in ended:
                assert isinstance(error, LLMException), error


WITHOUT_LIBCRYPTO = """
import sys
from kvplan.status import LLMException
from kvplan.transport.tcp.metadata import Metadata
from kvplan.transport.tcp.transport import TcpTransport

peer = Metadata("0" * 32, "node7", 7, 2, True).to_bytes()
with TcpTransport() as transport:
    for call in (lambda: TcpTransport(encrypt=True), lambda: transport.num_streams(peer)):
        try:
            call()
        except LLMException as error:
            print(error)
"""


def test_without_libcrypto_encryption_is_refused_before_a_link(tmp_path: Path) -> None:
    """This end refuses when its transport is made, and on behalf of the peer by its metadata."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    empty = ["cc", "-shared", "-x", "c", "/dev/null", "-o", tmp_path / "libcrypto.so.3"]
    subprocess.run(empty, check=True)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBCRYPTO],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    lacks = r"the libcrypto that was found lacks EVP_\w+ \(LLM_FEATURE_NOT_ENABLED\)"
    assert re.fullmatch(
        rf"encrypt=True: {lacks}\n.*node7.* requires encryption: {lacks}\n", done.stdout
    ), done.stdout
