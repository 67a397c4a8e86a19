"""Recordings, read: rows as typed values, also of a file that is still written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvplan.planning.groups import GroupPlan
from kvplan.recording.format import (
    MAGIC,
    DroppedRow,
    EndRow,
    EventRow,
    Field,
    HeaderRow,
    PartRow,
    TemplateRow,
    TransferRow,
    plan_of,
    row_in,
    rows_of,
)
from kvplan.status import LLMException, LLMStatusCode, invalid

if TYPE_CHECKING:
    from kvplan.planning.groups import AnyPlan
    from kvplan.planning.plan import Plan

_CHUNK: Final = 4 << 20
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # of a FIFO nobody is waited for
_MOST_S: Final = 2.0**36  # seconds since the epoch: some 2000 years
_MAX_FILES: Final = 1000


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
class Transfer:
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
        parts: what `plan` is made of, of each group.
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
        """Whether it has failed."""
        return self.status is not LLMStatusCode.LLM_SUCCESS

    @property
    def verb(self) -> str:
        """Which way its bytes go: pull, push, copy or swap; gathers pull."""
        verb = self.operation.partition("_")[0]
        return "pull" if verb == "gather" else verb

    @property
    def within(self) -> bool:
        """Whether it copied inside of one cache."""
        return self.peer is None and all(src == dst >= 0 for src, dst in self.caches)

    @cached_property
    def plan(self) -> AnyPlan | None:
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
    def plans(self) -> dict[str, Plan]:
        """The plan of each group; of a transfer without groups one, its name empty."""
        plan = self.plan
        if plan is None:
            return {}
        return dict(plan.groups) if isinstance(plan, GroupPlan) else {"": plan}

    @property
    def blocks(self) -> int:
        """Rows of the destination's block tables; 0: none was used."""
        return sum(len(it.dst) // 8 for it in self.parts)

    def may_write(self, cache: int, row: int) -> bool:
        """Whether its destination may be this row of this cache, as far as is known without plans.

        Args:
            cache: its id, in the engine of the destination.
            row: a block or slot of it.
        """
        return any(
            dst == cache and (not it.dst or row in rows_of(it.dst))
            for it, (_, dst) in zip(self.parts, self.caches, strict=True)
        )

    @property
    def caches(self) -> list[tuple[int, int]]:
        """Ids of the source and the destination cache of each group, each in its own engine."""
        known = (self._templates.get(it.template) for it in self.parts)
        return [(-1, -1) if it is None else it.cache_ids for it in known]


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
        """Whether it has failed."""
        return self.status is not LLMStatusCode.LLM_SUCCESS


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


AnyRecord = Transfer | Event | Dropped


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
    def transfers(self) -> list[Transfer]:
        """The transfers among the rows."""
        return [it for it in self.rows if isinstance(it, Transfer)]

    @property
    def events(self) -> list[Event]:
        """What else was done."""
        return [it for it in self.rows if isinstance(it, Event)]

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


def read(path: str | os.PathLike[str]) -> Recording:
    """Read a recording, with the older files of it that are there (`path.1` and so on).

    A last row that is not whole, of a process that was killed or writes it now, is left out.

    Raises:
        OSError: the file cannot be read.
        LLMException: LLM_PARAM_INVALID: it is no recording, or is damaged.
    """
    reader = Reader(path)
    try:
        rows = reader.new()
        return Recording(reader.path, reader.header, rows, reader.complete)
    finally:
        reader.close()


def follow(path: str | os.PathLike[str], idle: Callable[[], bool]) -> Iterator[AnyRecord]:
    """The rows of a recording, then those that are being written, through rotations.

    Args:
        path: of the file that is written.
        idle: called when there is no new row; it may wait. False ends.

    Raises:
        OSError, LLMException: as `read`.
    """
    reader = Reader(path)
    try:
        while True:
            rows = reader.new()
            yield from rows
            if reader.complete or (not rows and not idle()):
                return
    finally:
        reader.close()


class Reader:
    """Reads the files of a recording one after another, as far as they are written.

    Raises:
        OSError, LLMException: as `read`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.complete = False
        self._templates: dict[int, TemplateRow] = {}
        self._count = 0
        self._row: HeaderRow | None = None
        self._fd = -1
        self._data = b""
        self._next = 0
        first = _header_in(self.path)
        older = [
            it
            for it in reversed(_rotated(self.path))
            if (head := _header_or_none(it)) is not None and head.recording == first.recording
        ]
        self._older = older
        self._open(older.pop(0) if older else self.path)
        found = self._read_header()
        if found is None:
            raise invalid(f"{self.path} has no row yet")
        self.header = found

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def new(self) -> list[AnyRecord]:
        """The rows that were written since the last call."""
        rows: list[AnyRecord] = []
        while True:
            # Before it is read: what was there when it was renamed is whole.
            later = self._later()
            self._take(rows)
            if later is None:
                return rows
            fd, header = later
            assert self._row is not None
            if header.file != self._row.file + 1:
                rows.append(Dropped(self._number(), header.wall, None))
            self.close()
            self._fd, self._data, self._next = fd, b"", 0
            self._read_header()

    def _open(self, path: Path) -> None:
        self.close()
        self._fd = os.open(path, _FLAGS)
        self._data, self._next = b"", 0

    def _later(self) -> tuple[int, HeaderRow] | None:
        """The next file of the recording, if this one was rotated."""
        assert self._row is not None
        found: tuple[int, HeaderRow] | None = None
        for it in (self.path, *_rotated(self.path)):
            try:
                fd = os.open(it, _FLAGS)
            except FileNotFoundError:
                continue
            head = _header_of(fd)
            if (
                head is None
                or head.recording != self._row.recording
                or head.file <= self._row.file
                or (found is not None and found[1].file <= head.file)
            ):
                os.close(fd)
                continue
            if found is not None:
                os.close(found[0])
            found = fd, head
            if head.file == self._row.file + 1:
                break
        return found

    def _read_header(self) -> Header | None:
        row = _header_of(self._fd)
        if row is None:
            return None
        self._row = row
        self._next = len(MAGIC)
        os.lseek(self._fd, self._next, os.SEEK_SET)
        self._data, self._next = b"", 0
        return Header(
            row.recording, row.file, row.version, row.host, row.pid, row.cluster_id, row.role,
            row.wall,
        )  # fmt: skip

    def _take(self, rows: list[AnyRecord]) -> None:
        """Read what is there of the file that is open."""
        while True:
            chunk = os.read(self._fd, _CHUNK)
            self._data = self._data[self._next :] + chunk
            self._next = 0
            while True:
                try:
                    found = row_in(self._data, self._next)
                except ValueError as error:
                    raise invalid(
                        f"{self.path}: file {self._row and self._row.file} is damaged after "
                        f"{self._count} rows: {error}"
                    ) from None
                if found is None:
                    break
                row, self._next = found
                if (record := self._record(row)) is not None:
                    rows.append(record)
            if not chunk:
                return

    def _record(self, row: object) -> AnyRecord | None:
        head = self._row
        assert head is not None
        shift = head.wall - head.clock
        moment = getattr(row, "started", getattr(row, "at", 0.0)) + shift
        if not (abs(moment) < _MOST_S and 0 <= getattr(row, "seconds", 0.0) < _MOST_S):
            raise invalid(f"{self.path}: row {self._count} is damaged: its time is {moment}")
        if isinstance(row, TransferRow):
            return Transfer(
                self._number(),
                moment,
                row.seconds,
                row.operation,
                head.cluster_id,
                row.peer,
                row.cache_id,
                row.tag,
                row.leases,
                _status(row.status),
                row.error,
                row.nbytes,
                row.parts,
                self._templates,
            )
        if isinstance(row, EventRow):
            return Event(
                self._number(),
                moment,
                row.seconds,
                row.operation,
                _status(row.status),
                row.error,
                row.fields,
            )
        if isinstance(row, TemplateRow):
            self._templates[row.number] = row
        elif isinstance(row, DroppedRow):
            return Dropped(self._number(), moment, row.count)
        elif isinstance(row, EndRow):
            self.complete = True
        return None

    def _number(self) -> int:
        self._count += 1
        return self._count - 1


def _rotated(path: Path) -> list[Path]:
    """Older files, the newest first."""
    found = []
    for number in range(1, _MAX_FILES):
        it = Path(f"{path}.{number}")
        if not it.exists():
            break
        found.append(it)
    return found


def _header_in(path: Path) -> HeaderRow:
    fd = os.open(path, _FLAGS)
    try:
        found = _header_of(fd)
        if found is None:
            begin = os.pread(fd, len(MAGIC), 0)
            if MAGIC.startswith(begin):
                raise invalid(f"{path} has no row yet: nothing is recorded")
            raise invalid(f"{path} is no recording of kvplan: it begins with {begin!r}")
        return found
    finally:
        os.close(fd)


def _header_or_none(path: Path) -> HeaderRow | None:
    try:
        return _header_in(path)
    except (OSError, LLMException):
        return None


def _header_of(fd: int) -> HeaderRow | None:
    """The first row of a file; None: it is no recording, or not written yet."""
    data = os.pread(fd, 4096, 0)
    if not data.startswith(MAGIC):
        return None
    try:
        found = row_in(data, len(MAGIC))
    except ValueError:
        return None
    row = None if found is None else found[0]
    return row if isinstance(row, HeaderRow) else None


def _status(code: int) -> LLMStatusCode:
    try:
        return LLMStatusCode(code)
    except ValueError:  # of another version
        return LLMStatusCode.LLM_FAILED
