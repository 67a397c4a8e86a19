"""The interfaces of NIXL and Mooncake over kvplan, beside the original libraries.

The same program runs on both: with the library, and under `python -m kvplan.run --as`.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from functools import partial
from time import perf_counter

import numpy as np

from benchmarks import libraries
from benchmarks.comparing import DIRECTIONS, Comparison, fastest
from benchmarks.limits import Team, best_seconds
from benchmarks.movers.paged import BLOCK, POOL_BLOCKS, offsets, ordinary_pool
from benchmarks.one_host import REQUESTS
from benchmarks.pairs import LOOPBACK, Library, Pair
from benchmarks.table import Row, Run, Topic

TOPIC = Topic()
ROUNDS = 7
COUNT = 100_000


def nixl_over_kvplan() -> Library:
    """Return NIXL's program on kvplan."""
    command = [
        *(sys.executable, "-m", "kvplan.run", "--as", "nixl"),
        "-m",
        "benchmarks.movers.nixl",
    ]
    return Library("kvplan.nixl", "local", command, lambda line: [*command, line])


def mooncake_over_kvplan() -> Library:
    """Return Mooncake's program on kvplan."""
    command = [*(sys.executable, "-m", "kvplan.run", "--as", "mooncake", "-m")]
    command += ["benchmarks.movers.mooncake", "--most", str(1 << 20), "--address"]
    return Library(
        "kvplan.mooncake",
        "tcp",
        [*command, LOOPBACK.serving],
        lambda line: [*command, LOOPBACK.moving, line],
        {"KVPLAN_TRANSPORT": "tcp"},
    )


def bare_read(run: Run, pair: Pair, asked: tuple[str, int]) -> float:
    """Return the seconds of process_vm_readv alone for a request, by one thread or one per core.

    No library reads ordinary memory of another process faster.
    """
    pool = run.share("ordinary pool", ordinary_pool)
    there = np.uint64(json.loads(pair.serving_says)["address"])
    rng = np.random.default_rng(0)

    def seconds(team: Team) -> float:
        dst, src = (
            base + offsets(rng.permutation(POOL_BLOCKS)[: asked[1]]).astype(np.uint64)
            for base in (np.uint64(pool.ctypes.data), there)
        )
        if asked[0] == "single":
            dst, src = dst[:1].copy(), src[:1].copy()
        return team.readv_seconds(pair.pids[0], (dst, src, np.full(len(dst), BLOCK, np.uint64)))

    return best_seconds(seconds, asked[1])


def request_row(run: Run, name: str, asked: tuple[str, int], target: float) -> Row:
    """Compare requests a second with NIXL's best settings."""
    best: tuple[float, float, str] | None = None
    read = float("inf")
    for peer in libraries.nixl_on_one_host()[:2]:  # with ordinary memory
        with ExitStack() as opened:
            pairs = [
                opened.enter_context(Pair(value, LOOPBACK)) for value in (nixl_over_kvplan(), peer)
            ]
            for pair in pairs:
                pair.seconds(*asked)
            us, them = run.medians(
                *(partial(pair.seconds, *asked) for pair in pairs), rounds=ROUNDS
            )
            read = min(read, bare_read(run, pairs[0], asked))
        if best is None or them < best[1]:
            best = us, them, peer.settings
    assert best is not None
    us, them, settings = best
    note = (
        f"{1e6 * us:.1f} us beside {1e6 * them:.1f} us of NIXL ({settings}); made, posted, polled; "
        f"process_vm_readv alone {1e6 * read:.1f} us"
    )
    return Row(name, 1 / us, "/s", 1 / them, "at least", target, note)


@TOPIC.row("nixl_surface_over_nixl_1")
def nixl_of_one(run: Run, name: str) -> Row:
    """Move one descriptor of 32 KiB by `kvplan.nixl`."""
    return request_row(run, name, REQUESTS[0], 1.5)


@TOPIC.row("nixl_surface_over_nixl_64")
def nixl_of_64(run: Run, name: str) -> Row:
    """Move 64 descriptors of 32 KiB by `kvplan.nixl`."""
    return request_row(run, name, REQUESTS[1], 2)


@TOPIC.row("nixl_surface_over_nixl_4096")
def nixl_of_4096(run: Run, name: str) -> Row:
    """Move 4,096 descriptors of 32 KiB by `kvplan.nixl`."""
    return request_row(run, name, REQUESTS[2], 3)


@TOPIC.row("mooncake_surface_over_mooncake")
def mooncake(run: Run, name: str) -> Row:
    """Read and write pages by `kvplan.mooncake.engine` over TCP."""
    compared = Comparison()
    for direction, peer in fastest(libraries.mooncake_over_tcp(LOOPBACK), LOOPBACK).items():
        assert direction in DIRECTIONS
        compared.add(run, LOOPBACK, direction, mooncake_over_kvplan(), peer, rounds=ROUNDS)
    return compared.row(name, 1.5, "the peer's best settings")


@TOPIC.row("nixl_prepare_100000")
def prepare(run: Run, name: str) -> Row:
    """Run `prep_xfer_dlist` on an array of 100,000 descriptors."""
    from kvplan.nixl import nixl_agent

    memory = np.zeros(COUNT * 32, np.uint8)
    rows = np.zeros((COUNT, 3), np.uint64)
    rows[:, 0] = memory.ctypes.data + np.arange(COUNT) * 32
    rows[:, 1] = 16
    agent = nixl_agent("bench")
    try:
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")

        def once() -> float:
            started = perf_counter()
            agent.prep_xfer_dlist("", rows, "DRAM").release()
            return perf_counter() - started

        (taken,) = run.medians(once, rounds=ROUNDS)
    finally:
        agent.agent.close()
    return Row(name, 1e3 * taken, "ms", 20.0)
