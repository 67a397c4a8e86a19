"""What an engine says of itself, to programs of the same user on this host.

An engine listens at an abstract name of a Unix socket, which is gone with it, however it ends. Who
connects is sent one JSON document, and that is all: nothing is read. The kernel says who the other
end is; both ends refuse another user's (but root may look). `kvplan top` reads all that are there.
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

from kvplan.control.users import peer_credentials
from kvplan.status import LLMException
from kvplan.system.logs import Log

if TYPE_CHECKING:
    from kvplan.control.loop import ControlLoop

SCHEMA_VERSION: Final = 1
"""Of the document: rises when a field changes its meaning or goes."""

_PREFIX: Final = "kvplan-status-"
_BACKLOG: Final = 16
_SEND_S: Final = 1.0
"""What a reader may take to read."""
_MAX_NBYTES: Final = 16 << 20
_READERS: Final = 16
_MANY: Final = 4
"""Documents that are made at a time; who comes meanwhile is sent nothing."""

_log = Log("kvplan.control")
_open: weakref.WeakSet[StatusSocket] = weakref.WeakSet()


class StatusSocket:
    """Answers with what `describe` returns, a dict of JSON values; lives on the control loop."""

    def __init__(
        self, control: ControlLoop, name: str, describe: Callable[[], dict[str, Any]]
    ) -> None:
        self._control = control
        self._name = f"{_PREFIX}{os.geteuid()}-{os.getpid()}-{name}"
        self._describe = describe
        self._listener: socket.socket | None = None
        self._answering = 0
        self._unanswered: set[socket.socket] = set()  # whoever takes one out has to close it

    def start(self) -> None:
        """Listen; in the control thread. An engine goes on without, if that cannot be."""
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            _log.warning("event=no_status_socket reason=%r", str(error))
            return
        try:
            listener.bind(f"\0{self._name}")
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            _log.warning("event=no_status_socket reason=%r", str(error))
            return
        self._listener = listener
        _open.add(self)
        asyncio.get_running_loop().add_reader(listener, self._accept)
        self._control.register(self)

    def close(self) -> None:
        """Listen no more; in the control thread."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        while self._unanswered:  # no worker comes to them any more
            self._unanswered.pop().close()

    async def wait_closed(self) -> None:
        """All of it is gone with `close`."""

    def leave_to_parent(self) -> None:
        """In a forked child: it is the parent's, whose name ends with it."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        if self._listener is None:
            return
        with suppress(OSError):  # who has connected has gone
            connection, _ = self._listener.accept()
            if self._answering >= _MANY or peer_credentials(connection).uid not in (
                0,
                os.geteuid(),
            ):
                connection.close()
                return
            self._answering += 1
            self._unanswered.add(connection)
            self._control.start_in_worker(self._answer, connection)

    def _answer(self, connection: socket.socket) -> None:
        try:
            self._unanswered.remove(connection)
        except KeyError:  # `close` has closed it, and no other comes
            return
        try:
            with connection:
                connection.settimeout(_SEND_S)
                document = {"schema_version": SCHEMA_VERSION, **self._describe()}
                connection.sendall(json.dumps(document).encode())
        except OSError:  # it does not read
            pass
        except LLMException:  # the engine ends
            pass
        finally:
            self._answering -= 1


def _leave_all() -> None:
    for it in list(_open):
        it.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all)


class Answer(NamedTuple):
    """What an engine has said.

    Attributes:
        pid: of its process, as seen from here; 0: it has not even been reached.
        document: what it said; None: see `error`.
        error: why it said nothing.
    """

    pid: int
    document: dict[str, Any] | None
    error: str


def read_all(timeout_s: float = 1.0) -> list[Answer]:
    """Ask all engines of this user in this network namespace, at once; by process and name."""
    names = sorted(_names())
    if not names:
        return []
    with ThreadPoolExecutor(min(_READERS, len(names))) as readers:
        answers = readers.map(lambda name: _read(name, timeout_s), names)
        return sorted((it for it in answers if it is not None), key=lambda it: it.pid)


def _names() -> set[str]:
    """The names that engines of this user listen at, as far as names say that."""
    wanted = f"@{_PREFIX}{os.geteuid()}-"
    table = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
    last = (line.rpartition(" ")[2] for line in table.splitlines())
    return {name[1:] for name in last if name.startswith(wanted)}


def _read(name: str, timeout_s: float) -> Answer | None:
    pid = 0
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(f"\0{name}")
            pid, uid = peer_credentials(connection)
            if uid != os.geteuid():  # it has only taken the name
                return None
            document = msgspec.json.decode(_whole(connection, time.monotonic() + timeout_s))
    except ConnectionRefusedError:  # it has just ended
        return None
    except TimeoutError:
        return Answer(pid, None, f"no answer within {timeout_s:g} s: stopped, or very busy")
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        return Answer(pid, None, str(error) or type(error).__name__)
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        return Answer(pid, None, "of another version of kvplan")
    return Answer(pid, document, "")


def _whole(connection: socket.socket, deadline: float) -> bytes:
    """All that it sends, however slowly, until the deadline."""
    pieces, size = [], 0
    while piece := connection.recv(1 << 16):
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        pieces.append(piece)
        size += len(piece)
        if size > _MAX_NBYTES:
            raise ValueError(f"more than {_MAX_NBYTES >> 20} MiB")
    return b"".join(pieces)
