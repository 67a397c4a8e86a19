"""Reads recordings, also while they are written and across rotations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path
from typing import Final

from kvplan.recording.format import (
    MAGIC,
    MAX_RATIO,
    SPARE_ROOM,
    DroppedRow,
    EndRow,
    EventRow,
    Field,
    HeaderRow,
    TemplateRow,
    TransferRow,
    row_in,
)
from kvplan.recording.records import AnyRecord, Dropped, Event, Header, Recording, TransferRecord
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.validation import open_regular

_CHUNK: Final = 4 << 20
_MOST_S: Final = 2.0**36  # seconds since the epoch: some 2000 years
_MAX_FILES: Final = 1000


def read(path: str | os.PathLike[str]) -> Recording:
    """Read a recording, with its older files that still exist (`path.1` and so on).

    An incomplete last row, of a process that was killed or is still writing, is left out.

    Raises:
        OSError: the file cannot be read.
        LLMException: LLM_PARAM_INVALID: not a regular file, not a recording, or damaged.
    """
    reader = Reader(path)
    try:
        rows = reader.new()
        return Recording(reader.path, reader.header, rows, reader.complete)
    finally:
        reader.close()


def follow(path: str | os.PathLike[str], idle: Callable[[], bool]) -> Iterator[AnyRecord]:
    """Yield the rows of a recording, then those that are being written, across rotations.

    Args:
        path: the file that is written.
        idle: called if there is no new row; it may wait. False ends the iteration.

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
    """Reads the files of a recording one after another, as far as they are written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.complete = False
        self._templates: dict[int, TemplateRow] = {}
        self._count = 0
        self._row: HeaderRow | None = None
        self._fd = -1
        self._data = b""
        self._next = 0
        self._room = SPARE_ROOM
        first = _header_in(self.path)
        older = [
            path
            for path in reversed(_rotated(self.path))
            if (head := _header_or_none(path)) is not None and head.recording == first.recording
        ]
        self._older = older
        self._open(older.pop(0) if older else self.path)
        found = self._read_header()
        if found is None:
            raise invalid(f"{self.path} has no row yet")
        self.header = found

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def new(self) -> list[AnyRecord]:
        """Return the rows that were written since the last call."""
        rows: list[AnyRecord] = []
        while True:
            # Before reading: a file is complete when it is renamed.
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
        self._fd = open_regular(path)
        self._data, self._next = b"", 0

    def _later(self) -> tuple[int, HeaderRow] | None:
        """Open the next file of the recording, if this one was rotated."""
        assert self._row is not None
        found: tuple[int, HeaderRow] | None = None
        for path in (self.path, *_rotated(self.path)):
            try:
                fd = open_regular(path)
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
        self._next, self._room = len(MAGIC), SPARE_ROOM
        os.lseek(self._fd, self._next, os.SEEK_SET)
        self._data, self._next = b"", 0
        return Header(
            row.recording, row.file, row.version, row.host, row.pid, row.cluster_id, row.role,
            row.wall,
        )  # fmt: skip

    def _take(self, rows: list[AnyRecord]) -> None:
        """Read the available rows of the open file."""
        while True:
            chunk = os.read(self._fd, _CHUNK)
            self._data = self._data[self._next :] + chunk
            self._next = 0
            while True:
                try:
                    found = row_in(self._data, self._next, self._room)
                except ValueError as error:
                    raise invalid(
                        f"{self.path}: file {self._row and self._row.file} is damaged after "
                        f"{self._count} rows: {error}"
                    ) from None
                if found is None:
                    break
                # One room for the whole file, not for each row.
                self._room += MAX_RATIO * (found.end - self._next) - found.nbytes
                self._next = found.end
                if (record := self._record(found.row)) is not None:
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
            return TransferRecord(
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
                {name: _finite(value) for name, value in row.fields.items()},
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


def _finite(value: Field) -> Field:
    """Return a value, or its text if JSON has no number for it."""
    return value if not isinstance(value, float) or isfinite(value) else str(value)


def _rotated(path: Path) -> list[Path]:
    """Return older files, newest first."""
    found = []
    for number in range(1, _MAX_FILES):
        older = Path(f"{path}.{number}")
        if not older.exists():
            break
        found.append(older)
    return found


def _header_in(path: Path) -> HeaderRow:
    fd = open_regular(path)
    try:
        found = _header_of(fd)
        if found is None:
            begin = os.pread(fd, len(MAGIC), 0)
            if MAGIC.startswith(begin):
                raise invalid(f"{path} has no row yet: nothing is recorded")
            raise invalid(f"{path} is not a recording of kvplan: it begins with {begin!r}")
        return found
    finally:
        os.close(fd)


def _header_or_none(path: Path) -> HeaderRow | None:
    try:
        return _header_in(path)
    except (OSError, LLMException):
        return None


def _header_of(fd: int) -> HeaderRow | None:
    """Return the first row of a file; None: not a recording, or not written yet."""
    data = os.pread(fd, 4096, 0)
    if not data.startswith(MAGIC):
        return None
    try:
        found = row_in(data, len(MAGIC))
    except ValueError:
        return None
    row = None if found is None else found.row
    return row if isinstance(row, HeaderRow) else None


def _status(code: int) -> LLMStatusCode:
    try:
        return LLMStatusCode(code)
    except ValueError:  # a recording of another version
        return LLMStatusCode.LLM_FAILED
