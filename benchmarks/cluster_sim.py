"""`python -m benchmarks.cluster_sim`: simulate a large cluster, and find the limits of the design.

One prefill and one decode engine are simulated, event by event, with all messages from their
peers: the control thread of each, which serves one message at a time, and the transport of the
decode engine. Costs of messages are those that `control_costs` measured.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.control_costs import ControlCosts

MEASURED: Final = ControlCosts(
    call_us=900,
    answer_us=1800,
    link_ms=3.7,
    beat_us=240,
    publish_us=60,
    publish_cache_us=0.15,
    receive_us=100,
    claim_us=600,
    claimed_us=440,
    table_nbytes=1670,
    beat_nbytes=90,
)
"""Results of benchmarks.control_costs with 32 peers, on a VM with 2 cores."""
PUBLISH_S: Final = 0.01
"""Time for which an engine collects changes before it publishes them together."""
BANDWIDTHS: Final = (2.5, 5.0, 10.0, 20.0)
"""Bandwidths of a decode engine's transport, in GB/s."""
ENDURABLE_S: Final = 0.05
"""Maximum time that a message waits for the control thread, at the 99th percentile."""


@dataclass(frozen=True)
class Cluster:
    """The simulated cluster.

    Attributes:
        engines: number of engines of each role.
        linked: number of peers of each engine, all of the other role.
        requests_per_s: prompts that a decode engine pulls, and about those of a prefill engine.
        per_request: True if each prompt has its own cache, found by its key; False: all prompts
            share one paged cache, and block tables come from the scheduler.
        held_s: seconds for which a prompt's cache is held.
        beat_s: the heartbeat interval.
        tokens, layers, token_nbytes: size of a prompt; bytes are those of a token in one layer.
        block_tokens: tokens of a block.
    """

    engines: int = 1000
    linked: int = 1000
    requests_per_s: float = 2.0
    per_request: bool = True
    held_s: float = 2.0
    beat_s: float = 1.0
    tokens: int = 2048
    layers: int = 61
    token_nbytes: int = 1152
    block_tokens: int = 64

    @property
    def caches(self) -> float:
        """Average number of caches of a prefill engine."""
        return self.requests_per_s * self.held_s if self.per_request else 1

    def transfer_s(self, gigabytes_per_s: float) -> float:
        """Return the seconds that one prompt takes at that bandwidth."""
        return self.tokens * self.layers * self.token_nbytes / gigabytes_per_s / 1e9


@dataclass(frozen=True)
class Load:
    """The load of a server that does one job after the other.

    Attributes:
        busy: seconds of work that arrive in a second; from 1 on the queue grows for ever.
        waits_s: waits of awaited jobs before their start: the median and the 99th percentile.
    """

    busy: float
    waits_s: tuple[float, float]

    @property
    def endurable(self) -> bool:
        """True if the server keeps up, and waits are short enough."""
        return self.busy < 1 and self.waits_s[1] <= ENDURABLE_S


class Job(NamedTuple):
    """A job: its time of arrival, its seconds of work, and True if a caller awaits it."""

    at: float
    cost: float
    awaited: bool = True


def serve(jobs: Iterable[Job], seconds: float) -> Load:
    """Serve jobs one by one; they are given in order of arrival."""
    free_at = work = 0.0
    waits: list[float] = []
    for job in jobs:
        begin = max(job.at, free_at)
        if job.awaited:
            waits.append(begin - job.at)
        free_at = begin + job.cost
        work += job.cost
    if not waits:
        return Load(work / seconds, (0.0, 0.0))
    waits.sort()
    middle, last = (waits[int(len(waits) * share)] for share in (0.50, 0.99))
    return Load(work / seconds, (middle, last))


class Simulation:
    """The jobs of one run; each stream of messages has its own phase."""

    def __init__(self, cluster: Cluster, costs: ControlCosts, seconds: float) -> None:
        self._cluster, self._costs, self._seconds = cluster, costs, seconds
        self._random = random.Random(0)

    def prefill(self) -> Load:
        """Simulate the control thread of a prefill engine: it publishes and serves claims."""
        streams = [self._beats()]
        if self._cluster.per_request:
            streams += [self._publishing(), self._poisson(self._rate, self._costs.claimed_us)]
        return serve(heapq.merge(*streams), self._seconds)

    def decode(self) -> Load:
        """Simulate the control thread of a decode engine: it receives updates and claims keys."""
        streams = [self._beats()]
        if self._cluster.per_request:
            # Updates of many independent peers arrive at random times.
            received = len(list(self._rounds())) / self._seconds * self._cluster.linked
            streams += [
                self._poisson(received, self._costs.receive_us),
                self._poisson(self._rate, self._costs.claim_us),
            ]
        return serve(heapq.merge(*streams), self._seconds)

    def received(self, transfer_s: float) -> Load:
        """Simulate the transport of a decode engine: one prompt after the other."""
        return serve(self._poisson(self._rate, 1e6 * transfer_s), self._seconds)

    def publishes_per_s(self) -> float:
        """Return the rate at which a prefill engine publishes changes."""
        return len(list(self._rounds())) / self._seconds if self._cluster.per_request else 0.0

    @property
    def _rate(self) -> float:
        return self._cluster.requests_per_s

    def _poisson(self, per_s: float, cost_us: float) -> Iterator[Job]:
        at = self._random.expovariate(per_s)
        while at < self._seconds:
            yield Job(at, cost_us / 1e6)
            at += self._random.expovariate(per_s)

    def _beats(self) -> Iterator[Job]:
        """Yield the heartbeats of all links, each in its own phase."""
        beat_s = self._cluster.beat_s
        phases = sorted(self._random.uniform(0, beat_s) for _ in range(self._cluster.linked))
        for number in range(int(self._seconds / beat_s)):
            for phase in phases:
                yield Job(number * beat_s + phase, self._costs.beat_us / 1e6)

    def _rounds(self) -> Iterator[float]:
        """Yield the times at which a prefill engine publishes new and freed caches."""
        chance = random.Random(1)
        come = []
        at = chance.expovariate(self._rate)
        while at < self._seconds:
            come.append(at)
            at += chance.expovariate(self._rate)
        published = -1.0
        for at in sorted([*come, *(item + self._cluster.held_s for item in come)]):
            if published <= at < self._seconds:
                published = at + PUBLISH_S
                yield published

    def _publishing(self) -> Iterator[Job]:
        """Yield one job for each peer in each round, all at once."""
        costs, cluster = self._costs, self._cluster
        each = (costs.publish_us + costs.publish_cache_us * cluster.caches) / 1e6
        for at in self._rounds():
            yield from itertools.repeat(Job(at, each, awaited=False), cluster.linked)


def most_linked(cluster: Cluster, costs: ControlCosts, seconds: float) -> int:
    """Return the maximum number of peers for which both control threads are endurable."""

    def endurable(linked: int) -> bool:
        run = Simulation(replace(cluster, linked=linked), costs, seconds)
        return run.prefill().endurable and run.decode().endurable

    low, high = 0, 1
    while endurable(high) and high < 65536:
        low, high = high, 2 * high
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if endurable(middle) else (low, middle)
    return low


HEADER = (
    f"{'peers':>6} {'prompts':>9} {'links':>10} {'prefill':>8} {'wait ms':>14} {'decode':>8} "
    f"{'wait ms':>14} {'messages/s':>11} {'MB/s':>6}"
)


def row(cluster: Cluster, costs: ControlCosts, seconds: float) -> str:
    """Return one line of the table, for a cluster."""
    run = Simulation(cluster, costs, seconds)
    prefill, decode = run.prefill(), run.decode()
    beats = 2 * cluster.linked / cluster.beat_s
    tables = run.publishes_per_s() * cluster.linked
    # Every second update only names a freed cache, in about as many bytes as a Ping.
    nbytes = beats * costs.beat_nbytes + tables * (costs.table_nbytes + costs.beat_nbytes) / 2
    waits = [" / ".join(f"{1e3 * item:.1f}" for item in load.waits_s) for load in (prefill, decode)]
    return (
        f"{cluster.linked:6} {'by key' if cluster.per_request else 'by block':>9} "
        f"{cluster.engines * cluster.linked:10,} {prefill.busy:8.0%} {waits[0]:>14} "
        f"{decode.busy:8.0%} {waits[1]:>14} {beats + tables:11,.0f} {nbytes / 1e6:6.2f}"
    )


def tables(cluster: Cluster, costs: ControlCosts, asked: argparse.Namespace) -> Iterator[str]:
    """Yield the printed lines."""
    sizes = sorted({32, 128, 512, cluster.engines})
    yield (
        f"{cluster.engines} prefill and {cluster.engines} decode engines, "
        f"{cluster.requests_per_s:g} prompts a second each, of {cluster.tokens} tokens"
    )
    yield HEADER
    for per_request, linked in itertools.product((True, False), sizes):
        at = replace(cluster, linked=linked, per_request=per_request)
        yield row(at, costs, asked.seconds)
    yield "\nAn engine starts, and links with all its peers at once"
    yield f"{'peers':>6} {'it calls, s':>12} {'is called, s':>13} {'descriptors':>12} {'MiB':>6}"
    for linked in sizes:
        seconds = (linked * value / 1e6 for value in (costs.call_us, costs.answer_us))
        calls, called = seconds
        memory = linked * asked.link_kib / 1024
        descriptors = linked * asked.link_descriptors
        yield f"{linked:6} {calls:12.2f} {called:13.2f} {descriptors:12,} {memory:6.0f}"
    limit = f"{1e3 * ENDURABLE_S:.0f} ms"
    yield f"\nThe most peers before a message waits {limit} for a control thread, 1 time of 100"
    for requests in (0.5, 2.0, 8.0):
        at = replace(cluster, requests_per_s=requests)
        by_key, by_block = (
            most_linked(replace(at, per_request=number), costs, asked.seconds)
            for number in (True, False)
        )
        yield f"{requests:5g} prompts a second: {by_key:6} by key, {by_block:6} by block"
    yield "\nWhat moves the bytes of a decode engine"
    for gigabytes_per_s in BANDWIDTHS:
        transfer_s = cluster.transfer_s(gigabytes_per_s)
        load = Simulation(cluster, costs, 50 * asked.seconds).received(transfer_s)
        yield (
            f"{gigabytes_per_s:5g} GB/s {1e3 * transfer_s:7.1f} ms a prompt, at most "
            f"{1 / transfer_s:.0f} a second: {load.busy:.0%} busy; 1 of 100 waits "
            f"{1e3 * load.waits_s[1]:.0f} ms"
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_sim", description=__doc__)
    parser.add_argument("--costs", type=Path, help="JSON of control_costs; default: built in")
    parser.add_argument("--engines", type=int, default=1000, help="of each role")
    parser.add_argument("--requests", type=float, default=2.0, help="in a second, of each engine")
    parser.add_argument("--seconds", type=float, default=20.0, help="simulated time")
    parser.add_argument("--link-kib", type=float, default=130.0, help="memory of a link at one end")
    parser.add_argument("--link-descriptors", type=int, default=6)
    asked = parser.parse_args()
    costs = ControlCosts(**json.loads(asked.costs.read_text())) if asked.costs else MEASURED
    cluster = Cluster(engines=asked.engines, requests_per_s=asked.requests)
    for line in tables(cluster, costs, asked):
        print(line)


if __name__ == "__main__":
    main()
