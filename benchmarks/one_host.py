"""Transfers between two processes of one host, beside NIXL with its best settings."""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import libraries
from benchmarks.comparing import DIRECTIONS, Comparison, fastest
from benchmarks.limits import COPIES, Team, best_seconds
from benchmarks.movers.paged import BLOCK, POOL_BLOCKS, Ids, OnePool, huge_pool, offsets
from benchmarks.pairs import LOOPBACK, Pair
from benchmarks.table import Row, Run, Topic

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

TOPIC = Topic()
ROUNDS = 11


def over_nixl(run: Run, name: str, memory: libraries.Memory, target: float) -> Row:
    """Compare with NIXL; the worst of two directions and two sizes counts."""
    compared = Comparison()
    ours = libraries.kvplan_on_one_host(memory)
    peers = libraries.nixl_on_one_host()
    best = run.share("NIXL on one host", lambda: fastest(peers, LOOPBACK))
    for direction in DIRECTIONS:
        compared.add(run, LOOPBACK, direction, ours, best[direction], rounds=ROUNDS)
    return compared.row(name, target, "the peer's best settings and memory")


@TOPIC.row("arena_over_nixl")
def arena(run: Run, name: str) -> Row:
    """Paged pulls and pushes between caches that kvplan allocates, beside NIXL's best."""
    return over_nixl(run, name, "arena", 2.5)


@TOPIC.row("registered_over_nixl")
def registered(run: Run, name: str) -> Row:
    """Paged pulls and pushes between caches in registered memory, beside NIXL's best."""
    return over_nixl(run, name, "registered", 1.3)


REQUESTS = (("single", 1), ("request", 1), ("request", 64))
"""Requests: the number of tensors, 1 or 64, and of blocks of 32 KiB in each."""
COLD = ("cold", 1)
"""The first such requests after linking, of blocks that this process never touched."""


def requests(run: Run) -> dict[tuple[str, int], tuple[float, float, str]]:
    """Return seconds of a request by kvplan and by NIXL's fastest settings, and these settings."""

    def measure() -> dict[tuple[str, int], tuple[float, float, str]]:
        ours = libraries.kvplan_on_one_host("arena", prefault="1")  # in huge pages
        peers = libraries.nixl_on_one_host()
        found: dict[tuple[str, int], tuple[float, float, str]] = {}
        first: list[tuple[float, float, str]] = []
        for peer in peers:
            with ExitStack() as opened:
                pairs = [opened.enter_context(Pair(value, LOOPBACK)) for value in (ours, peer)]
                us, them = (pair.seconds("request", 1) for pair in pairs)
                first.append((us, them, peer.settings))
                for asked in REQUESTS:
                    for pair in pairs:
                        pair.seconds(*asked)
                    us, them = run.medians(
                        *(partial(pair.seconds, *asked) for pair in pairs), rounds=ROUNDS
                    )
                    if asked not in found or them < found[asked][1]:
                        found[asked] = us, them, peer.settings
        _, them, settings = min(first, key=lambda value: value[1])
        found[COLD] = statistics.median(us for us, *_ in first), them, settings
        return found

    shared: dict[tuple[str, int], tuple[float, float, str]] = run.share("requests", measure)
    return shared


def bare_request(blocks: int) -> Callable[[str, Team], float]:
    """Return a call that only copies the blocks of a request of 64 tensors, new ones each time."""
    there, here = huge_pool(), huge_pool()
    rng = np.random.default_rng(0)

    def addresses(pool: OnePool, ids: Ids) -> NDArray[np.uint64]:
        return np.uint64(pool.ctypes.data) + offsets(ids).astype(np.uint64)

    def seconds(how: str, team: Team) -> float:
        dst, src = (
            addresses(value, rng.permutation(POOL_BLOCKS)[:blocks]) for value in (here, there)
        )
        return team.copy_seconds(how, (dst, src, np.full(len(dst), BLOCK, np.uint64)))

    return seconds


def bare(run: Run) -> dict[int, tuple[float, float]]:
    """Return the seconds of only the copies of a request of 64 tensors, by its number of blocks.

    No library is faster: pages are huge, and one thread or one for each core is awake. The values
    are those of the best copy that leaves blocks in the CPU's caches, and of non-temporal copies.
    """

    def measure() -> dict[int, tuple[float, float]]:
        found = {}
        for blocks in {blocks for _, blocks in REQUESTS}:
            seconds = bare_request(blocks)
            best = {how: best_seconds(partial(seconds, how), blocks) for how in COPIES}
            found[blocks] = min(best["memcpy"], best["movsb"]), best["stream"]
        return found

    shared: dict[int, tuple[float, float]] = run.share("bare requests", measure)
    return shared


def beside_bare(run: Run, asked: tuple[str, int]) -> str:
    """Return the times of bare copies for the note of a row; empty for one copy."""
    if asked[0] == "single":
        return ""
    cached, past = bare(run)[asked[1]]
    return f"; bare copies {1e6 * cached:.1f} us, past the caches {1e6 * past:.1f} us"


def request_row(run: Run, name: str, asked: tuple[str, int], target: float) -> Row:
    """Compare requests a second with NIXL."""
    us, them, settings = requests(run)[asked]  # first: raises without NIXL
    tensors = 1 if asked[0] == "single" else 64
    note = (
        f"{tensors} x {asked[1]} blocks of 32 KiB, new ones each time: {1e6 * us:.1f} us beside "
        f"{1e6 * them:.1f} us of NIXL ({settings}), the request made included; ours prefaulted"
        f"{beside_bare(run, asked)}"
    )
    return Row(name, 1 / us, "/s", 1 / them, "at least", target, note)


@TOPIC.row("request_over_nixl_1")
def request_of_one(run: Run, name: str) -> Row:
    """Request a block of one tensor, beside NIXL's best."""
    return request_row(run, name, REQUESTS[0], 1.5)


@TOPIC.row("request_over_nixl_64")
def request_of_64(run: Run, name: str) -> Row:
    """Request a block of each of 64 tensors, once all pages are mapped."""
    return request_row(run, name, REQUESTS[1], 4)


@TOPIC.row("request_over_nixl_64_cold")
def first_requests_of_64(run: Run, name: str) -> Row:
    """Request a block of each of 64 tensors, right after linking."""
    return request_row(run, name, COLD, 3)


@TOPIC.row("request_64_us")
def request_of_64_beside_copies(run: Run, name: str) -> Row:
    """Request the same, beside only its copies by awake threads, in turns."""
    seconds = bare_request(1)
    with (
        Pair(libraries.kvplan_on_one_host("arena", prefault="1"), LOOPBACK) as pair,
        Team(len(os.sched_getaffinity(0))) as team,
    ):

        def copies() -> float:
            return min(
                statistics.median(seconds(how, team) for _ in range(15))
                for how in ("memcpy", "stream")
            )

        us, limit = run.medians(partial(pair.seconds, "request", 1), copies, rounds=4 * ROUNDS)
    note = "one request follows another at once; copies alone start with all threads awake"
    return Row(name, 1e6 * us, "us", 1e6 * limit, "at most", 1.3, note)


@TOPIC.row("request_over_nixl_4096")
def request_of_4096(run: Run, name: str) -> Row:
    """Request 64 blocks of each of 64 tensors."""
    return request_row(run, name, REQUESTS[2], 4)
