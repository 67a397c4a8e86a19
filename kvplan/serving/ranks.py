"""Which workers of a producer have what a worker of a consumer needs, under tensor parallelism."""

from __future__ import annotations

from kvplan.status import invalid


def heads_of(rank: int, ranks: int, num_heads: int) -> range:
    """The KV heads of a worker under tensor parallelism; with more workers than heads, copies."""
    if num_heads % ranks == 0:
        each = num_heads // ranks
        return range(rank * each, (rank + 1) * each)
    if ranks % num_heads == 0:
        head = rank * num_heads // ranks
        return range(head, head + 1)
    raise invalid(f"num_heads={num_heads} and {ranks} workers: neither divides the other")


def read_from(rank: int, ranks: int, owners: int, num_heads: int) -> list[int]:
    """Which of the producer's workers a worker of the consumer pulls from, in order of heads."""
    wanted = heads_of(rank, ranks, num_heads)
    found: list[int] = []
    covered = wanted.start
    for owner in range(owners):
        heads = heads_of(owner, owners, num_heads)
        if heads.start <= covered < heads.stop and covered < wanted.stop:
            found.append(owner)
            covered = heads.stop
    return found


def readers_of(ranks: int, owners: int, num_heads: int) -> list[int]:
    """How many of the consumer's workers pull from each of the producer's."""
    counts = [0] * owners
    for rank in range(ranks):
        for owner in read_from(rank, ranks, owners, num_heads):
            counts[owner] += 1
    return counts
