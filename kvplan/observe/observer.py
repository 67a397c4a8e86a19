"""The observer: wrapped methods append their calls to a queue, and a thread records them."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, wraps
from pathlib import Path
from queue import Empty
from time import perf_counter
from typing import Any, Final
from zlib import crc32

from kvplan.observe.agent import Agent
from kvplan.observe.calls import Calls, Note, by_handle, by_indices, takes
from kvplan.observe.plans import ranges_of
from kvplan.recording.writer import Recorder
from kvplan.status import LLMStatusCode
from kvplan.system.limits import start_thread

_INTERVAL_S: Final = 0.05  # calls of one interval are recorded together
_CLOSING_S: Final = 10.0
_MAX_BYTES: Final = 64 << 20
_FILES: Final = 2

Pick = Callable[[tuple[Any, ...], Mapping[str, Any], Any], tuple[Any, ...]]
"""Function from a call's arguments and result (None: it raised) to the recorded values."""


class Observer:
    """An observer of other libraries, which records the transfers of each agent to a file.

    If observing fails, it ends with one warning in the log; the program goes on.

    Args:
        folder: the folder of the files; empty: the current one.
        sums: True to record sums of the blocks of each transfer, which slows the program's calls.

    Attributes:
        calls: the observed calls; none are added after a failure or `close`.
    """

    def __init__(self, folder: str | os.PathLike[str] = "", *, sums: bool = False) -> None:
        self._folder = Path(folder).absolute()
        self.calls: Calls = Calls(inline=sums)
        self._mutex = threading.Lock()
        self._wrapped: set[tuple[type, str]] = set()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forked)

    def wrap(
        self, owner: type, name: str, pick: Pick, note: Note | None, *, errors: bool = False
    ) -> None:
        """Wrap a method, so that its calls are noted.

        Args:
            owner: the class.
            name: the method; nothing happens if the class lacks it.
            pick: called at the end of each call; copies values that the program may change later.
            note: called with the values, usually by the thread; None: only `pick` is called.
            errors: True to also note calls that raised.
        """
        if (original := self._original(owner, name)) is None:
            return
        calls = self.calls

        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if not calls.seen.active:
                return original(*args, **kwargs)
            begin = perf_counter()
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                if errors:
                    text = f"{type(error).__name__}: {error}"  # no frames are kept
                    with suppress(Exception):  # the library has refused the values, too
                        self._note(note, pick, args, kwargs, None, begin, text)
                raise
            self.guarded(self._note, note, pick, args, kwargs, result, begin, "")
            return result

        setattr(owner, name, observed)

    def wrap_each(
        self, owner: type, name: str, note: Note, quiet: str = "", *, begins: bool = False
    ) -> None:
        """Wrap a method whose first parameter is `handle`; see `by_handle`."""
        if (original := self._original(owner, name)) is not None and takes(original, "handle"):
            observed = by_handle(original, self.calls, note, quiet, begins=begins)
            setattr(owner, name, observed)

    def wrap_made(self, owner: type, name: str, note: Note) -> None:
        """Wrap a method that makes a transfer from two lists and their indices."""
        names = (
            *("operation", "local_xfer_side", "local_indices"),
            *("remote_xfer_side", "remote_indices", "notif_msg"),
        )
        if (original := self._original(owner, name)) is not None and takes(original, *names):
            setattr(owner, name, by_indices(original, self.calls, note))

    def _original(self, owner: type, name: str) -> Callable[..., Any] | None:
        """Return a method; None: it is missing, or was wrapped under another name of its module."""
        found: Callable[..., Any] | None = getattr(owner, name, None)
        if found is None or (owner, name) in self._wrapped:
            return None
        self._wrapped.add((owner, name))
        return found

    def _note(
        self, note: Note | None, pick: Pick, args: tuple[Any, ...], kwargs: Mapping[str, Any],
        result: Any, begin: float, error: str,
    ) -> None:  # fmt: skip
        picked = pick(args, kwargs, result)
        if note is not None:
            self.calls.seen.add(note, args[0], begin, error, picked)

    def guarded(self, call: Callable[..., object], *values: Any) -> None:
        """Call a function of the observer; an error only ends observing."""
        try:
            call(*values)
        except Exception as error:
            self.calls.step_aside(error)

    def _forked(self) -> None:
        self.calls.forked()
        self._mutex = threading.Lock()

    def begin(self, owner: object, name: str, library: str) -> None:
        """Begin the recording of an agent or engine.

        Raises:
            OSError, LLMException: the file or a thread cannot be made.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        clean = "".join(letter if letter.isalnum() else "-" for letter in name)[:40]
        path = self._folder / f"{library}-{clean}-{os.getpid()}-{time.time_ns()}.kvrec"
        recorder = Recorder(path, peer_number(name), library, max_bytes=_MAX_BYTES, files=_FILES)
        recorder.event(
            "observe", LLMStatusCode.LLM_SUCCESS, 0.0, "", {"name": name, "library": library}
        )
        calls = self.calls
        if id(owner) in calls.agents:  # begun before, or by an earlier owner with this id
            calls.take()
        agent = Agent(recorder, sums=calls.inline)
        with self._mutex:
            before = calls.agents.get(id(owner))
            calls.agents[id(owner)] = agent
            if calls.thread is None:
                calls.thread = start_thread("kvplan-observer", self._work, calls)
        if before is not None:
            before.recorder.close()
        with suppress(TypeError):  # of a class without weak references
            weakref.finalize(owner, calls.gone, id(owner), weakref.ref(agent)).atexit = False

    def sum(self, tag: str, descriptors: Any) -> None:
        """Record sums of memory of an agent, for `kvplan.observe.sums`."""
        calls = self.calls
        if calls.inline and calls.seen.active:
            ranges = ranges_of(descriptors)[0]
            with calls.mutex:
                calls.take()
                for agent in list(calls.agents.values()):  # each that registered this memory
                    agent.add_sums(ranges, {"tag": tag})

    def flush(self) -> None:
        """Wait until all calls so far are in the files."""
        calls = self.calls
        if calls.thread is None:
            return
        done = threading.Event()
        calls.tokens.put(done)
        while not done.wait(_INTERVAL_S) and calls.thread.is_alive():
            pass
        for agent in list(calls.agents.values()):
            agent.recorder.flush()

    def close(self) -> None:
        """Record the remaining calls, and end. Idempotent."""
        calls = self.calls
        calls.seen.active = False
        if calls.thread is not None:
            calls.tokens.put(False)
            calls.thread.join(_CLOSING_S)
            calls.thread = None
        for agent in list(calls.agents.values()):  # the thread may be late, and change them
            agent.recorder.close()

    def _work(self, calls: Calls) -> None:
        token: bool | threading.Event | tuple[int, weakref.ref[Agent]] = True
        while token is not False:
            token = calls.tokens.get()
            if token is True:
                with suppress(Empty):
                    token = calls.tokens.get(timeout=_INTERVAL_S)
            calls.seen.awake = False  # first: calls from here on wake the thread again
            calls.take()
            if isinstance(token, threading.Event):
                token.set()
            elif isinstance(token, tuple):
                self._end(*token)

    def _end(self, key: int, reference: weakref.ref[Agent]) -> None:
        """Close the recording of an agent whose observed object is gone."""
        with self._mutex:
            agent = self.calls.agents.get(key)
            if agent is None or agent is not reference():  # the agent of a later object there
                return
            del self.calls.agents[key]
        agent.recorder.close()


@lru_cache(maxsize=1024)
def peer_number(name: str) -> int:
    """Return the cluster id that recordings use for an agent of this name."""
    return crc32(name.encode("utf-8", "replace")) & 0x7FFFFFFF
