"""The queue of observed calls, and wrappers of the methods that are called for each transfer.

The program waits for these wrappers, so they only append to a log, unless sums are recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from inspect import signature
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from kvnative._observed import CallLog
from kvplan.system.logs import Log

if TYPE_CHECKING:
    from kvplan.observe.agent import Agent

_log = Log("kvplan")

MAX_SEEN: Final = 1 << 16
"""Maximum number of waiting calls, for a transfer's methods; others have twice the room."""

_MAX_NBYTES: Final = 16 << 20  # bytes of indices that wait for the thread
_AT_ONCE: Final = 64  # calls that the thread takes before it yields to the program's threads
_TURN_S: Final = 50e-6

Note = Callable[..., None]
"""A method of `Agent`; its arguments are begin, end, error or "", and the picked values."""


class Calls:
    """Calls that the threads of one process have made.

    Attributes:
        seen: the calls that wait for the thread.
        tokens: messages that wake the thread: True: new calls; False: end; an Event to set; or the
            id of an observed object that is gone, and its agent.
        thread: the thread that takes calls; None before the first agent and after the end.
        agents: the agents by the id of the observed object.
        failed: True after an error of the observer.
        inline: True to take calls in the thread that made them, before they return.
        mutex: held while calls are taken.
    """

    def __init__(self, *, inline: bool) -> None:
        self.seen = CallLog(self.wake, MAX_SEEN, _MAX_NBYTES)
        self.tokens: SimpleQueue[bool | threading.Event | tuple[int, ref[Agent]]] = SimpleQueue()
        self.thread: threading.Thread | None = None
        self.agents: dict[int, Agent] = {}
        self.failed = False
        self.inline = inline
        self.mutex = threading.RLock()
        self._is_taking = False

    def wake(self) -> None:
        """Wake the thread, or take the calls here if `inline`."""
        if self.thread is None:  # before the first agent of this process, or after `Observer.close`
            self.seen.clear()
        elif self.inline:
            self.take()
        else:
            self.seen.awake = True
            self.tokens.put(True)

    def gone(self, owner: int, agent: ref[Agent]) -> None:
        """Let the thread close the recording of an agent; called when the observed object dies."""
        if self.thread is not None:
            self.tokens.put((owner, agent))

    def take(self) -> None:
        """Pass the calls so far to their agents."""
        with self.mutex:
            if self._is_taking:  # a signal handler, or a finalizer, in the loop below
                return
            self._is_taking = True
            try:
                left = len(self.seen)
                while left > 0 or (self.inline and len(self.seen)):
                    calls, lost = self.seen.take(_AT_ONCE)
                    left -= len(calls)
                    self._pass(calls, lost)
                    if not self.inline:
                        time.sleep(_TURN_S)  # gives the GIL to the program
            finally:
                self._is_taking = False

    def _pass(self, calls: list[tuple[Any, ...]], lost: int) -> None:
        """Pass calls to their agents, then the number of calls that were lost after them."""
        for note, owner, *values in calls:
            noting = self.agents.get(owner)
            if noting is None or self.failed:
                continue
            try:
                note(noting, *values)
            except Exception as raised:
                self.step_aside(raised)
        if lost:
            for agent in list(self.agents.values()):
                agent.lose(lost)

    def step_aside(self, error: Exception) -> None:
        """End observing after an error, with one warning."""
        if not self.failed:
            self.seen.active, self.failed = False, True
            _log.warning(
                "observing has ended: %s: %s; the program goes on", type(error).__name__, error
            )

    def forked(self) -> None:
        """Begin empty in a forked child: the parent goes on recording its agents."""
        self.seen.clear()
        self.mutex, self._is_taking = threading.RLock(), False
        self.seen.awake = False
        self.tokens, self.thread, self.agents = SimpleQueue(), None, {}


def takes(method: Callable[..., object], *names: str) -> bool:
    """Return True if `names` are the first parameters of a method, after `self`."""
    found = list(signature(method).parameters)
    return found[1 : 1 + len(names)] == [*names]


def by_handle(
    original: Callable[..., Any], calls: Calls, note: Note, quiet: str, *, begins: bool
) -> Callable[..., Any]:
    """Return a wrapper of a method that takes a handle.

    Args:
        original: the method.
        calls: the calls to which new ones are added.
        note: see `Note`.
        quiet: calls with this result are not noted.
        begins: True to note the time before the call as well.
    """
    see = calls.seen.add_handle

    @wraps(original)
    def observed(self: object, handle: object, *args: Any, **kwargs: Any) -> Any:
        begin = perf_counter()
        try:
            # A call with starred arguments takes longer.
            if args or kwargs:
                result = original(self, handle, *args, **kwargs)
            else:
                result = original(self, handle)
        except BaseException as error:
            see(note, self, handle, None, begin, args or kwargs, text_of(error))
            raise
        if result != quiet:
            see(note, self, handle, result, begin, args or kwargs, "")
        return result

    @wraps(original)
    def observed_alone(self: object, handle: object) -> Any:
        try:
            result = original(self, handle)
        except BaseException as error:
            see(note, self, handle, None, 0.0, (), text_of(error))
            raise
        if result != quiet:
            see(note, self, handle, result, 0.0, (), "")
        return result

    return observed if begins or len(signature(original).parameters) > 2 else observed_alone


def by_indices(original: Callable[..., Any], calls: Calls, note: Note) -> Callable[..., Any]:
    """Return a wrapper of a method that makes a transfer of two lists and indices."""
    see = calls.seen.add_made

    @wraps(original)
    def observed(
        self: object, operation: str, local_xfer_side: object, local_indices: Any,
        remote_xfer_side: object, remote_indices: Any, notif_msg: Any = b"", *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        if args or kwargs:
            made = original(
                self, operation, local_xfer_side, local_indices, remote_xfer_side, remote_indices,
                notif_msg, *args, **kwargs,
            )  # fmt: skip
        else:
            made = original(
                self, operation, local_xfer_side, local_indices, remote_xfer_side, remote_indices,
                notif_msg,
            )  # fmt: skip
        try:
            see(
                note, self, made, operation, local_xfer_side, local_indices, remote_xfer_side,
                remote_indices, notif_msg,
            )  # fmt: skip
        except Exception as error:
            calls.step_aside(error)
        return made

    return observed


def text_of(error: BaseException) -> str:
    """Return the text of an exception, without keeping its frames alive."""
    return f"{type(error).__name__}: {error}"


def key_of(handle: object) -> int:
    """Return the key of a handle: the handle itself if it is a number, otherwise its id."""
    return handle if type(handle) is int else id(handle)
