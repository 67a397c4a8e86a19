"""Memory that is deregistered, but that a peer may still write to: kept until it cannot."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S: Final = 1.0
"""For a peer that writes and does not get on, before what it writes to is kept."""

_LOOK_S: Final = 0.05  # between two looks whether it does


class Kept(Protocol):
    """What is kept."""

    def release(self) -> None:
        """Let go of the memory."""


class Quarantine:
    """Holds such memory, by a thread that is begun with the first.

    One for the process: it outlives the transports.
    """

    def __init__(self) -> None:
        self.begin()
        # In a forked child the thread is not there, and the lock may be held for ever.
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Hold nothing."""
        self._changed = threading.Condition(threading.RLock())
        self._held: list[tuple[Callable[[], bool], Kept]] = []
        self._thread: threading.Thread | None = None

    def add(self, is_written: Callable[[], bool], memory: Kept) -> None:
        """Hold `memory` as long as `is_written()`, which the thread asks; then release it."""
        with self._changed:
            self._held.append((is_written, memory))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvplan-quarantine", daemon=True)
                with suppress(RuntimeError):  # no more threads: it is held for ever
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        with self._changed:
            while self._held:
                self._changed.wait(_LOOK_S)
                held, self._held = self._held, []
                for is_written, memory in held:
                    if is_written():
                        self._held.append((is_written, memory))
                    else:
                        memory.release()
            self._thread = None


QUARANTINE: Final = Quarantine()
