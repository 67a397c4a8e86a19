"""Recording of calls of kvplan's functions, in this thread and in threads that start later."""

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
    """Records calls from `begin` to `end`; resuming a coroutine is a call, too.

    Args:
        thread: prefix of the names of threads that are recorded besides the main thread.
    """

    def __init__(self, thread: str) -> None:
        self._thread = thread
        self._seen: list[tuple[str, str]] | None = None
        threading.setprofile(self._look)

    def begin(self) -> None:
        gc.disable()  # collecting garbage of other tests would make calls, too
        self._seen = []
        sys.setprofile(self._look)

    def end(self) -> list[tuple[str, str]]:
        """Return the file and the function of each call, in order."""
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
