"""The observer: wrapped calls append what they saw to a queue, and a thread makes records of it."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from pathlib import Path
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Final
from zlib import crc32

from kvplan.observe.agent import Agent
from kvplan.recording.writer import Recorder
from kvplan.status import LLMStatusCode
from kvplan.system.limits import start_thread
from kvplan.system.logs import Log

_INTERVAL_S: Final = 0.05  # what is seen in this time is recorded together
_CLOSING_S: Final = 10.0
_MAX_BYTES: Final = 64 << 20
_FILES: Final = 2

_log = Log("kvplan")

Note = Callable[..., None]


_Seen = tuple[Callable[..., None], tuple[Any, ...]]
"""A call for the thread, and its arguments."""


@dataclass
class _Queue:
    """Calls that the threads of one process have seen."""

    pid: int
    seen: deque[_Seen] = field(default_factory=deque)
    tokens: SimpleQueue[bool | threading.Event] = field(default_factory=SimpleQueue)
    awake: bool = False
    thread: threading.Thread | None = None
    agents: dict[int, Agent] = field(default_factory=dict)


class Observer:
    """Records the transfers of other libraries to a file for each of their agents.

    If observing fails, it says so in the log once and ends; the program goes on.

    Args:
        folder: where the files are made; empty: the current folder.

    Attributes:
        active: False after a failure, or `close`.
    """

    def __init__(self, folder: str | os.PathLike[str] = "") -> None:
        self.active = True
        self._failed = False
        self._folder = Path(folder).absolute()
        self._queue = _Queue(os.getpid())
        self._wrapped: set[tuple[type, str]] = set()
        atexit.register(self.close)

    def wrap(
        self, owner: type, name: str, after: Note, kept: Callable[[Any], Any] | None = None
    ) -> None:
        """Replace a method by one that calls it and passes on what it saw.

        Args:
            owner: the class.
            name: the method; nothing happens if the class lacks it.
            after: called with the arguments, the beginning, the end, the result, and the exception
                or None: by the thread, or, without `kept`, in the call.
            kept: returns the arguments as they are now, if the program may change them.
        """
        original = getattr(owner, name, None)
        if original is None or (owner, name) in self._wrapped:  # a module may have several names
            return
        self._wrapped.add((owner, name))

        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            begin = perf_counter()
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                self.guarded(self._after, after, kept, args, kwargs, begin, None, error)
                raise
            if kept is None or kept is as_is:
                if kept is None:
                    self.guarded(after, args, kwargs, begin, perf_counter(), result, None)
                    return result
                # As in `_after`: these calls are made for each transfer, and for each look at one.
                queue = self._queue
                queue.seen.append((after, (args, kwargs, begin, perf_counter(), result, None)))
                if not queue.awake:
                    queue.awake = True
                    queue.tokens.put(True)
                return result
            self.guarded(self._after, after, kept, args, kwargs, begin, result, None)
            return result

        setattr(owner, name, observed)

    def _after(
        self, after: Note, kept: Callable[[Any], Any] | None, args: Any, kwargs: Any,
        begin: float, result: Any, error: BaseException | None,
    ) -> None:  # fmt: skip
        """Pass on what a call saw, now or by the queue."""
        text = None if error is None else f"{type(error).__name__}: {error}"  # no frames are kept
        if kept is None:
            after(args, kwargs, begin, perf_counter(), result, text)
        else:
            values = kept(args), {k: kept((v,))[0] for k, v in kwargs.items()}
            self._append((after, (*values, begin, perf_counter(), result, text)))

    def guarded(self, call: Note, *values: Any) -> None:
        """Call a function of the observer; an error ends observing, and nothing else."""
        try:
            call(*values)
        except Exception as error:
            self._step_aside(error)

    def saw(self, owner: object, handle: str, moment: float, *values: Any) -> None:
        """Have the thread call a method of an `Agent`."""
        if threading.current_thread() is self._queue.thread:
            self._dispatch(self._queue, id(owner), handle, moment, *values)
        else:
            self._append((self._dispatch, (self._queue, id(owner), handle, moment, *values)))

    @staticmethod
    def _dispatch(queue: _Queue, owner: int, handle: str, moment: float, *values: Any) -> None:
        agent = queue.agents.get(owner)
        if agent is not None:
            getattr(agent, handle)(moment, *values)

    def _append(self, seen: _Seen) -> None:
        queue = self._queue
        queue.seen.append(seen)
        if not queue.awake:
            queue.awake = True
            queue.tokens.put(True)

    def begin(self, owner: object, name: str, library: str) -> None:
        """Begin the recording of an agent or engine."""
        pid = os.getpid()
        if self._queue.pid != pid:  # a forked child
            self._queue = _Queue(pid)
        queue = self._queue
        if queue.thread is None:
            queue.thread = start_thread("kvplan-observer", self._work, queue)
        self._folder.mkdir(parents=True, exist_ok=True)
        number = peer_number(name)
        clean = "".join(letter if letter.isalnum() else "-" for letter in name)[:40]
        path = self._folder / f"{library}-{clean}-{pid}-{time.time_ns()}.kvrec"
        recorder = Recorder(path, number, library, max_bytes=_MAX_BYTES, files=_FILES)
        recorder.event(
            "observe", LLMStatusCode.LLM_SUCCESS, 0.0, "", {"name": name, "library": library}
        )
        queue.agents[id(owner)] = Agent(recorder)

    def flush(self) -> None:
        """Wait until everything seen so far is in the files."""
        queue = self._queue
        if queue.thread is None or queue.pid != os.getpid():
            return
        done = threading.Event()
        queue.tokens.put(done)
        while not done.wait(_INTERVAL_S) and queue.thread.is_alive():
            pass
        for agent in list(queue.agents.values()):
            agent.recorder.flush()

    def close(self) -> None:
        """Record what was seen, and end. Idempotent; does nothing in a forked child."""
        queue = self._queue
        self.active = False
        if queue.pid != os.getpid() or queue.thread is None:
            return
        queue.tokens.put(False)
        queue.thread.join(_CLOSING_S)
        queue.thread = None
        for agent in queue.agents.values():
            agent.recorder.close()

    def _work(self, queue: _Queue) -> None:
        token: bool | threading.Event = True
        while token is not False:
            token = queue.tokens.get()
            if token is True:
                with suppress(Empty):
                    token = queue.tokens.get(timeout=_INTERVAL_S)
            queue.awake = False  # first: what is seen from here on wakes the thread again
            while queue.seen:
                call, values = queue.seen.popleft()
                if not self._failed:
                    self.guarded(call, *values)
            if isinstance(token, threading.Event):
                token.set()

    def _step_aside(self, error: Exception) -> None:
        if not self._failed:
            self.active, self._failed = False, True
            _log.warning(
                "observing has ended: %s: %s; the program goes on", type(error).__name__, error
            )


def as_is(args: Any) -> Any:
    """Return arguments that no program changes."""
    return args


@lru_cache(maxsize=1024)
def peer_number(name: str) -> int:
    """Return the number that stands for an agent's name where recordings have a cluster id."""
    return crc32(name.encode("utf-8", "replace")) & 0x7FFFFFFF
