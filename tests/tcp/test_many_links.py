"""The costs of links, their leaks, and their shares of a service."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvnative._backend import KVN_CANCELLED, KVN_FAILED, KVN_OK, CallError, NativeError
from kvnative._executor import Executor
from kvnative._tcp import TcpService
from tests.support.held import Held, allocated
from tests.support.peer import ROOT
from tests.tcp.frames import answer, attack
from tests.tcp.peer import DIRECTIONS, PAGE, TIMEOUT_MS, backend_of, descriptors, link_within

MIB = 1 << 20


LINKS = """
from kvnative._tcp import TcpService
from tests.support.held import allocated
from tests.tcp.peer import link_within

service = TcpService(1, max_ranges=1)
before = allocated()
ends = [link_within(service, service) for _ in range(50)]
print(allocated() - before)
"""


def run_python(program: str, environ: dict[str, str]) -> str:
    """Return the output of a program, with the imports of this file."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, timeout=60, stdout=subprocess.PIPE, check=True
    )
    return done.stdout.decode()


class TestCost:
    @pytest.mark.parametrize("connections", [1, 4])
    def test_a_link_costs_few_descriptors(self, connections: int) -> None:
        """Each end has two per pair of connections, and one per link."""
        service = TcpService(1, max_ranges=1)
        before = Held.now()
        ends = link_within(service, service, connections)
        assert len(before.new().descriptors) == 2 * (2 * connections + 1)
        for end in ends:
            end.close("the test is over")
        before.check_nothing_new()
        service.close()

    @pytest.mark.parametrize("secret", [None, bytes(32)])
    def test_a_link_costs_little_memory(self, secret: bytes | None) -> None:
        """A link has one pair of connections, encrypted or not."""
        service, count = TcpService(1, max_ranges=1), 50
        ends = list(link_within(service, service, secret=secret))  # loads libcrypto
        before = allocated()
        for _ in range(count):
            ends += link_within(service, service, secret=secret)
        assert (allocated() - before) / (2 * count) < 256 << 10
        service.close()

    def test_a_link_costs_the_same_if_malloc_returns_garbage(self) -> None:
        """The cost is the same, because no code takes new memory for zeros."""
        grown = [
            int(run_python(LINKS, {**os.environ, "MALLOC_PERTURB_": byte})) for byte in ("0", "165")
        ]
        assert grown[1] <= 1.1 * grown[0], grown

    def test_a_service_costs_two_descriptors_per_thread(self) -> None:
        """Each thread of a service costs two descriptors, and its end leaves nothing open."""
        before = Held.now()
        service = TcpService(3, max_ranges=1 << 20)
        new = before.new()
        assert (len(new.descriptors), len(new.threads)) == (2 * 3, 3)
        before.check_new_are_not_inherited()
        service.close()
        before.check_nothing_new()

    @pytest.mark.parametrize("secret", [None, bytes(32)])
    def test_waiting_services_cost_no_processor_time(self, secret: bytes | None) -> None:
        """Waiting costs no processor time: after a request, both ends sleep until the next one."""
        before = Held.now()
        near, far = TcpService(1, max_ranges=1), TcpService(1, max_ranges=1)
        threads = [task for task, _ in before.new().threads]
        assert len(threads) == 2
        memory, local = np.ones(PAGE, dtype=np.uint8), np.zeros(PAGE, dtype=np.uint8)
        far.add_range(0, memory.ctypes.data, PAGE, True, 1)
        link, _far_end = link_within(near, far, secret=secret)
        moved = descriptors("get", local.ctypes.data, memory.ctypes.data, [(0, 0, PAGE)])
        with Executor(backend_of(link, "get", memory.ctypes.data, PAGE)) as executor:
            for _ in range(2):
                assert executor.run(moved, TIMEOUT_MS).status == KVN_OK
                wait_for_sleep(threads)
        near.close()
        far.close()


def wait_for_sleep(threads: list[str], times: int = 20) -> None:
    """Wait until threads of this process sleep in each of several looks."""
    deadline, found = time.monotonic() + TIMEOUT_MS / 1000, 0
    while found < times:
        assert time.monotonic() < deadline, "a thread never sleeps"
        states = [
            Path(f"/proc/self/task/{task}/stat").read_text().rsplit(") ")[1] for task in threads
        ]
        found = found + 1 if {state[0] for state in states} == {"S"} else 0


@pytest.mark.parametrize(
    ("why", "asks", "answers", "secret"),
    [
        ("2 sockets to ask and 1 to answer", 2, 1, None),
        ("1 sockets to ask and 2 to answer", 1, 2, None),
        ("0 sockets to ask and 3 to answer", 0, 3, None),
        ("17 sockets to ask and 17 to answer", 17, 17, None),
        ("secret has 31 bytes", 2, 2, bytes(31)),
        ("the service is closed", 2, 2, None),
        ("cannot watch a connection", 2, 2, bytes(32)),
    ],
    ids=["more ask", "more answer", "none asks", "too many", "secret", "closed", "no socket"],
)
def test_a_refused_link_leaves_none_of_its_sockets_open(
    why: str, asks: int, answers: int, secret: bytes | None, tmp_path: Path
) -> None:
    """The sockets for requests and those for answers are closed."""
    service = TcpService(1, max_ranges=1)
    if "closed" in why:
        service.close()
    before = Held.now()
    ends = [socket.socketpair() for _ in range(asks + answers)]
    near = [item.detach() for item, _ in ends]
    clients, servers = near[:asks], near[asks:]
    if "watch a connection" in why:  # epoll refuses files
        os.close(servers[-1])
        servers[-1] = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises((ValueError, NativeError), match=why) as refused:
        service.link(clients, servers, peer="far", secret=secret)
    if "watch a connection" in why:
        assert isinstance(refused.value, CallError)
        assert (refused.value.status, refused.value.errno) == (KVN_FAILED, errno.EPERM)
    for _, far in ends:
        far.settimeout(10)
        assert far.recv(1) == b"", "its other end is closed"
        far.close()
    before.check_nothing_new()
    service.close()


def test_a_thousand_links_leave_nothing() -> None:
    near, far = TcpService(2, max_ranges=1), TcpService(1, max_ranges=1)
    memory = np.zeros(MIB, dtype=np.uint8)
    far.add_range(0, memory.ctypes.data, memory.nbytes, True, 1)
    local = np.zeros(4096, dtype=np.uint8)

    def make(times: int) -> None:
        for number in range(times):
            link, other = link_within(near, far)
            with Executor(backend_of(link, "get", memory.ctypes.data, MIB)) as executor:
                moved = descriptors("get", local.ctypes.data, memory.ctypes.data, [(0, 0, 4096)])
                assert executor.run(moved, TIMEOUT_MS).status == KVN_OK
            first, second = (link, other) if number % 2 else (other, link)
            first.close("enough")
            if number % 3:
                second.close("enough")

    make(20)
    before, allocated_before = Held.now(), allocated()
    make(1000)
    before.check_nothing_new()
    assert allocated() - allocated_before < MIB // 4  # 1,000 links have 50 MiB
    near.close()
    far.close()


class TestSharing:
    LINKS = 32

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_links_share_the_service_fairly(self, direction: str) -> None:
        """Links that request more than the service can serve get equal shares."""
        owner, asker = TcpService(1, max_ranges=1), TcpService(1, max_ranges=1)
        memory, local = np.ones(MIB, dtype=np.uint8), np.zeros(MIB, dtype=np.uint8)
        owner.add_range(0, memory.ctypes.data, MIB, True, 1)
        links = [link_within(asker, owner) for _ in range(self.LINKS)]
        executors = [
            Executor(backend_of(link, direction, memory.ctypes.data, MIB)) for link, _ in links
        ]
        much = descriptors(direction, local.ctypes.data, memory.ctypes.data, [(0, 0, MIB)] * 10_000)
        tasks = [executor.submit(much) for executor in executors]

        def moved() -> list[int]:
            return [task.report.bytes_done for task in tasks]

        while min(moved()) < 4 * MIB:  # some have begun earlier than others
            pass
        before = moved()
        while sum(moved()) - sum(before) < self.LINKS * 50 * MIB:
            pass
        shares = sorted(now - then for now, then in zip(moved(), before, strict=True))
        assert {task.cancel().status for task in tasks} == {KVN_CANCELLED}
        owner.close()
        asker.close()
        assert shares[0] >= 0.8 * shares[-1], shares

    def test_transfers_of_a_link_take_turns(self) -> None:
        asker = TcpService(1, max_ranges=1)
        attacked = attack(asker)
        local, there = np.zeros(MIB, dtype=np.uint8), 1 << 30
        with Executor(backend_of(attacked.link, "get", there, MIB)) as executor:
            for spans in [(0, 0, MIB)] * 100, [(0, 0, 1000)]:
                executor.submit(descriptors("get", local.ctypes.data, there, spans), keep=local)
            sizes = []
            while 1000 not in sizes:
                number, nbytes, _ = attacked.answers.read_request()
                attacked.answers.send(answer(number) + bytes(nbytes) + answer(number))
                sizes.append(nbytes)
            attacked.close()
        asker.close()
        assert len(sizes) < 20  # 8 are in flight at once

    def test_a_client_that_reads_nothing_delays_no_other(self) -> None:
        """A peer has requested much and reads nothing; another peer is served, and may end."""
        owner, asker = TcpService(1, max_ranges=1), TcpService(1, max_ranges=1)
        memory, local = np.ones(MIB, dtype=np.uint8), np.zeros(MIB, dtype=np.uint8)
        owner.add_range(0, memory.ctypes.data, MIB, True, 1)
        deaf = attack(asker)
        with Executor(backend_of(deaf.link, "put", memory.ctypes.data, MIB)) as executor:
            much = [(0, 0, MIB)] * 1000
            stuck = executor.submit(descriptors("put", local.ctypes.data, memory.ctypes.data, much))
            near, _far = link_within(asker, owner)
            with Executor(backend_of(near, "get", memory.ctypes.data, MIB)) as other:
                for _ in range(20):
                    moved = descriptors("get", local.ctypes.data, memory.ctypes.data, [(0, 0, MIB)])
                    assert other.run(moved, TIMEOUT_MS).status == KVN_OK
            assert not stuck.done
            deaf.close()
        asker.close()
        owner.close()


FORK = """
import os, signal, sys, threading
import numpy as np
from kvnative._backend import KVN_OK, NativeError
from kvnative._executor import Executor
from kvnative._tcp import TcpService
from tests.support.peer import ROOT
from tests.tcp.peer import backend_of, descriptors, link_within

owner, asker = TcpService(1, max_ranges=2), TcpService(1, max_ranges=2)
memory, local = np.ones(4096, dtype=np.uint8), np.zeros(4096, dtype=np.uint8)
owner.add_range(0, memory.ctypes.data, 4096, True, 1)
near, far = link_within(asker, owner)
backend = backend_of(near, "get", memory.ctypes.data, 4096)
moved = descriptors("get", local.ctypes.data, memory.ctypes.data, [(0, 0, 4096)])
ready, go = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    refused = 0
    for call in (
        lambda: owner.add_range(1, 4096, 4096, True, 1),
        lambda: owner.remove_range(0),
        lambda: asker.link([], [], peer="x"),
        lambda: near.connections,
        lambda: backend_of(near, "get", 4096, 4096),
        lambda: Executor(backend),
    ):
        try:
            call()
        except NativeError as error:
            refused += "fork" in str(error)
    near.close("nothing happens")
    asker.close()
    os.write(ready[1], bytes([refused]))
    os.close(go[1])
    os.read(go[0], 1)  # it has the descriptors all the time
    del near, far, asker, owner
    os._exit(0)
assert os.read(ready[0], 1) == bytes([6])
with Executor(backend) as executor:
    assert executor.run(moved, 20_000).status == KVN_OK
near.close("enough")
import select
assert select.select([far.death_fd], [], [], 20)[0]
os.close(go[1])
assert os.waitpid(child, 0)[1] == 0
owner.close()
asker.close()
print("fine")
"""


def test_a_forked_child_cannot_use_the_service_and_does_not_disturb_it() -> None:
    # Python 3.12 and later warn of any fork with threads.
    quiet = "ignore:This process:DeprecationWarning"
    done = subprocess.run(
        [sys.executable, "-W", quiet, "-c", FORK],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert (done.stdout, done.stderr) == ("fine\n", "")
