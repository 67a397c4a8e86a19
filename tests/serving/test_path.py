"""The number of Python calls and files that a request takes at both of its ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.peer import Peer
from tests.serving.worker import Worker, reference
from tests.support import peer as processes
from tests.support.counting import Calls

MAX_CALLS, MAX_FILES = 250, 29
MAX_FILES_OF_LARGE_REQUESTS = 36
"""Files for a large request: other rooms lower and execute a transfer that is not copied inline."""

BLOCKS = 600
SMALL, LARGE = 21, 3997  # tokens, in blocks of 8: the last one is ragged
WARM, COUNTED = 4, 40


class CountedPeer(Peer):
    """A producer that counts its calls."""

    def __init__(self) -> None:
        processes.Peer.__init__(self)
        self.run("from tests.support.counting import Calls; calls = Calls('kvplan-serving')")
        self.begin(1, blocks=BLOCKS)


@pytest.fixture(scope="module")
def calls() -> Iterator[Calls]:
    calls = Calls("kvplan-serving")
    yield calls
    calls.close()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    peer = CountedPeer()
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def worker(calls: Calls) -> Iterator[Worker]:
    worker = Worker(2, blocks=BLOCKS)
    yield worker
    worker.close()


@pytest.mark.parametrize(
    ("tokens", "max_files"), [(SMALL, MAX_FILES), (LARGE, MAX_FILES_OF_LARGE_REQUESTS)]
)
def test_a_request_is_short_at_both_ends(
    calls: Calls, peer: Peer, worker: Worker, tokens: int, max_files: int
) -> None:
    """The calls from `fetch` to its result and to free blocks: leased, ragged, tagged, notified.

    A run that is short enough ends the test: on a busy machine an end may look several times for
    an event.
    """
    blocks = list(range(5, 5 + -(-tokens // 8)))
    seen: list[list[tuple[str, str]]] = []
    for number in range(tokens, tokens + WARM + COUNTED):
        peer.worker.finish(number, 11, blocks, tokens)
        wanted = reference([peer.source], number, 11, tokens)
        peer.run("calls.begin()")
        calls.begin()
        result = worker.fetch(wanted, blocks)
        called = calls.end()
        assert peer.worker.freed() == {"request-11"}
        assert result.error is None
        seen.append([*called, *map(tuple, peer.run("result = calls.end()"))])
        if len(seen) > WARM and len(seen[-1]) <= MAX_CALLS:
            break
    assert worker.has(11, blocks, 0, tokens)
    shortest = min(seen[WARM:], key=len)
    files = sorted({file for file, _ in shortest})
    listed = "\n".join(f"{function}  {file}" for file, function in shortest)
    assert len(shortest) <= MAX_CALLS, f"{len(shortest)} calls:\n{listed}"
    assert len(files) <= max_files, f"{len(files)} files: {files}"
