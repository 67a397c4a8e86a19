"""The records of a recording, as typed values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from kvplan.planning.plan import Plan
from kvplan.recording.format import Field, PartRow, TemplateRow, plan_of, rows_of
from kvplan.status import LLMStatusCode, invalid

PUSHES: Final = "push"
"""The verb of transfers that write into a peer's cache."""


@dataclass(frozen=True)
class Header:
    """The origin of a recording.

    Attributes:
        recording: 16 hexadecimal digits that all files of one recording share.
        file: the number of the file in the recording, from 0.
        version: the version of kvplan that wrote it.
        host, pid: the process.
        cluster_id, role: the engine.
        started: the beginning of this file, in seconds since the epoch.
    """

    recording: str
    file: int
    version: str
    host: str
    pid: int
    cluster_id: int
    role: str
    started: float


@dataclass(frozen=True)
class TransferRecord:
    """A transfer that has ended, successfully or not.

    Attributes:
        number: position among the rows of the recording as read, from 0.
        time: the beginning, in seconds since the epoch.
        seconds: the duration.
        operation: the call, such as "pull_blocks".
        cluster_id: the recorded engine.
        peer: the peer's cluster id; None: inside of the process.
        cache_id: the cache of this process, the source if both are; -1: none was found.
        tag: the caller's tag.
        leases: ids of the peer's leases that were used.
        status: the outcome.
        error: why it failed; empty on success.
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
        """Whether the transfer failed; a cancelled one did not."""
        return self.status.is_failure

    @property
    def verb(self) -> str:
        """The direction: pull, push, copy or swap; gathers pull."""
        verb = self.operation.partition("_")[0]
        return "pull" if verb == "gather" else verb

    @cached_property
    def plan(self) -> Plan | None:
        """A plan equal to the executed one; None: the transfer failed before planning.

        Raises:
            LLMException: LLM_PARAM_INVALID: the recording is damaged.
        """
        try:
            return plan_of(self._templates, self.parts)
        except KeyError as error:
            raise invalid(
                f"transfer {self.number}: its template {error} is in no file that was read"
            ) from None
        except (AttributeError, IndexError, OverflowError, TypeError, ValueError) as error:
            raise invalid(f"transfer {self.number} is damaged: {error}") from None

    @property
    def blocks(self) -> int:
        """Rows of the destination's block tables; 0 without block tables."""
        return sum(len(part.dst) // 8 for part in self.parts)

    def may_write(self, cache: int, row: int) -> bool:
        """Whether the transfer may have written this row of this cache, judged without its plan.

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
        """Ids of the source and the destination cache of each part, each in its own engine."""
        known = (self._templates.get(part.template) for part in self.parts)
        return [(-1, -1) if template is None else template.cache_ids for template in known]


@dataclass(frozen=True)
class Write:
    """A transfer that wrote a block or a slot, or was to write it.

    Attributes:
        transfer: the transfer; its `cluster_id` tells which engine ran it.
        label: the label of its part; empty if there is only one.
        source: the cluster that the bytes came from; None: this process.
        src_cache: the id of the source cache in that cluster; -1: unknown.
        src_rows: the source blocks (or slot), in the order of the destination's bytes.
        partial: True if only a part of the block was written, over all tensors of the cache.
    """

    transfer: TransferRecord
    label: str
    source: int | None
    src_cache: int
    src_rows: tuple[int, ...]
    partial: bool

    def __str__(self) -> str:
        """`#7 pull_blocks of request 3: from block 9 of cache 1 of cluster 2`."""
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
    """Anything else that an engine did: links, leases, caches.

    Attributes:
        number, time, seconds, status, error: as of a transfer.
        operation: such as "link_state", "lease", "release", "unregister_cache".
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
        """Whether the operation failed; a cancelled one did not."""
        return self.status.is_failure


@dataclass(frozen=True)
class Dropped:
    """A gap in the recording.

    Attributes:
        number, time: as of a transfer.
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
        header: of the first file that exists.
        rows: all rows in the order in which they were written, at the end of each transfer.
        complete: True if the recording was closed; False if it was cut off or is still written.
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

    def who_wrote(self, cache: int, block: int, others: Sequence[Recording] = ()) -> list[Write]:
        """Return every transfer that wrote a block of a cache of this engine: see `who_wrote`."""
        from kvplan.recording.queries import who_wrote  # it imports this module

        return who_wrote(self, cache, block, others)

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
