"""What a recording has, as typed values."""

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
    """Whose recording it is.

    Attributes:
        recording: 16 hexadecimal digits, which all files of one recording share.
        file: counts the files of a recording from 0.
        version: of kvplan, which has written it.
        host, pid: of the process.
        cluster_id, role: of the engine.
        started: of this file, in seconds since the epoch.
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
    """A transfer that has ended, well or not.

    Attributes:
        number: counts the rows of the recording that was read, from 0.
        time: when it began, in seconds since the epoch.
        seconds: how long it took.
        operation: the call, such as "pull_blocks".
        cluster_id: of the engine that is recorded.
        peer: its cluster id; None: inside of the process.
        cache_id: of the cache of this process that takes part; the source, where both do; -1: none
            was found.
        tag: as the caller gave it.
        leases: ids of the peer's leases by which it moved.
        status: how it ended.
        error: why it failed; empty: it did not.
        nbytes: bytes that have arrived; of one that failed 0, however far it came.
        parts: what each part of `plan` is made of.
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
        """Whether it has failed: a cancelled one has not."""
        return self.status.is_failure

    @property
    def verb(self) -> str:
        """Which way its bytes go: pull, push, copy or swap; gathers pull."""
        verb = self.operation.partition("_")[0]
        return "pull" if verb == "gather" else verb

    @cached_property
    def plan(self) -> Plan | None:
        """The plan that was executed, equal to it; None: it failed before there was one.

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
        """Rows of the destination's block tables; 0: none was used."""
        return sum(len(it.dst) // 8 for it in self.parts)

    def may_write(self, cache: int, row: int) -> bool:
        """Whether its destination may be this row of this cache, as far as is known without plans.

        Args:
            cache: its id, in the engine of the destination.
            row: a block or slot of it.

        Raises:
            LLMException: LLM_PARAM_INVALID: the recording is damaged.
        """
        return any(
            dst == cache and (not it.dst or row in rows_of(it.dst))
            for it, (_, dst) in zip(self.parts, self.caches, strict=True)
        )

    @property
    def caches(self) -> list[tuple[int, int]]:
        """Ids of the source and the destination cache of each part, each in its own engine."""
        known = (self._templates.get(it.template) for it in self.parts)
        return [(-1, -1) if it is None else it.cache_ids for it in known]


@dataclass(frozen=True)
class Write:
    """A transfer that wrote a block, or a slot, or was to.

    Attributes:
        transfer: which; its cluster_id says who ran it.
        label: of the part of the transfer; empty: the only one.
        source: the cluster that the bytes came from; None: this process.
        src_cache: the cache that they came from, in that cluster; -1: not known.
        src_rows: the blocks (or slot) that they came from, in the order of the destination's bytes.
        partial: whether only a part of the block was written, of all tensors of the cache.
    """

    transfer: TransferRecord
    label: str
    source: int | None
    src_cache: int
    src_rows: tuple[int, ...]
    partial: bool

    def __str__(self) -> str:
        """`#7 pull_blocks of request 3: from block 9 of cache 1 of cluster 2`."""
        it = self.transfer
        rows = ", ".join(map(str, self.src_rows[:8])) + (" ..." if len(self.src_rows) > 8 else "")
        cache = "a cache" if self.src_cache < 0 else f"cache {self.src_cache}"
        source = "of this engine" if self.source is None else f"of cluster {self.source}"
        word = "block" if len(self.src_rows) == 1 else "blocks"
        # Who has pushed into a cache was its peer: this is of the engine that has the cache.
        by = f", run by cluster {it.cluster_id}" if it.verb == PUSHES else ""
        label = f", part {self.label}" if self.label else ""
        tag = f" of {it.tag}" if it.tag else ""
        part = ", a part of it" if self.partial else ""
        how = "failed" if it.failed else "was cancelled"
        failed = f"; {how}, and may have written it: {it.error}" if it.error else ""
        return (
            f"#{it.number} {it.operation}{tag}: from {word} {rows} of {cache} {source}{label}{part}"
            f"{by}{failed}"
        )


@dataclass(frozen=True)
class Event:
    """What else an engine has done: links, leases, caches.

    Attributes:
        number, time, seconds, status, error: as of a transfer.
        operation: such as "link_state", "lease", "release", "unregister_cache".
        fields: what it was about, by name.
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
        """Whether it has failed: a cancelled one has not."""
        return self.status.is_failure


@dataclass(frozen=True)
class Dropped:
    """Rows are missing here.

    Attributes:
        number, time: as of a transfer.
        count: how many; None: a file of the recording is missing.
    """

    number: int
    time: float
    count: int | None


AnyRecord = TransferRecord | Event | Dropped


class Recording:
    """The rows of a recording, as they were read.

    Attributes:
        header: of its first file that is there.
        rows: all of them, in the order in which they were written: when a transfer has ended.
        complete: whether it was ended, and not cut off or still written.
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
        return [it for it in self.rows if isinstance(it, TransferRecord)]

    @property
    def events(self) -> list[Event]:
        """What else was done."""
        return [it for it in self.rows if isinstance(it, Event)]

    def who_wrote(self, cache: int, block: int, others: Sequence[Recording] = ()) -> list[Write]:
        """Every transfer that wrote a block of a cache of this engine: see `who_wrote`."""
        from kvplan.recording.queries import who_wrote  # it takes recordings: not at the top

        return who_wrote(self, cache, block, others)

    @property
    def dropped(self) -> int:
        """How many rows are known to be missing."""
        return sum(it.count or 0 for it in self.rows if isinstance(it, Dropped))

    def __repr__(self) -> str:
        head = self.header
        return (
            f"<Recording of cluster {head.cluster_id}, process {head.pid} on {head.host}: "
            f"{len(self.transfers)} transfers, {len(self.rows)} rows>"
        )
