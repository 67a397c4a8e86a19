"""The recorder of one engine: calls append rows to a queue, and a thread writes them."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Final, Protocol, Self

import numpy as np

import kvplan
from kvnative._signals import Mutex, signals_deferred
from kvplan.lease import BlockLease
from kvplan.planning.blocks import Blocks
from kvplan.planning.part import Part
from kvplan.planning.plan import Plan
from kvplan.planning.side import Side
from kvplan.recording.files import RotatingFile
from kvplan.recording.format import (
    DROPPED,
    END,
    EVENT,
    HEADER,
    TEMPLATE,
    TRANSFER,
    encode,
    segments_of,
    template_of,
)
from kvplan.status import LLMException, LLMStatusCode
from kvplan.system.limits import start_thread
from kvplan.system.logs import Log
from kvplan.validation import shown

MAX_QUEUED: Final = 32 << 20  # bytes of rows that wait to be written
_INTERVAL_S: Final = 0.05  # rows of this interval are written together
_CLOSING_S: Final = 10.0  # limit for a disk that does not answer
_MAX_KNOWN: Final = 4096  # cached numbers of templates
_FEW_TEMPLATES: Final = 64  # up to this number, their bytes are not counted

_SUCCESS: Final = LLMStatusCode.LLM_SUCCESS

_log = Log("kvplan")


class Linked(Protocol):
    """A link to a peer."""

    @property
    def cluster_id(self) -> int:
        """Cluster id of the peer."""


class Ended(Protocol):
    """An operation of the engine that has ended."""

    @property
    def name(self) -> str:
        """Name of the call."""

    @property
    def tag(self) -> str:
        """The caller's tag."""

    @property
    def started(self) -> float:
        """The beginning, by `perf_counter`."""

    @property
    def plan(self) -> Plan | None:
        """The executed plan; None: no plan was made."""

    @property
    def cache_id(self) -> int:
        """Id of the cache of this process."""

    @property
    def link(self) -> Linked | None:
        """The link to the peer; None: inside the process, or no link was found."""

    @property
    def leases(self) -> tuple[BlockLease, ...]:
        """The peer's leases that were used."""


class Recorder:
    """The recorder of one engine: it writes to a file, or to several that rotate, until `close`.

    The calling thread encodes a record, in a few microseconds; another thread writes it. If more
    than `max_queued` bytes wait, rows are dropped, and the file says how many.
    An error ends the recording with one warning.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        cluster_id: int,
        role: str,
        *,
        max_bytes: int,
        files: int,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self._pid = os.getpid()
        # Re-entrant: a signal handler, or the garbage collector, may end an operation anywhere.
        self._mutex = Mutex()
        self._rows: deque[bytes] = deque()
        self._room = self._max_queued = max_queued
        self._dropped = 0
        self._awake = False
        self._ended = False
        self._known: dict[object, tuple[int, Side, Side]] = {}
        self._numbers: dict[bytes, int] = {}
        self._previous: dict[bytes, int] = {}
        self._last_number = 0
        recording = secrets.token_hex(8)

        def head(file: int) -> list[bytes]:
            """Return the first rows of a file: its origin, and the templates of its transfers."""
            wall, clock = time.time(), perf_counter()
            header = (
                HEADER, recording, file, kvplan.__version__, socket.gethostname(), self._pid,
                cluster_id, role, wall, clock,
            )  # fmt: skip
            return [encode(header), *self._templates()]

        # For the thread: True for new rows, False for the end, an Event to set after writing; None:
        # the file cannot begin. In signal handlers, `put` is safe, and `Event.set` is not.
        self._tokens: SimpleQueue[bool | threading.Event | None] = SimpleQueue()
        # First: without a thread, the files of an earlier recording keep their names.
        self._thread = start_thread(f"kvplan-recorder-{cluster_id}", self._write_all)
        try:
            self._file = RotatingFile(path, head, max_bytes=max_bytes, files=files)
        except BaseException:
            self._tokens.put(None)
            raise
        _recorders.add(self)

    @property
    def path(self) -> Path:
        """The file that is written."""
        return self._file.path

    @property
    def ended(self) -> bool:
        """True if recording has ended: by `close`, after an error, or in a forked child."""
        return self._ended

    @property
    def dropped(self) -> int:
        """Number of dropped rows that the file does not mention yet."""
        return self._dropped

    def transfer(
        self, operation: Ended, status: LLMStatusCode, seconds: float, nbytes: int, error: str
    ) -> None:
        """Record an operation with its outcome."""
        if self._ended:
            return
        plan, link = operation.plan, operation.link
        try:
            parts = () if plan is None else tuple(map(self._part, plan.parts))
            row = (
                TRANSFER, operation.started, seconds, operation.name,
                0 if status is _SUCCESS else status,  # an int is encoded in half the time
                error, operation.tag, None if link is None else link.cluster_id,
                operation.cache_id, tuple([lease.lease_id for lease in operation.leases]),
                nbytes, parts,
            )  # fmt: skip
            self._append(encode(row))
        except Exception as raised:  # an error here must not change the outcome
            self._fail(raised)

    def moved(
        self,
        head: tuple[object, ...],
        pair: dict[str, Any],
        rows: tuple[Blocks | bytes, Blocks | bytes],
        nbytes: int,
        part: Callable[[], Part],
    ) -> None:
        """Record a transfer whose plan was not made.

        Args:
            head: the fields of a `TransferRow` before its parts.
            pair: `common`, which identifies the pair, with its `kind` and `as_bytes`.
            rows: source and destination rows; bytes hold int64.
            nbytes: bytes copied from one tensor to its pair; only C2C needs them.
            part: makes the part, for a new pair or one that is not copied as bytes.
        """
        if self._ended:
            return
        try:
            known = self._known.get(pair["common"])
            if known is None or not pair["as_bytes"]:
                row = self._part(part())
            else:
                row = "", None, known[0], *_as_rows(pair["kind"], *known[1:], rows, nbytes)
            self._append(encode((TRANSFER, *head, (row,))))
        except Exception as raised:
            self._fail(raised)

    def event(
        self,
        operation: str,
        status: LLMStatusCode,
        seconds: float,
        error: str,
        fields: dict[str, Any],
    ) -> None:
        """Record an event that has just ended, after `seconds`."""
        if self._ended:
            return
        started = perf_counter() - seconds
        try:
            values = {name: _field(value) for name, value in fields.items()}
            self._append(encode((EVENT, started, seconds, operation, status, error, values)))
        except Exception as raised:
            self._fail(raised)

    def flush(self) -> None:
        """Write everything recorded so far; return when it is written."""
        if self._pid != os.getpid():
            return
        # The thread writes: a signal handler may call this during a write.
        written = threading.Event()
        self._tokens.put(written)
        while not written.wait(_INTERVAL_S) and self._thread.is_alive():
            pass

    def close(self) -> None:
        """Write everything recorded, and end. Idempotent; does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        with signals_deferred:  # a handler may record to the same file
            with self._mutex:
                if self._ended:
                    return
                self._ended = True
            self._tokens.put(False)
            self._thread.join(_CLOSING_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _append(self, row: bytes) -> None:
        # Without a lock, a row of two threads may stay uncounted until the queue is written.
        room = self._room - len(row)
        if room < 0:
            with self._mutex:
                self._dropped += 1
            return
        self._room = room
        self._rows.append(row)
        if not self._awake:
            self._awake = True
            self._tokens.put(True)

    def _part(self, part: Part) -> tuple[object, ...]:
        """Return the fields of a `PartRow`."""
        src, dst = part.src, part.dst
        key: object = vars(part).get("common")  # equal for all requests of a pair of caches
        if key is None:
            # Without `written.stop`: both ranges have the same length.
            read, written = part.src_tensors, part.dst_tensors
            key = (
                id(src), id(dst), part.operation, read.start, read.stop, written.start, part.split,
                part.coalesce, part.tensors_per_layer, part.reinterpret, part.kind,
            )  # fmt: skip
        known = self._known.get(key)
        number = self._number(key, part) if known is None else known[0]
        place = part.name, part.source, number
        if (rows := part.unplanned_rows) is not None:  # planning would take several times as long
            return *place, *_as_rows(part.kind, src, dst, rows, part.nbytes_per_tensor)
        tables = part.tables
        if part.by_rows and tables is not None:
            return *place, tables.src.tobytes(), tables.dst.tobytes(), None
        if tables is None:
            return *place, b"", b"", segments_of(part)
        return *place, tables.src.tobytes(), tables.dst.tobytes(), segments_of(part)

    def _number(self, key: object, part: Part) -> int:
        """Return the number of the template of a part; record a new template."""
        src, dst = part.src, part.dst
        template = encode([template_of(part), (src.way, dst.way), (src.cache_id, dst.cache_id)])
        with self._mutex:
            number = self._numbers.get(template)
            if number is None:
                number = self._last_number = self._last_number + 1
                self._numbers[template] = number
                row = _template_row(number, template)
                self._room -= len(row)
                self._rows.append(row)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            # The entry keeps both sides alive, so that their ids stay unique.
            self._known[key] = number, src, dst
        return number

    def _templates(self) -> list[bytes]:
        with self._mutex:
            held = [*self._previous.items(), *self._numbers.items()]
            return [_template_row(number, template) for template, number in held]

    def _write_all(self) -> None:
        tokens = self._tokens
        token: bool | threading.Event | None = True
        while token is not False:
            if (token := tokens.get()) is None:
                return
            if token is True:
                with suppress(Empty):
                    token = tokens.get(timeout=_INTERVAL_S)
            self._drain(ended=token is False)
            if isinstance(token, threading.Event):
                token.set()
        self._file.close()

    def _drain(self, *, ended: bool = False) -> None:
        """Write the queued rows."""
        with self._mutex:
            self._awake = False  # first: rows appended from here on wake the thread again
            queued, self._room = self._max_queued - self._room, self._max_queued
            dropped, self._dropped = self._dropped, 0
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        if dropped:
            rows.append(encode((DROPPED, perf_counter(), dropped)))
        if ended:
            rows.append(encode((END, perf_counter())))
        if not rows or self._file.closed:
            return
        try:
            self._file.write(rows, compress=queued < self._max_queued // 2)
        except (OSError, LLMException) as error:
            self._file.close()
            self._fail(error)
        else:
            self._forget()

    def _fail(self, error: Exception) -> None:
        """End the recording, with one warning."""
        with self._mutex:
            if self._ended:
                return
            self._ended = True
        self._tokens.put(False)  # the thread writes the queue if it can
        _log.warning("recording to %s has ended: %s; transfers go on", self._file.path, error)

    def _forget(self) -> None:
        """Forget templates if they would fill an eighth of a file."""
        with self._mutex:
            nbytes = sum(map(len, self._numbers)) if len(self._numbers) > _FEW_TEMPLATES else 0
            if nbytes > self._file.max_bytes // 8 and not self._rows:
                self._known.clear()
                # A thread may be about to append a row that names one of the old templates.
                self._previous, self._numbers = self._numbers, {}

    def _forked(self) -> None:
        """End in a forked child: the parent records, and may have held a lock at the fork."""
        self._ended = True
        self._mutex = Mutex()
        self._file.leave_to_parent()


def _field(value: object) -> object:
    """Return a value of an event as a `Field`."""
    if isinstance(value, tuple):
        return [*value]
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, int) and not -(2**63) <= value < 2**64:  # of a call that was refused
        return shown(value)
    return value if isinstance(value, int | float | None) else repr(value)


def _as_rows(
    kind: str, src: Side, dst: Side, rows: tuple[Blocks | bytes, Blocks | bytes], nbytes: int
) -> tuple[object, ...]:
    """Return the last three fields of a `PartRow` whose rows are copied as bytes."""
    if kind != "C2C":
        return _packed(rows[0]), _packed(rows[1]), None
    (src_slot,), (dst_slot,) = rows
    return b"", b"", (1, src_slot * src.stride, dst_slot * dst.stride, nbytes)


def _packed(rows: Blocks | bytes) -> bytes:
    """Return a block table as little-endian int64; bytes already are."""
    if isinstance(rows, bytes):
        return rows
    if isinstance(rows, np.ndarray):
        return rows.astype("<i8", copy=False).tobytes()
    return array("q", rows).tobytes()


def _template_row(number: int, template: bytes) -> bytes:
    # [TEMPLATE, number, *template]; `template` is an array of three
    return b"\x95" + encode(TEMPLATE) + encode(number) + template[1:]


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _all_forked() -> None:
    for recorder in list(_recorders):
        recorder._forked()


os.register_at_fork(after_in_child=_all_forked)
