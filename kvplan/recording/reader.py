"""The reader of recordings, even of those that are still being written."""

from __future__ import annotations

import os
from contextlib import ExitStack
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
    Header,
    TemplateRow,
    TransferRow,
    row_in,
)
from kvplan.recording.records import AnyRecord, Dropped, Event, Recording, TransferRecord
from kvplan.status import LLMStatusCode, invalid
from kvplan.validation import open_regular

_MAX_S: Final = 2.0**36  # seconds since the epoch: about 2000 years
_MAX_FILES: Final = 1000


def read(path: str | os.PathLike[str]) -> Recording:
    """Read a recording, with its older files that still exist (`path.1` and so on).

    An incomplete last row, of a process that was killed or is still writing, is left out.

    Raises:
        OSError: the file cannot be read.
        LLMException: LLM_PARAM_INVALID: not a regular file, not a recording, empty, or damaged.
    """
    name = Path(path)
    with ExitStack() as opened:
        found = _files_of(name, opened)
        reading = _Reading(name)
        for file in sorted(found):
            reading.take(*found[file])
    return Recording(name, found[min(found)][0], reading.rows, reading.complete)


def _files_of(path: Path, opened: ExitStack) -> dict[int, tuple[Header, int]]:
    """Return header and descriptor of each file of the recording at `path`, by file number."""
    found: dict[int, tuple[Header, int]] = {}
    recording, is_gap = "", False
    # From newest to oldest: a file that the writer renames is then seen twice, not missed.
    for number in range(_MAX_FILES):
        try:
            fd = _open(Path(f"{path}.{number}") if number else path, opened)
        except FileNotFoundError:
            if is_gap:
                break
            is_gap = True  # the writer may have renamed the file to the next name just now
            continue
        head = _header_of(fd)
        if head is None and number == 0:
            begin = os.pread(fd, len(MAGIC), 0)
            if not MAGIC.startswith(begin):
                raise invalid(f"{path} is not a recording of kvplan: it begins with {begin!r}")
        if head is not None and head.recording == (recording := recording or head.recording):
            if is_gap and found and head.file < min(found) - 1:
                break  # a file was removed: the recording begins behind it
            found.setdefault(head.file, (head, fd))
            is_gap = False
    if not found:
        _open(path, opened)  # raises if the file does not exist
        raise invalid(f"{path} has no row yet: nothing is recorded")
    return found


def _open(path: Path, opened: ExitStack) -> int:
    fd = open_regular(path)
    opened.callback(os.close, fd)
    return fd


def _header_of(fd: int) -> Header | None:
    """Return the first row of a file; None: not a recording, or not written yet."""
    data = os.pread(fd, 4096, 0)
    if not data.startswith(MAGIC):
        return None
    try:
        found = row_in(data, len(MAGIC))
    except ValueError:
        return None
    row = None if found is None else found.row
    return row if isinstance(row, Header) else None


class _Reading:
    """The records of the files of a recording, taken in their order."""

    def __init__(self, path: Path) -> None:
        self.rows: list[AnyRecord] = []
        self.complete = False
        self._path = path
        self._templates: dict[int, TemplateRow] = {}
        self._next_file: int | None = None

    def take(self, head: Header, fd: int) -> None:
        """Append the records of one file."""
        if self._next_file not in (None, head.file):
            self.rows.append(Dropped(len(self.rows), head.started, None))
        self._next_file = head.file + 1
        with os.fdopen(os.dup(fd), "rb") as file:
            data = file.read()
        at, room = len(MAGIC), SPARE_ROOM  # one room for the whole file, not for each row
        while True:
            try:
                found = row_in(data, at, room)
            except ValueError as error:
                raise invalid(
                    f"{self._path}: file {head.file} is damaged after {len(self.rows)} rows: "
                    f"{error}"
                ) from None
            if found is None:
                return
            room += MAX_RATIO * (found.end - at) - found.nbytes
            at = found.end
            self._add(head, found.row)

    def _add(self, head: Header, row: object) -> None:
        number = len(self.rows)
        moment = getattr(row, "started", getattr(row, "at", 0.0)) + head.started - head.clock
        if not (abs(moment) < _MAX_S and 0 <= getattr(row, "seconds", 0.0) < _MAX_S):
            raise invalid(f"{self._path}: row {number} is damaged: its time is {moment}")
        if isinstance(row, TransferRow):
            record: AnyRecord = TransferRecord(
                number, moment, row.seconds, row.operation, head.cluster_id, row.peer,
                row.cache_id, row.tag, row.leases, _status(row.status), row.error, row.nbytes,
                row.parts, self._templates,
            )  # fmt: skip
        elif isinstance(row, EventRow):
            fields = {name: _finite(value) for name, value in row.fields.items()}
            record = Event(
                number, moment, row.seconds, row.operation, _status(row.status), row.error, fields
            )
        elif isinstance(row, DroppedRow):
            record = Dropped(number, moment, row.count)
        else:
            if isinstance(row, TemplateRow):
                self._templates[row.number] = row
            self.complete = self.complete or isinstance(row, EndRow)
            return
        self.rows.append(record)


def _finite(value: Field) -> Field:
    """Return a value; NaN and infinities, which JSON lacks, as text."""
    return value if not isinstance(value, float) or isfinite(value) else str(value)


def _status(code: int) -> LLMStatusCode:
    try:
        return LLMStatusCode(code)
    except ValueError:  # a recording of another version
        return LLMStatusCode.LLM_FAILED
