"""Transfers over TCP, beside a bare program with one connection, and beside other libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import libraries
from benchmarks.comparing import DIRECTIONS, Comparison, fastest
from benchmarks.pairs import LOOPBACK, Library, Place, veth
from benchmarks.table import Row, Run, Topic

TOPIC = Topic()
TIMES = 3
ROUNDS, PEER_ROUNDS = 4, 5


@contextmanager
def places() -> Iterator[list[Place]]:
    """Yield loopback and a veth pair."""
    with veth() as place:
        yield [LOOPBACK, place]


def ratio_to_bare(run: Run, name: str, direction: str) -> Row:
    """Compare with the bare program; the worst of two places and two sizes counts."""
    compared = Comparison()
    with places() as both:
        for place in both:
            ours = libraries.kvplan_over_tcp(place)
            ends = ours, libraries.bare(place)
            compared.add(run, place, direction, *ends, rounds=ROUNDS, times=TIMES)
    congestion_control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    limit = f"one connection, writev and readv; congestion control: {congestion_control}"
    return compared.row(name, 1.0, limit)


@TOPIC.row("tcp_pull_ratio")
def tcp_pull(run: Run, name: str) -> Row:
    """Paged pulls over loopback and a veth pair, beside the bare program."""
    return ratio_to_bare(run, name, "pull")


@TOPIC.row("tcp_push_ratio")
def tcp_push(run: Run, name: str) -> Row:
    """Paged pushes over loopback and a veth pair, beside the bare program."""
    return ratio_to_bare(run, name, "push")


@TOPIC.row("tcp_encrypted_ratio")
def tcp_encrypted(run: Run, name: str) -> Row:
    """Paged pulls and pushes with `Options(encrypt=True)`, beside unencrypted ones."""
    compared = Comparison()
    ends = libraries.kvplan_over_tcp(LOOPBACK, encrypt=True), libraries.kvplan_over_tcp(LOOPBACK)
    for direction in DIRECTIONS:
        compared.add(run, LOOPBACK, direction, *ends, rounds=ROUNDS)
    return compared.row(name, 0.5, "the same without encryption")


def beside_peers(
    run: Run, name: str, ours: Callable[[Place], Sequence[Library]], target: float | None
) -> Row:
    """Compare in both directions, two places and two sizes; all with their best settings."""
    compared = Comparison()
    with places() as both:
        for place in both:
            movers = fastest(ours(place), place)
            for peers in libraries.nixl_over_tcp(place), libraries.mooncake_over_tcp(place):
                for direction, peer in fastest(peers, place).items():
                    mover = movers[direction]
                    compared.add(run, place, direction, mover, peer, rounds=PEER_ROUNDS)
    return compared.row(name, target, "the peer's best settings")


@TOPIC.row("tcp_over_best_peer")
def tcp_over_peers(run: Run, name: str) -> Row:
    """Paged pulls and pushes over TCP, beside the best other library."""
    cores = len(os.sched_getaffinity(0))
    return beside_peers(
        run, name, libraries.kvplan_connections_over_tcp, 5.0 if cores >= 16 else 1.2
    )


@TOPIC.row("tcp_bare_over_best_peer")
def tcp_bare_over_peers(run: Run, name: str) -> Row:
    """Run the bare program beside the best other library: the limit of one connection."""
    return beside_peers(run, name, lambda place: [libraries.bare(place)], None)
