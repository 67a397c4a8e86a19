"""Calls of functions of kvplan, counted in this thread and in threads that begin later."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path
from types import FrameType

import kvplan

_FOLDER = str(Path(kvplan.__file__).parent) + os.sep


class Calls:
    """Counts while it is begun; a coroutine that goes on is a call, too.

    Args:
        thread: with what the names of the threads begin that are counted besides the main thread.
    """

    def __init__(self, thread: str) -> None:
        self._thread = thread
        self._seen: list[tuple[str, str]] | None = None
        threading.setprofile(self._look)

    def begin(self) -> None:
        gc.disable()  # what other tests have left ends in calls, too
        self._seen = []
        sys.setprofile(self._look)

    def end(self) -> list[tuple[str, str]]:
        """Return file and function of each call, in their order."""
        sys.setprofile(None)
        seen, self._seen = self._seen, None
        gc.enable()
        assert seen is not None
        return seen

    def close(self) -> None:
        threading.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if (seen := self._seen) is not None and event == "call":
            code = frame.f_code
            name = threading.current_thread().name
            is_counted = name.startswith(("MainThread", self._thread))
            if is_counted and code.co_filename.startswith(_FOLDER):
                seen.append((code.co_filename.removeprefix(_FOLDER), code.co_qualname))
