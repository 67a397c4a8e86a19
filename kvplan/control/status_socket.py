"""The status of an engine, for programs of the same user on this host.

An engine listens at an abstract Unix socket name, which vanishes with the engine. It sends one JSON
document to each client and reads nothing. Both ends refuse a process of another user by the
kernel's credentials, but root may look. `kvplan top` reads the engines of its user.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kvplan.status import LLMException
from kvplan.system.logs import Log
from kvplan.system.users import peer_credentials

if TYPE_CHECKING:
    from kvplan.control.loop import ControlLoop

SCHEMA_VERSION: Final = 1
"""Version of the document. It rises when a field changes its meaning or is removed."""

_PREFIX: Final = "kvplan-status-"
_BACKLOG: Final = 16
_SEND_S: Final = 1.0  # time of a client to read the document
_RETRY_S: Final = 0.01
"""Seconds between attempts to connect to a socket whose queue is full."""
_PAUSE_S: Final = 0.1  # before accepting again after a failure
_MAX_NBYTES: Final = 16 << 20
_READERS: Final = 16
_MAX_ANSWERS: Final = 4
"""Maximum number of clients that are answered at a time. Further ones are disconnected."""

_log = Log("kvplan.control")
_open: weakref.WeakSet[StatusSocket] = weakref.WeakSet()


class StatusSocket:
    """A server of the JSON document that `describe` returns."""

    def __init__(
        self, control: ControlLoop, name: str, describe: Callable[[], dict[str, Any]]
    ) -> None:
        self._control = control
        self._name = f"{_PREFIX}{os.geteuid()}-{os.getpid()}-{name}"
        self._describe = describe
        self._listener: socket.socket | None = None
        self._answering = 0
        self._unanswered: set[socket.socket] = set()  # the code that removes one must close it

    def start(self) -> None:
        """Listen, in the control thread. The engine continues if that fails."""
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        try:
            self._listener = listener = socket.socket(socket.AF_UNIX, kind)
            listener.bind(f"\0{self._name}")
            listener.listen(_BACKLOG)
        except OSError as error:
            self.leave()
            _log.warning("event=no_status_socket reason=%r", str(error))
            return
        _open.add(self)
        self._resume()
        self._control.register(self)

    def close(self) -> None:
        """Stop listening, in the control thread."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self.leave()
        while self._unanswered:  # no worker will handle these
            self._unanswered.pop().close()

    async def wait_closed(self) -> None:
        """Return at once: an answer ends by its own timeout."""

    def leave(self) -> None:
        """Close the listener. If that is a forked child's, the parent still listens."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has gone, or no descriptor is left
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(_PAUSE_S, self._resume)
            return
        allowed = (0, os.geteuid())  # root, and the user of this process
        if self._answering >= _MAX_ANSWERS or peer_credentials(connection).uid not in allowed:
            connection.close()
            return
        self._answering += 1
        self._unanswered.add(connection)
        self._control.start_in_worker(self._answer, connection)

    def _answer(self, connection: socket.socket) -> None:
        try:
            self._unanswered.remove(connection)
        except KeyError:  # `close` has closed it, and accepts no other
            return
        try:
            with connection:
                connection.settimeout(_SEND_S)
                document = {"schema_version": SCHEMA_VERSION, **self._describe()}
                text = json.dumps(document, ensure_ascii=False)
                connection.sendall(text.encode(errors="replace"))  # arguments may not be UTF-8
        except (OSError, LLMException):  # the client does not read, or the engine ends
            pass
        finally:
            self._answering -= 1


def _leave_all() -> None:
    for status_socket in list(_open):
        status_socket.leave()


os.register_at_fork(after_in_child=_leave_all)


class Answer(NamedTuple):
    """The answer of one engine: its document, or why that is missing."""

    pid: int  # process of the engine; as its name says, if the engine was not reached
    document: dict[str, Any] | None
    error: str


def read_all(timeout_s: float = 1.0) -> list[Answer]:
    """Ask all engines of this user in this network namespace. Answers are sorted by process."""
    names = sorted(_names())
    if not names:
        return []
    with ThreadPoolExecutor(min(_READERS, len(names))) as readers:
        answers = readers.map(lambda name: _read(name, timeout_s), names)
        return sorted(
            (answer for answer in answers if answer is not None), key=lambda answer: answer.pid
        )


def _names() -> set[str]:
    """Return the names at which engines of this user appear to listen."""
    wanted = f"@{_PREFIX}{os.geteuid()}-"
    table = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
    last = (line.rpartition(" ")[2] for line in table.splitlines())
    return {name[1:] for name in last if name.startswith(wanted)}


def _read(name: str, timeout_s: float) -> Answer | None:
    claimed = name.split("-")[3]
    pid = int(claimed) if claimed.isdecimal() else 0
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            deadline = time.monotonic() + timeout_s
            _connect(connection, name, deadline)
            pid, uid = peer_credentials(connection)
            if uid != os.geteuid():  # a process of another user has taken the name
                return None
            if not (content := _whole(connection, deadline)):
                return Answer(pid, None, f"no answer: {_MAX_ANSWERS} others ask it, or it ends")
            document = msgspec.json.decode(content)
    except ConnectionRefusedError:  # the engine has just ended
        return None
    except TimeoutError:
        return Answer(pid, None, f"no answer within {timeout_s:g} s: stopped, or very busy")
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        return Answer(pid, None, str(error) or type(error).__name__)
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        return Answer(pid, None, "of another version of kvplan")
    return Answer(pid, document, "")


def _connect(connection: socket.socket, name: str, deadline: float) -> None:
    """Connect to a socket, and wait for room in its queue until the deadline."""
    connection.setblocking(False)
    while True:
        with suppress(BlockingIOError):
            connection.connect(f"\0{name}")
            return
        if time.monotonic() >= deadline:
            raise TimeoutError
        time.sleep(_RETRY_S)


def _whole(connection: socket.socket, deadline: float) -> bytes:
    """Read until the end of the stream or the deadline."""
    content = bytearray()
    while len(content) <= _MAX_NBYTES:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        if not (piece := connection.recv(1 << 16)):
            return bytes(content)
        content += piece
    raise ValueError(f"more than {_MAX_NBYTES >> 20} MiB")
