"""Many requests at once: of one link and of many, from several threads, and none starves."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvnative._executor import KVN_OK, Executor
from kvnative._ucx import UcxEnd, UcxNativeLink
from tests.ucx.peer import NBYTES, TIMEOUT_MS, Bytes, UcxPeer, blocks

DIRECTIONS = ["get", "put"]


def assert_alike(local: Bytes, peer: UcxPeer, spans: list[tuple[int, int, int]]) -> None:
    for mine, theirs, nbytes in spans:
        np.testing.assert_array_equal(
            local[mine : mine + nbytes], peer.memory[theirs : theirs + nbytes]
        )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_many_requests_of_one_link(
    steady_peer: UcxPeer, steady_link: UcxNativeLink, local: Bytes, direction: str
) -> None:
    # More than a link lets be open, small ones and large ones.
    spans = blocks(800, 20_000)
    parts = [spans[i : i + 1 + i % 17] for i in range(0, 800, 17)]
    with Executor(steady_peer.backend(steady_link, direction)) as executor:
        tasks = [executor.submit(steady_peer.descriptors(direction, local, part)) for part in parts]
        for task in reversed(tasks):
            report = task.wait(TIMEOUT_MS)
            assert report.status == KVN_OK, report.message
    for part in parts:
        assert_alike(local, steady_peer, part)
    steady_peer.fill()


def test_several_threads(steady_peer: UcxPeer, steady_link: UcxNativeLink, local: Bytes) -> None:
    spans = blocks(512, 32 << 10)
    failures = []

    def transfer(thread: int) -> None:
        # Threads 0 and 2 pull, 1 and 3 push, each its own blocks.
        direction = DIRECTIONS[thread % 2]
        with Executor(steady_peer.backend(steady_link, direction)) as executor:
            for _ in range(20):
                descriptors = steady_peer.descriptors(direction, local, spans[thread::4])
                report = executor.run(descriptors, TIMEOUT_MS)
                if report.status != KVN_OK:
                    failures.append(report.message)

    threads = [threading.Thread(target=transfer, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert_alike(local, steady_peer, spans)
    steady_peer.fill()


def test_many_links_of_one_end(end: UcxEnd, steady_peer: UcxPeer, local: Bytes) -> None:
    """Each has a fair share: none is through before every other has got something."""
    links = [steady_peer.link(end) for _ in range(12)]
    spans = blocks(80, 16 << 10)
    buffers = [np.zeros(len(spans) * (16 << 10), dtype=np.uint8) for _ in links]
    executors = [Executor(steady_peer.backend(link, "get")) for link in links]
    tasks = [
        executor.submit(steady_peer.descriptors("get", buffer, spans))
        for executor, buffer in zip(executors, buffers, strict=True)
    ]
    for task in tasks:
        report = task.wait(TIMEOUT_MS)
        assert report.status == KVN_OK, report.message
    for buffer in buffers:
        assert_alike(buffer, steady_peer, spans)
    for executor in executors:
        executor.close()
    for link in links:
        link.close()


def test_both_ends_at_once(end: UcxEnd, peer: UcxPeer, local: Bytes) -> None:
    """Both pull from each other and push to each other over one link."""
    link = peer.link(end)
    end.add_range(9, local.ctypes.data, local.nbytes, True, 1)
    half = NBYTES // 2
    local[:] = np.random.default_rng(5).integers(0, 256, NBYTES, dtype=np.uint8)
    mine, theirs = local[half:].copy(), peer.memory[half:].copy()
    peer.send(
        f"""
        from kvnative._executor import Executor
        from kvnative._ucx_gathered import gathered_backend
        from kvnative._lower import Descriptors
        from tests.ucx.peer import u64
        statuses = []
        for direction, here, there in [("get", base, {local.ctypes.data + half}),
                                       ("put", base + {half}, {local.ctypes.data})]:
            backend = gathered_backend(links[-1], direction, u64(9), u64(1),
                                       u64({local.ctypes.data}), u64({NBYTES}))
            dst, src = (here, there) if direction == "get" else (there, here)
            with Executor(backend) as executor:
                report = executor.run(Descriptors.from_columns(u64(dst), u64(src), u64({half})),
                                      {TIMEOUT_MS})
            statuses.append((report.status, report.message))
        result = statuses
        """
    )
    # This end reads what nobody writes: its own source for both is left alone above.
    into = np.zeros(half, dtype=np.uint8)
    with Executor(peer.backend(link, "get")) as executor:
        for _ in range(3):
            report = executor.run(peer.descriptors("get", into, [(0, half, half)]), TIMEOUT_MS)
            assert report.status == KVN_OK, report.message
    assert peer.answer() == [[KVN_OK, ""], [KVN_OK, ""]]
    end.remove_range(9)
    np.testing.assert_array_equal(into, theirs)
    np.testing.assert_array_equal(local[:half], theirs)
    np.testing.assert_array_equal(peer.memory[:half], mine)
