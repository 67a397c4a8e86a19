"""The queue of observed calls, and wrappers of the methods that each transfer calls.

The program waits for these wrappers, so they only keep references; the thread does all else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvplan.system.logs import Log

if TYPE_CHECKING:
    from kvplan.observe.agent import Agent

_log = Log("kvplan")

MAX_SEEN: Final = 1 << 17  # calls that wait for the thread

_MUTABLE: Final = frozenset((list, np.ndarray))
"""Types of indices that a program may change later; copying them is fast."""

Note = Callable[..., None]
"""A method of `Agent`; its arguments are begin, end, error or "", and the picked values."""


@dataclass
class Calls:
    """Calls that the threads of one process have made.

    Attributes:
        active: False to observe nothing.
        seen: note, id of the agent, begin, end, error and picked values of each call.
        tokens: wake the thread: True for new calls, False for the end, an Event to set.
        awake: True if the thread has a token.
        thread: the thread that takes calls; None: no agent was made.
        agents: the agents by the id of the observed object.
        failed: True after an error of the observer.
        inline: True to take calls in the thread that made them, before they return.
        mutex: held by the thread that takes calls.
    """

    active: bool = True
    seen: deque[tuple[Any, ...]] = field(default_factory=deque)
    tokens: SimpleQueue[bool | threading.Event] = field(default_factory=SimpleQueue)
    awake: bool = False
    thread: threading.Thread | None = None
    agents: dict[int, Agent] = field(default_factory=dict)
    failed: bool = False
    inline: bool = False
    mutex: threading.RLock = field(default_factory=threading.RLock)

    def wake(self) -> None:
        """Let the thread take the calls, or take them here if `inline`."""
        if self.thread is None:  # a forked child, without an agent of its own
            self.seen.clear()
        elif self.inline:
            self.take()
        elif not self.awake:
            self.awake = True
            self.tokens.put(True)

    def take(self) -> None:
        """Pass the calls to their agents."""
        with self.mutex:
            if (count := len(self.seen)) > MAX_SEEN:
                self.seen.clear()
                for agent in list(self.agents.values()):
                    agent.lose(count)
            while self.seen:
                note, owner, begin, end, error, *picked = self.seen.popleft()
                noting = self.agents.get(owner)
                if noting is None or self.failed:
                    continue
                try:
                    note(noting, begin, end, error, *picked)
                except Exception as raised:
                    self.step_aside(raised)

    def step_aside(self, error: Exception) -> None:
        """End observing after an error, with one warning."""
        if not self.failed:
            self.active, self.failed = False, True
            _log.warning(
                "observing has ended: %s: %s; the program goes on", type(error).__name__, error
            )

    def forked(self) -> None:
        """Begin empty in a forked child: the parent records its agents."""
        self.seen.clear()
        self.mutex = threading.RLock()
        self.tokens, self.awake, self.thread, self.agents = SimpleQueue(), False, None, {}


def takes(method: Callable[..., object], *names: str) -> bool:
    """Return whether `names` are the first parameters of a method, after `self`."""
    found = list(signature(method).parameters)
    return found[1 : 1 + len(names)] == [*names]


def by_handle(
    original: Callable[..., Any], calls: Calls, note: Note, quiet: str, *, begins: bool
) -> Callable[..., Any]:
    """Return a wrapper of a method that takes a handle.

    Args:
        original: the method.
        calls: where calls are noted.
        note: see `Note`.
        quiet: a result that is not noted.
        begins: True to note the time before the call, too.
    """
    # A call with starred arguments takes four times as long as one without, so both are here.
    see = calls.seen.append

    @wraps(original)
    def observed(self: object, handle: object, *args: Any, **kwargs: Any) -> Any:
        if not calls.active:
            return original(self, handle, *args, **kwargs)
        begin = perf_counter() if begins else 0.0
        try:
            if args or kwargs:
                result = original(self, handle, *args, **kwargs)
            else:
                result = original(self, handle)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"  # no frames are kept
            see((note, id(self), begin, perf_counter(), text, key_of(handle), None, args or kwargs))
            calls.wake()
            raise
        if result != quiet:
            key = handle if type(handle) is int else id(handle)
            see((note, id(self), begin, perf_counter(), "", key, result, args or kwargs))
            if not calls.awake:
                calls.wake()
        return result

    return observed


def by_indices(original: Callable[..., Any], calls: Calls, note: Note) -> Callable[..., Any]:
    """Return a wrapper of a method that makes a transfer of two lists and indices."""
    see = calls.seen.append

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
        if not calls.active:
            return made
        try:
            ours, theirs = local_xfer_side, remote_xfer_side
            here, there = local_indices, remote_indices
            see((
                note, id(self), 0.0, 0.0, "",
                made if type(made) is int else id(made), operation,
                ours if type(ours) is int else id(ours),
                here.copy() if type(here) in _MUTABLE else tuple(here),
                theirs if type(theirs) is int else id(theirs),
                there.copy() if type(there) in _MUTABLE else tuple(there),
                notif_msg,
            ))  # fmt: skip
            if not calls.awake:
                calls.wake()
        except Exception as error:
            calls.step_aside(error)
        return made

    return observed


def key_of(handle: object) -> int:
    """Return the key of a handle: the handle itself if it is a number, otherwise its id."""
    return handle if type(handle) is int else id(handle)
