"""Between two processes of one host: beside the best of NIXL there, and what it costs to wait."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks import libraries
from benchmarks.comparing import DIRECTIONS, Comparison, fastest
from benchmarks.pairs import LOOPBACK, Pair
from benchmarks.table import Row, Run, Topic

TOPIC = Topic()
ROUNDS = 11
IDLE_S = 5


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


def over_ucx(run: Run, name: str, memory: libraries.Memory) -> Row:
    """Without target: that UCX has no need to be used there is what it tells."""
    compared = Comparison()
    ends = libraries.kvplan_on_one_host(memory), libraries.ucx_on_one_host(memory)
    for direction in DIRECTIONS:
        compared.add(run, LOOPBACK, direction, *ends, rounds=ROUNDS)
    return compared.row(name, None, "the same calls by UCX's shared memory and cma")


@TOPIC.row("arena_over_ucx")
def arena_ucx(run: Run, name: str) -> Row:
    """Caches that kvplan allocates."""
    return over_ucx(run, name, "arena")


@TOPIC.row("registered_over_ucx")
def registered_ucx(run: Run, name: str) -> Row:
    """Caches in memory that was there before."""
    return over_ucx(run, name, "registered")


def processor_seconds(pid: int) -> float:
    """What all threads of a process have computed."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


@TOPIC.row("idle_cpu_percent")
def idle(run: Run, name: str) -> Row:
    """Two linked engines that have nothing to do; the busier one counts."""
    with Pair(libraries.kvplan_over_tcp(LOOPBACK, "small"), LOOPBACK) as pair:
        pair.seconds("facade", 100)
        before = [processor_seconds(pid) for pid in pair.pids]
        time.sleep(IDLE_S)  # being idle is what is measured
        after = [processor_seconds(pid) for pid in pair.pids]
    percent = [100 * (b - a) / IDLE_S for a, b in zip(before, after, strict=True)]
    note = f"of a core, linked, {IDLE_S} s; the other end {min(percent):.2f}; limit: the budget"
    return Row(name, max(percent), "%", 1, note=note)
