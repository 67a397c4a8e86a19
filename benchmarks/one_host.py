"""Between two processes of one host: beside the best of NIXL there."""

from __future__ import annotations

from benchmarks import libraries
from benchmarks.comparing import DIRECTIONS, Comparison, fastest
from benchmarks.pairs import LOOPBACK
from benchmarks.table import Row, Run, Topic

TOPIC = Topic()
ROUNDS = 11


def over_nixl(run: Run, name: str, memory: libraries.Memory, target: float) -> Row:
    """The worst of both directions and three sizes."""
    compared = Comparison()
    ours = libraries.kvplan_on_one_host(memory)
    peers = libraries.nixl_on_one_host()
    best = run.share("NIXL on one host", lambda: fastest(peers, LOOPBACK))
    for direction in DIRECTIONS:
        compared.add(run, LOOPBACK, direction, ours, best[direction], rounds=ROUNDS)
    return compared.row(name, target, "the peer's best settings and memory")


@TOPIC.row("arena_over_nixl")
def arena(run: Run, name: str) -> Row:
    """Caches that kvplan allocates."""
    return over_nixl(run, name, "arena", 2.5)


@TOPIC.row("registered_over_nixl")
def registered(run: Run, name: str) -> Row:
    """Caches in memory that was there before, at both ends."""
    return over_nixl(run, name, "registered", 1.3)
