"""Groups of caches, block tables of requests in them, and shares of parallel workers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import gcd
from typing import NamedTuple, cast

import msgspec

from kvplan.layout import Interleaved
from kvplan.lease import BlockLease
from kvplan.planning.transfer import Rows, Transfer
from kvplan.serving.messages import Context, LayerRange, Number
from kvplan.status import invalid, not_exist
from kvplan.types import Cache
from kvplan.validation import INT64_MAX, check_range, check_type, shown


@dataclass(frozen=True)
class CacheGroup:
    """A paged cache of those layers of a model that share a block table.

    A cache without an axis `token` in its layout holds states (Mamba): one block for each request,
    the state after all tokens, which always moves whole. Under context parallelism (`tokens` of
    the cache's shard) the same block holds different tokens of the request in each rank.

    Args:
        name: unique name, for plans and errors.
        cache: cache of these layers, with a layout.
        token_unit: number of tokens that are packed together and only move as a whole; the axis
            `token` of the cache's layout counts these units.
    """

    name: str
    cache: Cache
    token_unit: int = 1

    @cached_property
    def is_state(self) -> bool:
        """True if the cache holds states instead of tokens."""
        return (
            self.cache.cache_desc.layout is not None and self.cache.cache_desc.seq_len_dim_index < 0
        )

    @cached_property
    def context(self) -> Interleaved | None:
        """The tokens of each request that the cache has; None: all."""
        shard = self.cache.cache_desc.shard
        tokens = None if shard is None else shard.tokens
        return tokens if isinstance(tokens, Interleaved) else None

    @cached_property
    def block_tokens(self) -> int:
        """Tokens of a block, summed over the ranks that share out the tokens of a request."""
        desc = self.cache.cache_desc
        ranks = 1 if self.context is None else self.context.ranks
        return desc.shape[desc.seq_len_dim_index] * self.token_unit * ranks

    @cached_property
    def unit_nbytes(self) -> int:
        """The bytes of `token_unit` tokens in all layers."""
        desc = self.cache.cache_desc
        return self.block_nbytes // desc.shape[desc.seq_len_dim_index]

    @cached_property
    def block_nbytes(self) -> int:
        """The bytes of a block in all layers."""
        desc = self.cache.cache_desc
        return desc.num_tensors * desc.rows_nbytes // desc.batch_size

    def units_between(self, first_token: int, end_token: int) -> int:
        """Return how many units of `token_unit` tokens the cache has between two tokens."""
        if self.context is None:
            return -(-end_token // self.token_unit) - first_token // self.token_unit
        return _count(self.context, end_token) - _count(self.context, first_token)


def _count(context: Interleaved, num_tokens: int) -> int:
    """Return how many of the first `num_tokens` tokens of a request a rank has."""
    periods, rest = divmod(num_tokens, context.ranks * context.size)
    return periods * context.size + min(max(rest - context.rank * context.size, 0), context.size)


@dataclass(frozen=True)
class Table:
    """A request's blocks in the cache of one group.

    Args:
        blocks: blocks of the request's tokens in their order, after the skipped ones.
        skipped: number of earlier blocks that the request no longer has, because a sliding window
            has passed their tokens.
    """

    blocks: Sequence[int]
    skipped: int = 0


Blocks = Sequence[int] | Sequence[Table]
"""The blocks of a request: of the only cache, or a table for each group."""


class GroupLease(NamedTuple):
    """A producer's lease of a request in the cache of one group."""

    lease: BlockLease
    first_token: int  # of the first leased block


def groups_of(cache: Cache | Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """Return the groups, or one group of the only cache."""
    if isinstance(cache, Cache):
        return (CacheGroup("", cache),)
    if not isinstance(cache, Sequence):
        raise TypeError(f"cache={shown(cache)} must be a Cache or a sequence of CacheGroup")
    names = [check_type("cache", group, CacheGroup).name for group in cache]
    if not names or len(set(names)) < len(names):
        raise invalid(f"cache={shown(names)} must be one or more groups with unique names")
    return tuple(cache)


def tables_of(blocks: Blocks, groups: int) -> tuple[Table, ...]:
    """Return a table for each group."""
    if groups == 1 and not (len(blocks) and isinstance(blocks[0], Table)):
        return (Table(cast("Sequence[int]", blocks)),)
    tables = tuple(table for table in blocks if isinstance(table, Table))
    if len(tables) != len(blocks) or len(tables) != groups:
        raise invalid(f"blocks={shown(blocks)} must have a Table for each of {groups} groups")
    for table in tables:
        check_range("skipped", table.skipped, 0, INT64_MAX)
    return tables


def missing_of(
    groups: Sequence[CacheGroup],
    leases: Sequence[Sequence[GroupLease]],
    blocks: Blocks,
    first_token: int,
    num_tokens: int,
    rank: int = 0,
) -> tuple[dict[str, Transfer], int]:
    """Return the transfers of the groups that lack tokens, by name, and their total bytes.

    A group whose table skips blocks lacks no token before its first block. `leases` has the leases
    of all groups for each source; `rank` is the consumer's rank.
    """
    for source_leases in leases:
        if len(source_leases) != len(groups):
            raise invalid(f"got leases of {len(source_leases)} groups; this side has {len(groups)}")
    transfers: dict[str, Transfer] = {}
    nbytes = 0
    tables = tables_of(blocks, len(groups))
    for number, (group, table) in enumerate(zip(groups, tables, strict=True)):
        unit, begin = group.token_unit, table.skipped and table.skipped * group.block_tokens
        missing = max(first_token, begin)
        if missing >= num_tokens:
            continue
        if group.is_state:
            states = [Rows(of_source[number].lease) for of_source in leases]
            target = Rows(group.cache, table.blocks)
            if len(table.blocks) != 1:
                raise invalid(f"{group.name}: a state is one block, not {shown(table.blocks)}")
            transfers[group.name] = _transfer(states, target, None, rank)
            nbytes += group.block_nbytes
            continue
        if missing % unit:
            raise invalid(f"first_token={missing} must be a multiple of {unit}")
        first = leases[0][number].first_token
        rows = []
        for source_leases in leases:
            lease, starts = source_leases[number]
            if starts > missing or starts != first:
                raise not_exist(
                    f"token {missing} is missing{group.name and ' of '}{group.name}; the producer "
                    f"only has tokens from {max(starts, first)} on"
                )
            rows.append(Rows(lease, None, None, (missing - starts) // unit))
        if not (mine := group.units_between(missing, num_tokens)):
            continue
        units = -(-num_tokens // unit) - missing // unit
        # The table may include blocks for future tokens.
        held = -(-num_tokens // group.block_tokens) - table.skipped
        target = Rows(group.cache, table.blocks[:held], None, (missing - begin) // unit)
        transfers[group.name] = _transfer(rows, target, units, rank)
        nbytes += mine * group.unit_nbytes
    return transfers, nbytes


def _transfer(sources: list[Rows], target: Rows, units: int | None, rank: int) -> Transfer:
    if len(sources) == 1:
        return Transfer(sources[0], target, units)
    return Transfer(sources, target, units, rank=rank)


@dataclass(frozen=True)
class Place:
    """The place of a worker in its serving engine.

    Args:
        rank, ranks: the worker's rank and the number of ranks, in the order of heads, among the
            workers of its stage that have the same tokens (tensor parallelism).
        stage: index of the worker's stage.
        stages: the layers of each stage: the first, and one past the last; None: all. Sources of an
            engine with several stages name their layers, too.
        context: the tokens of each request that the worker has (context parallelism); None: all.
            Sources of such an engine name their context, too.
        copy, copies: the worker's number and the number of workers, among those that have the same
            part of each request and only share out the computation of prompts.
    """

    rank: int = 0
    ranks: int = 1
    stage: int = 0
    stages: tuple[LayerRange | None, ...] = (None,)
    context: Interleaved | None = None
    copy: int = 0
    copies: int = 1

    @property
    def layers(self) -> LayerRange | None:
        """The layers of the worker's stage; None: all."""
        return self.stages[self.stage]

    @property
    def contexts(self) -> int:
        """The number of workers that share out the tokens of each request."""
        return 1 if self.context is None else self.context.ranks


class Held(NamedTuple):
    """The layers and tokens of each request that a source has."""

    layers: LayerRange | None = None  # None: all
    context: Context | None = None  # None: all tokens


class Share(NamedTuple):
    """A worker's share of a producer's workers."""

    mine: tuple[int, ...]  # workers that it reads, in order of layers, tokens and heads
    spare: tuple[int, ...]  # workers without a reader, which it tells to free the blocks
    readers: tuple[int, ...]  # for each source, the number of workers that report to it


@lru_cache(64)
def share_of(place: Place, num_heads: int, sources: tuple[Held, ...]) -> Share:
    """Return a worker's share in a producer whose workers have these layers and tokens."""
    owners_of: dict[Held, list[int]] = {}
    for owner, held in enumerate(sources):
        owners_of.setdefault(held, []).append(owner)
    _check_contexts(owners_of)
    parts = [
        (held.layers, held.context and Interleaved(*held.context), owners)
        for held, owners in owners_of.items()
    ]
    shares: dict[Place, list[int]] = {}
    counts = [0] * len(sources)
    for worker in _workers(place):
        shares[worker] = [
            owners[at]
            for layers, context, owners in parts
            if _overlap(layers, worker.layers) and _have_common_tokens(context, worker.context)
            for at in read_from(worker.rank, worker.ranks, len(owners), num_heads, _turn(worker))
        ]
        for owner in shares[worker]:
            counts[owner] += 1
    if not (mine := shares[place]):
        layers = tuple([held.layers for held in sources])
        raise invalid(f"no source has layers of {place.layers}: {shown(layers)}")
    is_first = place == next(iter(shares))
    spare = [owner for owner, count in enumerate(counts) if is_first and not count]
    return Share(tuple(mine), tuple(spare), tuple(max(1, count) for count in counts))


def _workers(place: Place) -> Iterator[Place]:
    """Yield the places of all workers of an engine, the first one first."""
    context = place.context
    contexts = [None] if context is None else _contexts(context.ranks, context.size)
    for stage, tokens, rank, copy in product(
        range(len(place.stages)), contexts, range(place.ranks), range(place.copies)
    ):
        yield replace(place, stage=stage, context=tokens, rank=rank, copy=copy)


def _turn(place: Place) -> int:
    """Return the number of a worker in its stage, by which it chooses among equal sources."""
    rank = 0 if place.context is None else place.context.rank
    return (place.rank * place.contexts + rank) * place.copies + place.copy


def _contexts(ranks: int, size: int) -> list[Interleaved]:
    return [Interleaved(rank, ranks, size) for rank in range(ranks)]


def _check_contexts(sources: Collection[Held]) -> None:
    """Refuse sources that do not have all ranks of their contexts."""
    found: dict[LayerRange | None, set[Context | None]] = {}
    for held in sources:
        found.setdefault(held.layers, set()).add(held.context)
    for contexts in found.values():
        some = next(iter(contexts)) or (0, 1, 1)
        if contexts not in (
            {None},
            {(rank, *some[1:]) for rank in range(min(some[1], len(contexts) + 1))},
        ):
            raise invalid(
                f"the sources of some layers have contexts {shown(sorted(contexts, key=str))}; "
                "they must be None, or [rank, ranks, size] for each rank in [0, ranks)"
            )


def _overlap(some: LayerRange | None, others: LayerRange | None) -> bool:
    return not (some and others) or (some[0] < others[1] and others[0] < some[1])


def _have_common_tokens(one: Interleaved | None, other: Interleaved | None) -> bool:
    """Return True if a request that is long enough has a token at both ranks."""
    if one is None or other is None:
        return True
    # Runs of tokens begin at all distances that are equal to `apart` modulo the common divisor.
    common = gcd(one.ranks * one.size, other.ranks * other.size)
    apart = (one.rank * one.size - other.rank * other.size) % common
    return apart < other.size or common - apart < one.size


def heads_of(rank: int, ranks: int, num_heads: int) -> range:
    """Return the KV heads of a worker. Several workers share a head if they outnumber the heads."""
    if num_heads % ranks == 0:
        each = num_heads // ranks
        return range(rank * each, (rank + 1) * each)
    if ranks % num_heads == 0:
        head = rank * num_heads // ranks
        return range(head, head + 1)
    raise invalid(f"num_heads={num_heads} must be a multiple or a divisor of {ranks} workers")


def read_from(rank: int, ranks: int, owners: int, num_heads: int, turn: int) -> list[int]:
    """Return the producer's workers that worker `rank` reads, in order of heads.

    Of workers with the same heads, `turn` chooses one.
    """
    wanted = heads_of(rank, ranks, num_heads)
    each = len(heads_of(0, owners, num_heads))
    found = range(wanted.start // each, (wanted.stop - 1) // each + 1)
    copies = max(1, owners // num_heads)  # of each head, shared out among the readers
    return [owner * copies + turn % copies for owner in found]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[tuple[bytes, Number], ...])


def encode_leases(leases: Sequence[GroupLease]) -> bytes:
    """Return leases as bytes, for the wire."""
    return _encoder.encode([(lease.to_bytes(), first) for lease, first in leases])


def decode_leases(blob: bytes) -> tuple[GroupLease, ...]:
    """Read and check the result of `encode_leases`."""
    try:
        found = _decoder.decode(blob)
    except Exception as error:  # of any kind: nested input raises RecursionError
        raise invalid(f"data={shown(blob)} is not a grant of leases: {error}") from None
    return tuple([GroupLease(BlockLease.from_bytes(lease), first) for lease, first in found])
