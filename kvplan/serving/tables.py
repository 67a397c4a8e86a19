"""Groups of caches, block tables of requests in them, and shares of tensor parallel workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple, cast

import msgspec

from kvplan.lease import BlockLease
from kvplan.planning.transfer import Rows, Transfer
from kvplan.serving.messages import LayerRange, Number, gone
from kvplan.status import invalid
from kvplan.types import Cache
from kvplan.validation import shown


@dataclass(frozen=True)
class CacheGroup:
    """A paged cache of those layers of a model that share a block table.

    A cache whose layout has no axis `token` has states (Mamba): a request has one block of it, the
    state after all of its tokens, which always moves whole.

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
        """True if the cache has states, which no token divides."""
        return (
            self.cache.cache_desc.layout is not None and self.cache.cache_desc.seq_len_dim_index < 0
        )

    @cached_property
    def block_tokens(self) -> int:
        """The number of tokens of a block."""
        desc = self.cache.cache_desc
        return desc.shape[desc.seq_len_dim_index] * self.token_unit

    @cached_property
    def unit_nbytes(self) -> int:
        """The bytes of `token_unit` tokens in all layers."""
        return (
            self.block_nbytes
            // self.cache.cache_desc.shape[self.cache.cache_desc.seq_len_dim_index]
        )

    @cached_property
    def block_nbytes(self) -> int:
        """The bytes of a block in all layers."""
        desc = self.cache.cache_desc
        return desc.nbytes // desc.batch_size


@dataclass(frozen=True)
class Table:
    """A request's blocks in the cache of one group.

    Args:
        blocks: blocks of the request's tokens in their order, after the skipped ones.
        skipped: number of earlier blocks that the request no longer has, as a sliding window has
            passed their tokens.
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
    names = [group.name for group in cache]
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
    for of_source in leases:
        if len(of_source) != len(groups):
            raise invalid(f"got leases of {len(of_source)} groups; this side has {len(groups)}")
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
        for of_source in leases:
            lease, starts = of_source[number]
            if starts > missing or starts != first:
                raise gone(
                    f"token {missing} is missing{group.name and ' of '}{group.name}; the producer "
                    f"only has tokens from {max(starts, first)} on"
                )
            rows.append(Rows(lease, None, None, (missing - starts) // unit))
        units = -(-num_tokens // unit) - missing // unit
        # The table may include blocks for future tokens.
        held = -(-num_tokens // group.block_tokens) - table.skipped
        target = Rows(group.cache, table.blocks[:held], None, (missing - begin) // unit)
        transfers[group.name] = _transfer(rows, target, units, rank)
        nbytes += units * group.unit_nbytes
    return transfers, nbytes


def _transfer(sources: list[Rows], target: Rows, units: int | None, rank: int) -> Transfer:
    if len(sources) == 1:
        return Transfer(sources[0], target, units)
    return Transfer(sources, target, units, rank=rank)


@dataclass(frozen=True)
class Place:
    """The place of a worker in its serving engine, under tensor and pipeline parallelism.

    Args:
        rank, ranks: the worker's rank in its stage, and the number of workers there.
        stage: index of the worker's stage.
        stages: the layers of each stage: the first, and one past the last; None: all. Sources of an
            engine with several stages name their layers, too.
    """

    rank: int = 0
    ranks: int = 1
    stage: int = 0
    stages: tuple[LayerRange | None, ...] = (None,)

    @property
    def layers(self) -> LayerRange | None:
        """The layers of the worker's stage; None: all."""
        return self.stages[self.stage]


class Share(NamedTuple):
    """The producer's workers that a consumer's worker reads."""

    mine: tuple[int, ...]  # workers that this worker reads, in order of layers and of heads
    spare: tuple[int, ...]  # workers that no worker reads, and that this one frees
    readers: tuple[int, ...]  # number of workers that report to each that they are done


@lru_cache(64)
def share_of(place: Place, num_heads: int, sources: tuple[LayerRange | None, ...]) -> Share:
    """Return a worker's share in a producer whose workers have these layers."""
    by_layers: dict[LayerRange | None, list[int]] = {}
    for owner, layers in enumerate(sources):
        by_layers.setdefault(layers, []).append(owner)
    mine: list[int] = []
    counts = [0] * len(sources)
    for layers, owners in by_layers.items():
        ranks = range(place.ranks)
        reads = [read_from(rank, place.ranks, len(owners), num_heads) for rank in ranks]
        for stage, wanted in enumerate(place.stages):
            if layers and wanted and not (layers[0] < wanted[1] and wanted[0] < layers[1]):
                continue
            for at in chain(*reads):
                counts[owners[at]] += 1
            if stage == place.stage:
                mine += [owners[at] for at in reads[place.rank]]
    if not mine:
        raise invalid(f"no source has layers of {place.layers}: {shown(sources)}")
    is_first = place.rank == place.stage == 0
    spare = [owner for owner, count in enumerate(counts) if is_first and not count]
    return Share(tuple(mine), tuple(spare), tuple(max(1, count) for count in counts))


def heads_of(rank: int, ranks: int, num_heads: int) -> range:
    """Return the KV heads of a worker. Several workers share a head if they outnumber the heads."""
    if num_heads % ranks == 0:
        each = num_heads // ranks
        return range(rank * each, (rank + 1) * each)
    if ranks % num_heads == 0:
        head = rank * num_heads // ranks
        return range(head, head + 1)
    raise invalid(f"num_heads={num_heads} must be a multiple or a divisor of {ranks} workers")


def read_from(rank: int, ranks: int, owners: int, num_heads: int) -> list[int]:
    """Return the producer's workers that worker `rank` reads, in order of heads."""
    wanted = heads_of(rank, ranks, num_heads)
    each = len(heads_of(0, owners, num_heads))
    found = range(wanted.start // each, (wanted.stop - 1) // each + 1)
    copies = max(1, owners // num_heads)  # of each head, shared out among the readers
    return [owner * copies + rank % copies for owner in found]


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
