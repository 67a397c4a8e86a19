"""The files of a recording: rows go to the newest; a full file is renamed."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

from kvplan.recording.format import MAGIC, framed
from kvplan.status import invalid
from kvplan.validation import check_range, check_type

_LEAST_BYTES: Final = 64 << 10


class RotatingFile:
    """The files `path` (being written), `path.1` (the one before) and so on.

    An existing recording at `path` becomes `path.1`; with `files=1` it is removed. A lock on the
    file tells other recorders that it is in use.

    Args:
        path: the file to write.
        head: returns the first rows of a file, given its number, from 0.
        max_bytes: maximum size of a file; a larger row is still written.
        files: number of the newest files to keep.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        head: Callable[[int], list[bytes]],
        *,
        max_bytes: int,
        files: int,
    ) -> None:
        if check_type("max_bytes", max_bytes, int) < _LEAST_BYTES:
            raise invalid(f"max_bytes={max_bytes} must be at least {_LEAST_BYTES}")
        check_range("files", files, 1, 1000)
        self.path = Path(path).absolute()  # the program may change its folder
        self.max_bytes = max_bytes
        self._files = files
        self._head = head
        self._number = 0
        self._fd = -1
        self._nbytes = 0
        self._has_rows = False
        self._check_free()

    @property
    def closed(self) -> bool:
        """True after `close`, a failed write, or in a forked child."""
        return self._fd < 0

    def write(self, rows: Sequence[bytes], *, compress: bool) -> None:
        """Append encoded rows, in a new file if this one has no room.

        An OSError closes the file, after removing the rows of the failed write if possible.
        """
        batch: list[bytes] = []
        nbytes = 0
        for frame in framed(rows, compress=compress):
            if self._nbytes + nbytes + len(frame) > self.max_bytes and (batch or self._has_rows):
                self._write(b"".join(batch))
                batch, nbytes = [], 0
                self._rotate()
            batch.append(frame)
            nbytes += len(frame)
        self._write(b"".join(batch))
        self._has_rows = True

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _close(fd)

    def leave_to_parent(self) -> None:
        """Close the file in a forked child; the parent keeps the lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self, data: bytes) -> None:
        view, written = memoryview(data), 0
        try:
            while written < len(data):
                written += os.write(self._fd, view[written:])
        except OSError:
            with suppress(OSError):  # readers ignore a partial row
                os.ftruncate(self._fd, self._nbytes)
            self.close()
            raise
        self._nbytes += written

    def _check_free(self) -> None:
        """Begin the first file; refuse to rename a file that is not a recording, or is in use."""
        path, *older = self._names()
        for old in older:  # to be renamed; the oldest will be removed
            if (fd := _opened(old)) >= 0:
                os.close(fd)
        fd = _opened(path)
        try:
            if fd >= 0 and not _lock(fd):
                raise invalid(f"path={self.path}: another engine records to it")
            self._begin(fd)
        finally:
            if fd >= 0:
                os.close(fd)

    def _rotate(self) -> None:
        full, self._fd = self._fd, -1
        self._number += 1
        try:
            self._begin(full)
        finally:
            _close(full)

    def _names(self) -> list[Path]:
        """Return the names of the files, and one for the oldest until the next file has begun."""
        numbered = (Path(f"{self.path}.{number}") for number in range(1, self._files))
        return [self.path, *numbered, Path(f"{self.path}.oldest")]

    def _begin(self, locked: int) -> None:
        """Rename each file to the next name, begin a file, and remove the oldest one.

        Nothing is renamed unless the file at the path is the `locked` one: another recorder may
        have begun since, or may begin meanwhile.
        """
        names = self._names()
        renamed: list[tuple[Path, Path]] = []
        try:
            for old, new in reversed([*pairwise(names)]) if _is_at(locked, self.path) else ():
                if old.exists():
                    old.rename(new)
                    renamed.append((old, new))
            self._open()
        except BaseException:
            for old, new in reversed(renamed):
                if not old.exists():
                    new.rename(old)
            raise
        names[-1].unlink(missing_ok=True)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self._fd = os.open(self.path, flags, 0o600)
        except FileExistsError:
            raise invalid(f"path={self.path}: another engine records to it") from None
        try:
            _lock(self._fd)
            self._nbytes, self._has_rows = 0, False
            self._write(MAGIC + b"".join(framed(self._head(self._number), compress=False)))
        except BaseException:
            self.close()
            self.path.unlink(missing_ok=True)
            raise


def _opened(path: Path) -> int:
    """Open a recording or an empty file; return -1 if the path does not exist."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return -1
    is_ours = False
    try:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        is_ours = is_file and MAGIC.startswith(os.read(fd, len(MAGIC)))
    finally:
        if not is_ours:
            os.close(fd)
    if not is_ours:
        raise invalid(f"path={path} exists and is not a recording")
    return fd


def _is_at(fd: int, path: Path) -> bool:
    """Return whether an open file is the one at a path."""
    try:
        return fd >= 0 and os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _close(fd: int) -> None:
    with suppress(OSError):  # unlock even if a forked child keeps the file open
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _lock(fd: int) -> bool:
    """Lock a file; return False if another recorder has locked it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
