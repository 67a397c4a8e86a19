"""The records of a recording as typed values, and queries: by tag, peer, time or block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.part import Part
from kvplan.planning.plan import Plan
from kvplan.planning.side import Side
from kvplan.recording.format import Field, Header, PartRow, TemplateRow, plan_of, rows_of
from kvplan.status import LLMStatusCode, invalid
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
        *("fingerprint", "lease_moved", "observe", "sums", "warning"),
    )
)
"""Names by which `select` finds rows: operations of engines, and the verbs pull, push, ..."""

PUSHES: Final = "push"
"""The verb of transfers that write into a peer's cache."""


@dataclass(frozen=True)
class TransferRecord:
    """A transfer or a notification that has ended, successfully or not.

    Attributes:
        number: position among the rows of the recording as read, from 0.
        time: the beginning, in seconds since the epoch.
        seconds: the duration.
        operation: the call, such as "pull_blocks".
        cluster_id: the recorded engine.
        peer: the peer's cluster id; None: inside the process, or no link was found.
        cache_id: cache of the recorded engine, for a copy the source; -1: no cache was found.
        tag: the caller's tag.
        leases: ids of the peer's leases that were used.
        status: the outcome.
        error: reason for the failure; empty on success.
        nbytes: bytes that have arrived; 0 if the transfer failed.
        parts: the recorded parts of `plan`.
    """

    number: int
    time: float
    seconds: float
    operation: str
    cluster_id: int
    peer: int | None
    cache_id: int
    tag: str
    leases: tuple[int, ...]
    status: LLMStatusCode
    error: str
    nbytes: int
    parts: tuple[PartRow, ...] = field(repr=False)
    _templates: dict[int, TemplateRow] = field(repr=False, compare=False)

    @property
    def failed(self) -> bool:
        """True if the transfer failed; a cancelled one did not."""
        return self.status.is_failure

    @property
    def verb(self) -> str:
        """The direction: pull (also of gathers), push, copy or swap; notify: no bytes move."""
        verb = self.operation.partition("_")[0]
        return "pull" if verb == "gather" else verb

    @cached_property
    def plan(self) -> Plan | None:
        """A plan equal to the executed one; None: a notification, or no plan was made.

        Raises:
            LLMException: LLM_PARAM_INVALID: the recording is damaged.
        """
        for number in {part.template for part in self.parts} - self._templates.keys():
            raise invalid(
                f"transfer {self.number}: its template {number} is in no file that was read"
            )
        try:
            return plan_of(self._templates, self.parts)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise invalid(f"transfer {self.number} is damaged: {error!r}") from None

    @property
    def blocks(self) -> int:
        """Number of rows in the destination's block tables; 0 without block tables."""
        return sum(len(part.dst) // 8 for part in self.parts)

    def may_write(self, cache: int, row: int) -> bool:
        """Return True if the transfer may have written this row; does not make `plan`.

        Args:
            cache: id of the cache in the engine of the destination.
            row: a block or slot of it.

        Raises:
            LLMException: LLM_PARAM_INVALID: the recording is damaged.
        """
        return any(
            dst == cache and (not part.dst or row in rows_of(part.dst))
            for part, (_, dst) in zip(self.parts, self.caches, strict=True)
        )

    @property
    def caches(self) -> list[tuple[int, int]]:
        """Ids of the source and destination cache of each part; observers number those of peers."""
        known = (self._templates.get(part.template) for part in self.parts)
        return [(-1, -1) if template is None else template.cache_ids for template in known]


@dataclass(frozen=True)
class Write:
    """A transfer that wrote a block or a slot, or tried to.

    Attributes:
        transfer: the transfer; its `cluster_id` tells which engine ran it.
        label: the label of its part; empty if there is only one.
        source: the cluster that the bytes came from; None: this process.
        src_cache: the id of the source cache in that cluster; -1: unknown.
        src_rows: the source blocks (or slot), in the order of the destination's bytes.
        partial: True if the transfer does not write all bytes that the block has in all tensors.
    """

    transfer: TransferRecord
    label: str
    source: int | None
    src_cache: int
    src_rows: tuple[int, ...]
    partial: bool

    def __str__(self) -> str:
        """Return `#7 pull_blocks of request 3: from block 9 of cache 1 of cluster 2`."""
        transfer = self.transfer
        rows = ", ".join(map(str, self.src_rows[:8])) + (" ..." if len(self.src_rows) > 8 else "")
        cache = "a cache" if self.src_cache < 0 else f"cache {self.src_cache}"
        source = "of this engine" if self.source is None else f"of cluster {self.source}"
        word = "block" if len(self.src_rows) == 1 else "blocks"
        # A push was run by a peer of the engine that owns the cache.
        by = f", run by cluster {transfer.cluster_id}" if transfer.verb == PUSHES else ""
        label = f", part {self.label}" if self.label else ""
        tag = f" of {transfer.tag}" if transfer.tag else ""
        part = ", a part of it" if self.partial else ""
        how = "failed" if transfer.failed else "was cancelled"
        failed = f"; {how}, and may have written it: {transfer.error}" if transfer.error else ""
        return (
            f"#{transfer.number} {transfer.operation}{tag}: from {word} {rows} of {cache} {source}"
            f"{label}{part}{by}{failed}"
        )


@dataclass(frozen=True)
class Event:
    """An event other than a transfer, such as of a link, a lease or a cache.

    Attributes:
        number, time, seconds, status, error: as in `TransferRecord`.
        operation: name, such as "link_state", "lease", "release", "unregister_cache".
        fields: the arguments, by name.
    """

    number: int
    time: float
    seconds: float
    operation: str
    status: LLMStatusCode
    error: str
    fields: dict[str, Field]

    @property
    def failed(self) -> bool:
        """True if the operation failed; a cancelled one did not."""
        return self.status.is_failure


@dataclass(frozen=True)
class Dropped:
    """A gap in the recording.

    Attributes:
        number, time: as in `TransferRecord`.
        count: number of missing rows; None: a file of the recording is missing.
    """

    number: int
    time: float
    count: int | None


AnyRecord = TransferRecord | Event | Dropped


class Recording:
    """The rows of a recording.

    Attributes:
        path: the file.
        header: the header of the oldest file that exists.
        rows: all records, in the order in which the operations ended.
        complete: True if the recording was closed; False: it was cut off or is still open.
    """

    def __init__(self, path: Path, header: Header, rows: list[AnyRecord], complete: bool) -> None:
        self.path = path
        self.header = header
        self.rows = rows
        self.complete = complete

    def __iter__(self) -> Iterator[AnyRecord]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def transfers(self) -> list[TransferRecord]:
        """The transfers among the rows."""
        return [row for row in self.rows if isinstance(row, TransferRecord)]

    @property
    def events(self) -> list[Event]:
        """The events among the rows."""
        return [row for row in self.rows if isinstance(row, Event)]

    @property
    def dropped(self) -> int:
        """Number of rows that are known to be missing."""
        return sum(row.count or 0 for row in self.rows if isinstance(row, Dropped))

    def __repr__(self) -> str:
        head = self.header
        return (
            f"<Recording of cluster {head.cluster_id}, process {head.pid} on {head.host}: "
            f"{len(self.transfers)} transfers, {len(self.rows)} rows>"
        )


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
    """Yield the transfers and events that meet all of these conditions.

    Args:
        records: the records to filter.
        tag: tag of the transfer or the lease; a tag that ends in `*` is a prefix.
        cluster: cluster id of the peer.
        operation: name such as "pull_blocks", or verb such as "pull".
        since, until: limits for `time`, in seconds since the epoch.
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
    """Return the transfers that wrote a block of a cache of the recorded engine, by end time.

    Failed transfers are included, because they may have written a part of the block. Pushes into
    the cache are recorded by the peers that run them: give their recordings as `others`.

    Args:
        recording: recording of the engine that owns the cache.
        cache: id of the cache.
        block: a block of it, or the slot of a contiguous cache.
        others: recordings of peers.

    Raises:
        TypeError, ValueError: not an id, or not a recording.
        LLMException: LLM_PARAM_INVALID: a recording is damaged, or another one is of this engine.
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
            raise invalid(f"others: {other!r} is of cluster {here} itself; give those of peers")
        for transfer in other.transfers:
            if transfer.verb == PUSHES and transfer.peer == here:
                found += _writes(transfer, cache, block, transfer.cluster_id)
    return sorted(found, key=lambda write: write.transfer.time + write.transfer.seconds)


def rows_written(part: Part, block: int) -> tuple[tuple[int, ...], bool] | None:
    """Return the source rows of a block, and True if only a part is written; None: nothing is."""
    runs = part.segments.expanded()
    src, dst, nbytes = (
        column.astype(np.int64) for column in (runs.src_offsets, runs.dst_offsets, runs.nbytes)
    )
    stride = part.dst.stride
    # A tensor may have an axis outside its rows: rows begin again after a period.
    period, within = stride * part.dst.count, block * stride

    def before(ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of bytes of the row before each of these offsets."""
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
    """Yield a `Write` for each part of a transfer that wrote the block."""
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
