"""Transfers that the end's own thread begins, be it asleep, about to be so, or awake."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvnative._executor import KVN_OK, KVN_PEER_GONE, KVN_PENDING, Executor, Task
from kvnative._ucx import UcxNativeLink
from tests.ucx.peer import TIMEOUT_MS, Bytes, UcxPeer, blocks, open_end
from tests.ucx.test_gathered import DIRECTIONS, both
from tests.ucx_library import found

both_ways = pytest.mark.parametrize("direction", DIRECTIONS)


def until_done(task: Task) -> int:
    """The status, found by looking alone: nobody attends."""
    give_up = time.monotonic() + TIMEOUT_MS / 1000
    while not task.done and time.monotonic() < give_up:
        pass
    return task.report.status


@both_ways
def test_nobody_waits(
    steady_peer: UcxPeer, steady_link: UcxNativeLink, local: Bytes, direction: str
) -> None:
    backend = steady_peer.backend(steady_link, direction, hands_over=True)
    with Executor(backend) as executor:
        for count in (1, 64, 400):
            spans = blocks(count, 32 << 10)
            here, there = both(steady_peer.memory, direction, local, spans)
            for _ in range(20):
                if direction == "get":
                    local[:] = 0xA5
                else:
                    steady_peer.fill()
                task = executor.submit(steady_peer.descriptors(direction, local, spans))
                assert until_done(task) == KVN_OK
                assert np.array_equal(local, here)
                assert np.array_equal(steady_peer.memory, there)
    steady_peer.fill()


@both_ways
def test_beside_those_who_wait(
    steady_peer: UcxPeer, steady_link: UcxNativeLink, local: Bytes, direction: str
) -> None:
    descriptors = [steady_peer.descriptors(direction, local, blocks(1, 64)) for _ in range(2)]
    backends = [
        steady_peer.backend(steady_link, direction, hands_over=hands_over)
        for hands_over in (True, False)
    ]
    with Executor(backends[0]) as thread, Executor(backends[1]) as waiting:
        is_over = threading.Event()
        statuses = set()

        def wait() -> None:
            while not is_over.is_set():
                statuses.add(waiting.run(descriptors[1], TIMEOUT_MS).status)

        other = threading.Thread(target=wait)
        other.start()
        try:
            for _ in range(500):
                assert until_done(thread.submit(descriptors[0])) == KVN_OK
        finally:
            is_over.set()
            other.join()
        assert statuses == {KVN_OK}
    steady_peer.fill()


@both_ways
def test_as_the_end_is_closed(steady_peer: UcxPeer, local: Bytes, direction: str) -> None:
    descriptors = steady_peer.descriptors(direction, local, blocks(64, 32 << 10))
    for _ in range(5):
        with found():
            end = open_end()
        backend = steady_peer.backend(steady_peer.link(end), direction, hands_over=True)
        executor = Executor(backend)
        closing = threading.Thread(target=end.close)
        closing.start()
        statuses = []
        while closing.is_alive():
            statuses.append(until_done(executor.submit(descriptors)))
        statuses.append(until_done(executor.submit(descriptors)))
        assert KVN_PENDING not in statuses
        assert statuses[-1] == KVN_PEER_GONE
    steady_peer.fill()


def threads() -> set[Path]:
    return set(Path("/proc/self/task").iterdir())


def are_asleep(tasks: set[Path]) -> bool:
    return all((it / "stat").read_text().rpartition(")")[2].split()[0] == "S" for it in tasks)


def test_who_submits_a_push_does_not_begin_it(steady_peer: UcxPeer, local: Bytes) -> None:
    """It costs that thread next to nothing, where one that begins it copies some MiB."""
    before = threads()
    with found():
        end = open_end()
    link = steady_peer.link(end)
    spent = {True: 0, False: 0}
    for hands_over in [True, False] * 10:
        with Executor(steady_peer.backend(link, "put", hands_over=hands_over)) as executor:
            descriptors = steady_peer.descriptors("put", local, blocks(400, 32 << 10))
            while not are_asleep(threads() - before):
                pass
            begun = time.thread_time_ns()
            task = executor.submit(descriptors)
            spent[hands_over] += time.thread_time_ns() - begun
            assert until_done(task) == KVN_OK
    end.close()
    steady_peer.fill()
    assert spent[True] < spent[False] / 2, spent
