"""Queries over recordings: transfers by tag, peer and time, and the writers of a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.part import Part
from kvplan.planning.side import Side
from kvplan.recording.records import PUSHES, AnyRecord, Event, Recording, TransferRecord, Write
from kvplan.status import invalid
from kvplan.validation import INT64_MAX, check_type, check_width

OPERATIONS: Final = frozenset(
    (
        *("pull", "pull_cache", "pull_blocks", "pull_groups", "pull_ranges", "pull_layers"),
        *("push", "push_cache", "push_blocks", "push_groups", "push_ranges", "push_layers"),
        *("copy", "copy_cache", "copy_blocks", "copy_groups", "copy_layers", "swap", "swap_blocks"),
        *("gather_blocks", "gather_groups", "notify", "lease", "release"),
        *("link_state", "link_clusters", "unlink_clusters", "link", "unlink", "set_role"),
        *("allocate_cache", "allocate_blocks_cache", "deallocate_cache"),
        *("register_cache", "register_blocks_cache", "unregister_cache"),
        *("remap_registered_memory", "remove_cache_key", "read_cache", "write_cache"),
        "fingerprint",
    )
)
"""Names by which `select` finds rows: operations of engines, and which way bytes go."""


def select(
    records: Iterable[AnyRecord],
    *,
    tag: str | None = None,
    cluster: int | None = None,
    operation: str | None = None,
    since: float | None = None,
    until: float | None = None,
    failed: bool = False,
) -> Iterator[AnyRecord]:
    """Yield the records that meet all of these conditions.

    Args:
        records: the records to filter.
        tag: tag of the transfer or the lease; a tag that ends in `*` is a prefix.
        cluster: cluster id of the peer.
        operation: such as "pull_blocks"; or a verb such as "pull".
        since, until: limits of the beginning, in seconds since the epoch.
        failed: True to yield only failures.
    """
    for record in records:
        if not isinstance(record, TransferRecord | Event):
            continue
        its_tag, peer, verb = _names_of(record)
        if tag is not None and not _matches(its_tag, tag):
            continue
        if cluster is not None and peer != cluster:
            continue
        if operation is not None and operation not in (record.operation, verb):
            continue
        if (since is not None and record.time < since) or (
            until is not None and record.time > until
        ):
            continue
        if failed and not record.failed:
            continue
        yield record


def who_wrote(
    recording: Recording, cache: int, block: int, others: Sequence[Recording] = ()
) -> list[Write]:
    """Return every transfer that wrote a block of a cache of the recorded engine, oldest first.

    Failed transfers are included, because they may have written a part of it. Pushes of peers are
    in the recordings of these peers.

    Args:
        recording: of the engine that owns the cache.
        cache: id of the cache.
        block: a block of it, or the slot of a contiguous cache.
        others: recordings of peers.

    Raises:
        TypeError, ValueError: not an id.
        LLMException: LLM_PARAM_INVALID: a recording is damaged.
    """
    check_width("cache", cache, 0, INT64_MAX)
    check_width("block", block, 0, INT64_MAX)
    here = recording.header.cluster_id
    found: list[Write] = []
    for transfer in recording.transfers:
        if transfer.verb != PUSHES:
            source = transfer.peer if transfer.verb == "pull" else None
            found += _writes(transfer, cache, block, source)
    for other in others:
        if check_type("others", other, Recording).header.cluster_id == here:
            raise invalid(f"others: {other!r} is of cluster {here} too, which no peer is")
        for transfer in other.transfers:
            if transfer.verb == PUSHES and transfer.peer == here:
                found += _writes(transfer, cache, block, transfer.cluster_id)
    return sorted(found, key=lambda write: write.transfer.time + write.transfer.seconds)


def rows_written(part: Part, block: int) -> tuple[tuple[int, ...], bool] | None:
    """Return the source rows of a written row, and whether only a part is written, or None."""
    runs = part.segments.expanded()
    src, dst, nbytes = (
        column.astype(np.int64) for column in (runs.src_offsets, runs.dst_offsets, runs.nbytes)
    )
    stride = part.dst.stride
    # A tensor may have an axis outside of its rows: they begin again after a period.
    period, within = stride * part.dst.count, block * stride

    def before(ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of the row before each of these offsets."""
        return ends // period * stride + np.clip(ends % period - within, 0, stride)

    written = before(dst + nbytes) - before(dst)
    hit = np.flatnonzero(written > 0)
    if not len(hit):
        return None
    rows: list[int] = []
    for index in hit[np.argsort(dst[hit], kind="stable")].tolist():
        start, end = int(dst[index]), int(dst[index] + nbytes[index])
        for again in range(start // period, (end - 1) // period + 1):
            begin = max(start, again * period + within)
            size = min(end, again * period + within + stride) - begin
            if size > 0:
                rows += _rows_of(part.src, int(src[index]) + begin - start, size)
    whole = part.dst.num_tensors * part.dst.rows_nbytes // part.dst.count
    return tuple(dict.fromkeys(rows)), int(written.sum()) * part.num_tensor_pairs < whole


def _rows_of(side: Side, offset: int, nbytes: int) -> Iterator[int]:
    """Return the rows that a run of bytes touches."""
    first, last = offset // side.stride, (offset + nbytes - 1) // side.stride
    return (row % side.count for row in range(first, min(last, first + side.count - 1) + 1))


def _writes(
    transfer: TransferRecord, cache: int, block: int, source: int | None
) -> Iterator[Write]:
    """Yield what each part of a transfer wrote of a block."""
    caches = transfer.caches
    if not transfer.may_write(cache, block):
        return
    parts = () if transfer.plan is None else transfer.plan.parts
    for part, (src_cache, dst_cache) in zip(parts, caches, strict=True):
        if dst_cache == cache and (written := rows_written(part, block)) is not None:
            yield Write(transfer, part.label, source, src_cache, *written)


def _names_of(record: TransferRecord | Event) -> tuple[str, object, str]:
    """Return tag, peer and verb of a row; an event may lack them."""
    if isinstance(record, TransferRecord):
        return record.tag, record.peer, record.verb
    return str(record.fields.get("tag", "")), record.fields.get("peer"), ""


def _matches(tag: str, wanted: str) -> bool:
    return tag.startswith(wanted[:-1]) if wanted.endswith("*") else tag == wanted
