"""Loggers that survive exceptions of handlers, and that peers cannot use to fill a disk."""

from __future__ import annotations

import logging
import time
import traceback
from functools import partialmethod
from typing import Any, Final

_INTERVAL_S: Final = 1.0  # between two lines of one kind


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger of the standard library that reports exceptions of handlers on standard error.

    Handlers of the standard library do that themselves; other handlers may raise. Callers must not
    fail here: they return outcomes, or run in threads on which others depend.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log like `logging.Logger.log`."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the record names the caller
        try:
            super().log(level, msg, *args, **kwargs)
        except Exception:
            if logging.raiseExceptions:
                traceback.print_exc()


class LimitedLog:
    """A log of at most one line of each kind in a second, for lines that others can cause.

    The kind of a line is its text without arguments. Each line tells how many lines of its kind
    were omitted before it, if any.

    Attributes:
        count: Number of lines of all kinds, logged or not.
    """

    def __init__(self, log: Log) -> None:
        self.count: int = 0
        self._log = log
        self._kinds: dict[str, tuple[float, int]] = {}  # time of the last line; omitted since

    def log(self, level: int, msg: str, *args: object, **kwargs: Any) -> None:
        """Log like `logging.Logger.log`, or only count the line."""
        self.count += 1
        now = time.monotonic()
        logged, left_out = self._kinds.get(msg, (float("-inf"), 0))
        if now - logged < _INTERVAL_S:
            self._kinds[msg] = logged, left_out + 1
            return
        self._kinds[msg] = now, 0
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        if left_out:
            msg, args = f"{msg} unlogged=%d", (*args, left_out)
        self._log.log(level, msg, *args, **kwargs)

    warning = partialmethod(log, logging.WARNING)
    error = partialmethod(log, logging.ERROR)
