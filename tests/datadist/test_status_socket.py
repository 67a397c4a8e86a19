"""The status of engines, which only programs of the same user can read."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from textwrap import dedent
from threading import Event, Semaphore
from typing import Any

import numpy as np
import pytest

from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    ClusterInfo,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    LlmRole,
    Rows,
    Transfer,
)
from kvplan.control.loop import ControlLoop
from kvplan.control.status_socket import StatusSocket, _read, read_all
from tests.datadist.peer import Peer
from tests.support import lone_user
from tests.support.peer import DEADLINE_S

DESC = CacheDesc(2, (16, 4, 2, 8), DataType.DT_FLOAT16)
SLOT = CacheDesc(1, (1, 64), DataType.DT_UINT8)
NOBODY = 65534


def statuses_of(pid: int, cluster_id: int) -> list[dict[str, Any]]:
    """Return the documents of a process's engines of one cluster, and wait for them."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        answers = [
            record for record in read_all() if record.pid == pid
        ]  # processes of other tests may be stopped
        documents = [answer.document for answer in answers if answer.document is not None]
        if len(documents) == len(answers):
            return [document for document in documents if document["cluster_id"] == cluster_id]
        assert time.monotonic() < deadline, answers


def test_another_process_can_read_the_status() -> None:
    with closing(Peer()) as peer, LlmDataDist(2, LlmRole.DECODER) as engine:
        engine.initialize()
        peer.run(
            "theirs = datadist.allocate_blocks_cache(desc, BlocksCacheKey(1));"
            "held = datadist.lease_blocks(theirs, [1, 2])",
            desc=DESC,
        )
        engine.link_clusters([ClusterInfo(1, peer.address)]).raise_for_status()
        mine = engine.allocate_blocks_cache(DESC)
        engine.register_cache(SLOT, [np.zeros(SLOT.tensor_nbytes, np.uint8)])
        engine.pull_blocks(BlocksCacheKey(1), mine, [1, 2], [3, 4])
        (theirs,) = statuses_of(peer.process.pid, 1)
        assert (theirs["leases"], theirs["listen_address"]) == (1, peer.address)
        assert [their["nbytes"] for their in theirs["caches"]] == [DESC.nbytes]
        (own,) = statuses_of(os.getpid(), 2)
        kinds = [(its["allocated"], its["deallocated"]) for its in own["caches"]]
        assert kinds == [(True, False), (False, False)]
        (link,) = own["links"]
        moved = 2 * 2 * DESC.stride
        assert (link["cluster_id"], link["state"], link["bytes_pulled"]) == (1, "LINKED", moved)
        assert own["operations"]["pull_blocks"]["nbytes"] == moved
        assert own["in_flight"] == []
    assert statuses_of(os.getpid(), 2) == []


def test_a_peer_that_has_not_answered_yet_has_no_role() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        LlmDataDist(2, LlmRole.DECODER) as engine,
    ):
        engine.initialize()
        peer = ClusterInfo(1, f"127.0.0.1:{silent.getsockname()[1]}")
        with ThreadPoolExecutor() as pool:
            linking = pool.submit(engine.link_clusters, [peer])
            with silent.accept()[0]:
                (own,) = statuses_of(os.getpid(), 2)
            (result,) = linking.result()
        assert [(link["state"], link["role"]) for link in own["links"]] == [("LINKING", None)]
        assert result.error is not None


def test_connections_of_unanswered_clients_are_closed() -> None:
    """If the loop ends before a worker has time, the socket is closed, not left to a warning."""
    control, began, goes_on = ControlLoop(max_workers=1), Event(), Event()

    def describe() -> dict[str, Any]:
        began.set()
        goes_on.wait()
        return {}

    async def in_turn(function: Callable[[], object] = int) -> None:
        function()

    control.start()
    status = StatusSocket(control, "unanswered", describe)
    control.run(in_turn(status.start))
    name = f"\0kvplan-status-{os.geteuid()}-{os.getpid()}-unanswered"
    with ExitStack() as opened:
        first, second = (opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        first.connect(name)
        assert began.wait(60)
        second.connect(name)
        for _ in range(2):  # the loop accepts in one turn, and the next one comes after it
            control.run(in_turn())
        control.stop()
        assert second.recv(1) == b""
        goes_on.set()
        assert first.recv(1) == b"{"
    gc.collect()


def test_clients_that_leave_before_the_answer_do_not_use_up_its_places() -> None:
    """Four documents are made at a time. A client that leaves frees its place."""
    control, left = ControlLoop(max_workers=1), Semaphore(0)

    def describe() -> dict[str, Any]:
        left.acquire(timeout=60)
        return {}

    async def in_turn(function: Callable[[], object] = int) -> None:
        function()

    control.start()
    with ExitStack() as opened:
        opened.callback(control.stop)
        status = StatusSocket(control, "deserted", describe)
        control.run(in_turn(status.start))
        name = f"\0kvplan-status-{os.geteuid()}-{os.getpid()}-deserted"
        for _ in range(8):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(name)
                for _ in range(2):  # the loop accepts in one turn, and the next one comes after it
                    control.run(in_turn())
            left.release()
            control.run(control.in_worker(int))  # after the answer: there is one worker
        left.release()
        client = opened.enter_context(socket.socket(socket.AF_UNIX))
        client.connect(name)
        assert client.recv(1) == b"{"


def test_a_client_that_does_not_read_delays_others_for_a_second_at_most() -> None:
    """The only worker gives it up, and answers the next client."""
    control, texts = ControlLoop(max_workers=1), ["short", "x" * (1 << 20)]
    status = StatusSocket(control, "unread", lambda: {"text": texts.pop()})

    async def start() -> None:
        status.start()

    control.start()
    with ExitStack() as opened:
        opened.callback(control.stop)
        control.run(start())
        name = f"kvplan-status-{os.geteuid()}-{os.getpid()}-unread"
        opened.enter_context(socket.socket(socket.AF_UNIX)).connect(f"\0{name}")
        answer = _read(name, DEADLINE_S)
    assert answer is not None
    assert answer.document == {"schema_version": 1, "text": "short"}, answer


def test_a_socket_that_is_opened_after_another_was_closed_is_answered() -> None:
    """The second one has the descriptor of the first."""
    control = ControlLoop()

    async def replace() -> None:
        first = StatusSocket(control, "first", dict)
        first.start()
        first.close()
        StatusSocket(control, "second", dict).start()

    control.start()
    with ExitStack() as opened:
        opened.callback(control.stop)
        control.run(replace())
        answer = _read(f"kvplan-status-{os.geteuid()}-{os.getpid()}-second", DEADLINE_S)
    assert answer is not None
    assert answer.document == {"schema_version": 1}, answer


def test_surplus_clients_are_refused_and_do_not_use_up_places() -> None:
    control, goes_on = ControlLoop(max_workers=1), Event()

    def describe() -> dict[str, Any]:
        goes_on.wait(DEADLINE_S)
        return {}

    async def in_turn(function: Callable[[], object] = int) -> None:
        function()

    control.start()
    with ExitStack() as opened:
        opened.callback(control.stop)
        opened.callback(goes_on.set)
        control.run(in_turn(StatusSocket(control, "asked", describe).start))
        name = f"kvplan-status-{os.geteuid()}-{os.getpid()}-asked"
        for _ in range(4):
            opened.enter_context(socket.socket(socket.AF_UNIX)).connect(f"\0{name}")
        for _ in range(5):  # the loop accepts one client in a turn
            control.run(in_turn())
        for _ in range(5):
            answer = _read(name, DEADLINE_S)
            assert answer is not None
            assert answer.error == "no answer: 4 others ask it, or it ends"
        goes_on.set()
        control.run(control.in_worker(int))  # after the answers: there is one worker
        answer = _read(name, DEADLINE_S)
        assert answer is not None
        assert answer.document == {"schema_version": 1}, answer


def test_clients_without_a_thread_do_not_use_up_places() -> None:
    program = """
        import os, socket
        from kvplan.control.loop import ControlLoop
        from kvplan.control.status_socket import StatusSocket, read_all
        from tests.support.lone_user import allow_threads, become

        async def in_turn(function=int):
            function()

        become()
        control = ControlLoop()
        control.start()
        control.run(in_turn(StatusSocket(control, "lone", dict).start))
        name = f"\\0kvplan-status-{os.geteuid()}-{os.getpid()}-lone"
        allow_threads(1)
        for _ in range(8):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(name)
                for _ in range(2):  # the loop accepts in one turn, and the next comes after it
                    control.run(in_turn())
        allow_threads(None)
        (answer,) = read_all(timeout_s=20)
        assert answer.document is not None, answer
        control.stop()
    """
    lone_user.run(program)


def test_a_client_that_waits_for_a_descriptor_costs_no_processor_time() -> None:
    """The client is answered once the process has a descriptor again."""

    async def in_turn(function: Callable[[], object] = int) -> None:
        function()

    async def busy_share() -> float:
        busy, began = time.thread_time(), time.monotonic()
        await asyncio.sleep(0.2)
        return (time.thread_time() - busy) / (time.monotonic() - began)

    control, (soft, hard) = ControlLoop(), resource.getrlimit(resource.RLIMIT_NOFILE)
    control.start()
    with ExitStack() as opened:
        opened.callback(control.stop)
        status = StatusSocket(control, "lacking", dict)
        control.run(in_turn(status.start))
        client = opened.enter_context(socket.socket(socket.AF_UNIX))
        client.settimeout(DEADLINE_S)
        os.close(lowest := os.dup(client.fileno()))  # a free number
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            client.connect(f"\0kvplan-status-{os.geteuid()}-{os.getpid()}-lacking")
            # A loop that does not wait is busy each time; one that waits may be so once.
            assert any(control.run(busy_share()) < 0.05 for _ in range(10))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert client.recv(1) == b"{"


def test_transfers_in_flight_are_listed() -> None:
    """A push by layers is in flight from its call to its last layer."""
    with closing(Peer()) as peer, LlmDataDist(2, LlmRole.PROMPT) as engine:
        engine.initialize()
        peer.run("datadist.allocate_blocks_cache(desc, BlocksCacheKey(1))", desc=DESC)
        engine.link_clusters([ClusterInfo(1, peer.address)]).raise_for_status()
        mine = engine.allocate_blocks_cache(DESC)
        task = engine.layered(
            Transfer(
                Rows(mine, [1]),
                Rows(BlocksCacheKey(1), [2]),
                layers=KvCacheExtParam(tensor_num_per_layer=2),
            ),
            tag="request 7",
        )
        (row,) = statuses_of(os.getpid(), 2)[0]["in_flight"]
        assert (row["operation"], row["tag"], row["peer"]) == ("push_layers", "request 7", 1)
        assert (row["nbytes"], row["cache_id"]) == (2 * DESC.stride, mine.cache_id)
        task.ready(0)
        task.wait()
        assert statuses_of(os.getpid(), 2)[0]["in_flight"] == []
        peer.stop()
        with ThreadPoolExecutor() as pool:
            notifying = pool.submit(engine.notify, 1, b"without a cache", timeout_ms=30_000)
            while not (rows := statuses_of(os.getpid(), 2)[0]["in_flight"]):
                assert not notifying.done()
            peer.resume()
            notifying.result()
        (row,) = rows
        assert (row["operation"], row["peer"]) == ("notify", 1)
        assert (row["nbytes"], row["cache_id"]) == (None, None)


def test_an_option_disables_the_status_socket() -> None:
    with LlmDataDist(2, LlmRole.DECODER) as engine:
        engine.initialize({"kvplan.status_socket": "0"})
        assert statuses_of(os.getpid(), 2) == []


def test_a_stopped_process_delays_no_other() -> None:
    with closing(Peer()) as peer:
        peer.stop()
        (answer,) = (record for record in read_all(timeout_s=0.1) if record.pid == peer.process.pid)
        assert answer.document is None
        assert "no answer within 0.1 s" in answer.error
        for _ in range(20):  # each leaves a connection in its queue, until that is full
            found = {record.pid: record.error for record in read_all(timeout_s=0.01)}
            assert "no answer within 0.01 s" in found[peer.process.pid]
        peer.resume()
        assert len(statuses_of(peer.process.pid, 1)) == 1


def test_a_reader_waits_for_room_in_the_queue_of_the_socket() -> None:
    """Others read at the same time; of a stopped engine no reader ever comes to its turn."""
    name = f"kvplan-test-{os.geteuid()}-{os.getpid()}"  # which no other test asks
    with ExitStack() as ends:
        listener = ends.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"\0{name}")
        listener.listen(2)
        listener.settimeout(DEADLINE_S)
        others = 0
        with suppress(BlockingIOError):
            while True:
                other = ends.enter_context(socket.socket(socket.AF_UNIX))
                other.setblocking(False)
                other.connect(f"\0{name}")
                others += 1
        began = time.monotonic()
        answer = _read(name, 0.05)
        assert time.monotonic() - began >= 0.05
        assert answer is not None
        assert (answer.pid, answer.document) == (os.getpid(), None)
        assert "no answer within 0.05 s" in answer.error
        reader = ends.enter_context(ThreadPoolExecutor(1))
        found = reader.submit(_read, name, DEADLINE_S)
        for _ in range(others + 1):
            with listener.accept()[0] as connection:
                connection.sendall(b'{"schema_version": 1}')
        answer = found.result()
        assert answer is not None
        assert answer.document == {"schema_version": 1}, answer


def test_a_killed_engine_is_not_listed_although_its_forked_child_lives() -> None:
    """The name belongs to the parent. A living child does not keep it."""
    program = """
        import os, sys
        from kvplan import LlmDataDist, LlmRole
        datadist = LlmDataDist(3, LlmRole.MIX)
        datadist.initialize()
        if not os.fork():
            print("child", flush=True)
            sys.stdin.read()  # until the test has looked
            os._exit(0)
        os.wait()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        assert parent.stdout.readline() == "child\n"
        assert len(statuses_of(parent.pid, 3)) == 1
        parent.kill()
        parent.wait()
        assert [record for record in read_all() if record.pid == parent.pid] == []


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@as_root
def test_another_user_gets_no_answer() -> None:
    with LlmDataDist(2, LlmRole.DECODER) as engine:
        engine.initialize()
        assert len(statuses_of(os.getpid(), 2)) == 1
        program = f"""
            import os, socket
            os.setuid({NOBODY})
            names = [line.split()[-1] for line in open("/proc/net/unix").read().splitlines()]
            (name,) = {{at for at in names if at.startswith("@kvplan-status-0-{os.getpid()}-2-")}}
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(chr(0) + name[1:])
                print(connection.recv(100))
        """
        command = [sys.executable, "-c", dedent(program)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (answer.stdout, answer.stderr) == ("b''\n", "")


@as_root
def test_another_user_that_takes_such_a_name_is_ignored() -> None:
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        child = os.fork()
        if not child:
            os.setuid(NOBODY)
            listener.bind(f"\0kvplan-status-0-{os.getpid()}-9-deadbeef")
            listener.listen()  # the kernel names the listener as the peer
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        before = read_all(timeout_s=0.1)
        assert [record for record in before if record.pid == child] == []
