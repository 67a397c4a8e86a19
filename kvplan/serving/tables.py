"""Caches of several groups of layers, and a request's blocks in each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import msgspec

from kvplan.lease import BlockLease
from kvplan.planning.transfer import Rows, Transfer
from kvplan.serving.messages import Number
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import Cache
from kvplan.validation import shown


@dataclass(frozen=True)
class CacheGroup:
    """A paged cache of layers that share a block table, beside others of the same model.

    Args:
        name: what plans and errors call it; unlike those of the other groups.
        cache: of these layers, with a layout.
        token_unit: as of `Exchange`.
    """

    name: str
    cache: Cache
    token_unit: int = 1

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        desc = self.cache.cache_desc
        return desc.shape[desc.seq_len_dim_index] * self.token_unit

    @property
    def unit_nbytes(self) -> int:
        """Bytes of `token_unit` tokens, in all layers."""
        desc = self.cache.cache_desc
        return desc.nbytes // (desc.batch_size * desc.shape[desc.seq_len_dim_index])


@dataclass(frozen=True)
class Table:
    """A request's blocks in the cache of one group.

    Args:
        blocks: of the request's tokens in their order, after those of `skipped`.
        skipped: blocks before them that the request has no more, or never had here: a sliding
            window has left their tokens behind, and nobody reads them.
    """

    blocks: Sequence[int]
    skipped: int = 0


Blocks = Sequence[int] | Sequence[Table]
"""A request's blocks: of the only cache, or a table for each group in their order."""


class GroupLease(NamedTuple):
    """What a producer has of a request in the cache of one group.

    Attributes:
        first_token: of the first block that is leased.
    """

    lease: BlockLease
    first_token: int


def groups_of(cache: Cache | Sequence[CacheGroup], token_unit: int = 1) -> tuple[CacheGroup, ...]:
    """The groups that a caller has, or the one of its only cache."""
    if isinstance(cache, Cache):
        return (CacheGroup("", cache, token_unit),)
    names = [it.name for it in cache]
    if not names or len(set(names)) < len(names):
        raise invalid(f"cache={shown(names)} must be one or more groups of unlike names")
    return tuple(cache)


def tables_of(blocks: Blocks, groups: int) -> tuple[Table, ...]:
    """A table for each group."""
    if groups == 1 and not (len(blocks) and isinstance(blocks[0], Table)):
        return (Table(cast("Sequence[int]", blocks)),)
    tables = tuple(it for it in blocks if isinstance(it, Table))
    if len(tables) != len(blocks) or len(tables) != groups:
        raise invalid(f"blocks={shown(blocks)} must have a Table for each of {groups} groups")
    return tables


@dataclass(frozen=True)
class Missing:
    """What a consumer pulls of one group, from each source; tokens are counted in units.

    Attributes:
        leases: of the sources, in their order.
        nbytes: that are moved.
        others: as of `Rows` and `Transfer`.
    """

    name: str
    leases: Sequence[BlockLease]
    dst: Cache
    dst_blocks: Sequence[int]
    num_tokens: int
    src_token: int
    dst_token: int
    nbytes: int

    def transfer(self, rank: int | None) -> Transfer:
        """From all sources into the consumer's cache."""
        rows = [Rows(lease, None, None, self.src_token) for lease in self.leases]
        target = Rows(self.dst, self.dst_blocks, None, self.dst_token)
        if len(rows) == 1:
            return Transfer(rows[0], target, self.num_tokens)
        return Transfer(rows, target, self.num_tokens, rank=rank)


def missing_of(
    groups: Sequence[CacheGroup],
    leases: Sequence[Sequence[GroupLease]],
    blocks: Blocks,
    first_token: int,
    num_tokens: int,
) -> list[Missing]:
    """What is to be pulled of each group that lacks something.

    A group whose table skips blocks lacks nothing before the first that it has: a block moves
    whole, as others may use it later.
    """
    if odd := [len(it) for it in leases if len(it) != len(groups)]:
        raise invalid(f"leases of {odd[0]} groups came, and here are {len(groups)}")
    found = []
    for number, (group, table) in enumerate(
        zip(groups, tables_of(blocks, len(groups)), strict=True)
    ):
        unit, begin = group.token_unit, table.skipped and table.skipped * group.block_tokens
        missing = max(first_token, begin)
        if missing >= num_tokens:
            continue
        if missing % unit:
            raise invalid(f"first_token={missing} must be a multiple of {unit}")
        theirs = [it[number] for it in leases]
        first = theirs[0].first_token
        if first > missing or any(it.first_token != first for it in theirs):
            starts = ", ".join(str(it.first_token) for it in theirs)
            raise LLMException(
                f"token {missing} is missing{group.name and ' of '}{group.name}, and the producer "
                f"has only those from {starts} on",
                status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            )
        units = -(-num_tokens // unit) - missing // unit
        # A consumer may hold blocks for tokens to come.
        held = -(-num_tokens // group.block_tokens) - table.skipped
        found.append(
            Missing(
                group.name,
                [it.lease for it in theirs],
                group.cache,
                table.blocks[:held],
                units,
                (missing - first) // unit,
                (missing - begin) // unit,
                units * group.unit_nbytes,
            )
        )
    return found


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[tuple[bytes, Number], ...])


def encode_leases(leases: Sequence[GroupLease]) -> bytes:
    """What a producer grants, for the wire."""
    return _encoder.encode([(it.lease.to_bytes(), it.first_token) for it in leases])


def decode_leases(blob: bytes) -> tuple[GroupLease, ...]:
    """Check and read what `encode_leases` has written."""
    try:
        found = _decoder.decode(blob)
    except Exception as error:  # the peer's input decides which: nesting raises RecursionError
        raise invalid(f"data={shown(blob)} is no grant of leases: {error}") from None
    return tuple(GroupLease(BlockLease.from_bytes(lease), first) for lease, first in found)
