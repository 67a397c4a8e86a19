"""Tries between two processes on one GPU: every way, and what must not go wrong meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvplan import BlockLease, ClusterInfo, LlmDataDist, LLMException, Placement, Rows, Transfer
from kvplan.transport.ucx.library import find as find_ucx
from tools.cuda_tries.inside import engine, paged
from tools.cuda_tries.notes import Notes, SkippedError, random_bytes
from tools.cuda_tries.peer import CLUSTER, key_of

LINK_MS = 60_000
GONE = ("LLM_KV_CACHE_NOT_EXIST", "LLM_LINK_FAILED", "LLM_NOT_YET_LINK")


class Other:
    """The peer's process."""

    def __init__(self, tensors: int, blocks: int, block: int, transport: str) -> None:
        self.tensors, self.shape = tensors, (blocks, block)
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("peer.py")),
                *map(str, (tensors, blocks, block, transport)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"the peer's process exited with {self.process.wait()}")
        return line.strip()

    def say(self, *words: object) -> None:
        """Send a line, whose answer `do` or `answer` reads."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def do(self, *words: object) -> str:
        """Send a line, and return its answer."""
        self.say(*words)
        return self._answer()

    answer = _answer

    def content(self, seed: int) -> Any:
        return random_bytes(seed, self.tensors, *self.shape)

    def end(self) -> int:
        """Let it end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


@contextmanager
def linked(
    notes: Notes, transport: str, tensors: int = 4, blocks: int = 64, block: int = 32 << 10
) -> Iterator[tuple[LlmDataDist, Other]]:
    """Link an engine with another in a process of its own."""
    if notes.quick:
        tensors, blocks, block = 2, 16, 4096
    other = Other(tensors, blocks, block, transport)
    try:
        with engine(**{"kvplan.transport": transport}) as datadist:
            link(datadist, other)
            yield datadist, other
    finally:
        other.process.kill()
        other.process.wait()


def link(datadist: LlmDataDist, other: Other) -> None:
    clusters = [ClusterInfo(CLUSTER, other.address)]
    datadist.link_clusters(clusters, timeout_ms=LINK_MS).raise_for_status()


def tables(blocks: int) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(blocks)
    first, second = (rng.permutation(blocks)[: blocks // 2].tolist() for _ in range(2))
    return first, second


def try_transports(notes: Notes) -> None:
    """Push and pull, from and to each kind of memory, over local and tcp."""
    for transport in ("local", "tcp"):
        with linked(notes, transport) as (datadist, other):
            other.do("make", 1, "DEVICE", 10)
            other.do("make", 2, "HOST", 20)
            other.do("register", 3, 30)
            for here in Placement:
                for name, there in enumerate(("DEVICE", "HOST", "DEVICE, registered"), 1):
                    step = f"{transport}: local {here.name}, remote {there}"
                    there_and_back(notes, step, datadist, other, here, name)
            for name, seed in ((1, 10), (2, 20), (3, 30)):
                same = other.do("check", name, seed) == "True"
                notes.expect(f"{transport}: cache {name} is as before", same)
            datadist.unlink_clusters([ClusterInfo(CLUSTER, other.address)]).raise_for_status()
            notes.expect(f"{transport}: the peer ends", other.end() == 0)


def there_and_back(
    notes: Notes, step: str, datadist: LlmDataDist, other: Other, here: Placement, name: int
) -> None:
    """Pull, push something else, and push back what was there."""
    desc = paged(other.tensors, *other.shape, here)
    cache = datadist.allocate_blocks_cache(desc)
    whole = list(range(other.shape[0]))
    src, dst = tables(other.shape[0])
    before = other.content(10 * name)
    try:
        datadist.pull_blocks(key_of(str(name)), cache, src, dst, timeout_ms=LINK_MS)
        expected = np.zeros_like(before)
        expected[:, dst] = before[:, src]
        notes.same(f"{step}: pulled", np.stack(datadist.arrays(cache, copy=True)), expected)
        datadist.write_cache(cache, list(random_bytes(99, *before.shape)))
        datadist.push_blocks(cache, key_of(str(name)), whole, whole, timeout_ms=LINK_MS)
        notes.expect(f"{step}: pushed", other.do("check", name, 99) == "True")
        datadist.write_cache(cache, list(before))
        datadist.push_blocks(cache, key_of(str(name)), whole, whole, timeout_ms=LINK_MS)
    except LLMException as error:
        if error.status_code.name != "LLM_FEATURE_NOT_ENABLED":
            raise
        notes.add(step, "refused", error.args[0])
    finally:
        datadist.deallocate_cache(cache)


def try_freed(notes: Notes) -> None:
    """Let a peer free and allocate in mid-transfer: what succeeds has the bytes that were there."""
    rounds = 4 if notes.quick else 40
    for kind in ("make", "register"):
        with linked(notes, "local") as (datadist, other):
            cache = datadist.allocate_blocks_cache(
                paged(other.tensors, *other.shape, Placement.DEVICE)
            )
            whole = list(range(other.shape[0]))
            stale = refused = 0
            same_address = set()
            for seed in range(1, rounds + 1):
                arguments = (1, "DEVICE", seed) if kind == "make" else (1, seed)
                same_address.add(other.do(kind, *arguments))
                datadist.pull_blocks(key_of("1"), cache, whole, whole, timeout_ms=LINK_MS)
                stale += not np.array_equal(
                    np.stack(datadist.arrays(cache, copy=True)), other.content(seed)
                )
                task = datadist.submit(Transfer(Rows(key_of("1"), whole), Rows(cache, whole)))
                other.say("free", 1)
                try:
                    task.wait(timeout_ms=LINK_MS)
                    stale += not np.array_equal(
                        np.stack(datadist.arrays(cache, copy=True)), other.content(seed)
                    )
                except LLMException as error:
                    refused += 1
                    stale += error.status_code.name not in GONE
                other.answer()
                try:
                    datadist.pull_blocks(key_of("1"), cache, whole, whole, timeout_ms=LINK_MS)
                    stale += 1
                except LLMException as error:
                    stale += error.status_code.name not in GONE
            word = "allocated" if kind == "make" else "registered"
            notes.expect(
                f"{word} memory, freed {rounds} times",
                not stale,
                f"{refused} refused in mid-transfer, {rounds - refused} done before; at "
                f"{len(same_address)} addresses; {stale} stale or wrong",
            )


def try_killed(notes: Notes) -> None:
    """Kill a peer in mid-transfer: an error, no hang, and the device goes on."""
    for _ in range(1 if notes.quick else 5):
        with linked(notes, "local") as (datadist, other):
            cache = datadist.allocate_blocks_cache(
                paged(other.tensors, *other.shape, Placement.DEVICE)
            )
            whole = list(range(other.shape[0]))
            other.do("make", 1, "DEVICE", 1)
            datadist.pull_blocks(key_of("1"), cache, whole, whole, timeout_ms=LINK_MS)
            tasks = [
                datadist.submit(Transfer(Rows(key_of("1"), whole), Rows(cache, whole)))
                for _ in range(3)
            ]
            other.process.kill()
            started = time.monotonic()
            outcomes = set()
            for task in tasks:
                try:
                    task.wait(timeout_ms=LINK_MS)
                    outcomes.add("done")
                except LLMException as error:
                    outcomes.add(error.status_code.name)
            notes.expect(
                "transfers in flight end",
                outcomes <= {"done", *GONE},
                f"{', '.join(sorted(outcomes))}; after {time.monotonic() - started:.2f} s",
            )
            other.process.wait()  # until then the peer is there
            with notes.refusal("the next one is refused", *GONE):
                datadist.pull_blocks(key_of("1"), cache, whole, whole, timeout_ms=LINK_MS)
            given = random_bytes(5, other.tensors, *other.shape)
            datadist.write_cache(cache, list(given))
            notes.same("the device goes on", np.stack(datadist.arrays(cache, copy=True)), given)


def try_leases(notes: Notes) -> None:
    """Pull by a lease that stands; a stale one is refused, though its memory is still there."""
    with linked(notes, "local") as (datadist, other):
        cache = datadist.allocate_blocks_cache(paged(other.tensors, *other.shape, Placement.DEVICE))
        other.do("make", 1, "DEVICE", 1)
        lease = BlockLease.from_bytes(bytes.fromhex(other.do("lease", 1, 3, 7, 5)))
        datadist.pull_blocks(lease, cache, None, [0, 1, 2], timeout_ms=LINK_MS)
        found = np.stack(datadist.arrays(cache, copy=True))
        notes.same("by a lease", found[:, :3], other.content(1)[:, [3, 7, 5]])
        other.do("release", 1)
        with notes.refusal("released", "LLM_KV_CACHE_NOT_EXIST", "LLM_PARAM_INVALID"):
            datadist.pull_blocks(lease, cache, None, [0, 1, 2], timeout_ms=LINK_MS)
        again = BlockLease.from_bytes(bytes.fromhex(other.do("lease", 1, 3, 7, 5)))
        datadist.pull_blocks(again, cache, None, [3, 4, 5], timeout_ms=LINK_MS)
        found = np.stack(datadist.arrays(cache, copy=True))
        notes.same("leased again", found[:, 3:6], other.content(1)[:, [3, 7, 5]])
        with notes.refusal("the old one stays stale", *GONE):
            datadist.pull_blocks(lease, cache, None, [0, 1, 2], timeout_ms=LINK_MS)


def try_ucx(notes: Notes) -> None:
    """Run the checkout's tests of the transport ucx between two processes, which need a GPU."""
    root = Path(__file__).parents[2]
    tests = root / "tests/transport/ucx/test_cuda.py"
    if not tests.exists():
        raise SkippedError("this is not a checkout")
    try:
        notes.add("library", "says", find_ucx().path)
    except LLMException as error:
        raise SkippedError(error.args[0]) from error
    # Without the plugins that happen to be there, what they warn of, and what documents need.
    options = ("-q", "-rs", "-p", "no:cacheprovider", "-W", "default", "--confcutdir", "tests")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tests)],
        cwd=root,
        env=dict(os.environ) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stdout + done.stderr).strip().splitlines() or ["pytest says nothing"]
    if "No module named pytest" in lines[-1] or " skipped" in lines[-1]:
        raise SkippedError(" ".join(lines[-2:]))
    notes.expect("tests/transport/ucx/test_cuda.py", done.returncode == 0, lines[-1])
