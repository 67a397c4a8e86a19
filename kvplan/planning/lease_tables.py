"""Block tables and token counts that leases give to transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from kvplan.lease import BlockLease
from kvplan.planning.blocks import RequestBlocks
from kvplan.planning.transfer import Rows, Transfer
from kvplan.status import invalid

if TYPE_CHECKING:
    from kvplan.planning.blocks import Blocks


Latest = Callable[[BlockLease], BlockLease]
"""Returns the latest value of a lease, whose owner may have moved blocks."""


def followed(argument: str, rows: Rows, latest: Latest) -> Rows:
    """Return rows with the latest value of their lease, and with the blocks that it has now."""
    lease = rows.cache
    if not isinstance(lease, BlockLease) or (now := latest(lease)) is lease:
        return rows
    blocks = now.places_of(f"{argument}.blocks", lease, rows.blocks)
    slot = now.blocks[0] if lease.blocks == (rows.slot,) else rows.slot
    return replace(rows, cache=now, blocks=blocks, slot=slot)


def with_lease_tables(transfer: Transfer, latest: Latest) -> Transfer:
    """Return a transfer with the block tables and token counts of its leases' latest values."""
    src = transfer.src
    named_rows = {"dst": transfer.dst}
    if isinstance(src, Rows):
        named_rows["src"] = src
    else:
        named_rows |= {f"src[{index}]": rows for index, rows in enumerate(src)}
    for field, rows in named_rows.items():
        named_rows[field] = followed(field, rows, latest)
    leased = [rows for rows in named_rows.values() if _is_leased(rows)]
    num_tokens = _num_tokens(leased, transfer.num_tokens) if leased else transfer.num_tokens
    written, *read = [
        _with_table(f"{field}.blocks", rows, num_tokens) if _is_leased(rows) else rows
        for field, rows in named_rows.items()
    ]
    sources = read[0] if isinstance(src, Rows) else read
    return replace(transfer, src=sources, dst=written, num_tokens=num_tokens)


def _is_leased(rows: Rows) -> bool:
    """Return whether a lease of blocks names the rows."""
    return isinstance(rows.cache, BlockLease) and rows.cache.paged


def _with_table(argument: str, rows: Rows, num_tokens: int | None) -> Rows:
    lease = cast(BlockLease, rows.cache)
    if rows.blocks is None and num_tokens is not None:
        blocks: Blocks = RequestBlocks(lease.blocks)
    else:
        blocks = lease.named(argument, rows.blocks)
    return replace(rows, blocks=blocks)


def _num_tokens(rows: Sequence[Rows], given: int | None) -> int | None:
    """Return the number of tokens of leases whose blocks all move; without any, the given one."""
    counts = {
        lease.num_tokens("num_tokens", given, its.first_token)
        for its in rows
        if (lease := cast(BlockLease, its.cache)).tokens is not None and its.blocks is None
    }
    if len(counts) > 1:
        raise invalid(
            "num_tokens must be given: the leases are of requests of "
            f"{sorted(filter(None, counts))} tokens"
        )
    return counts.pop() if counts else given
