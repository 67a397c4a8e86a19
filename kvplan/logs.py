"""Logs of this package: a handler that raises does no harm."""

from __future__ import annotations

import logging
import traceback
from typing import Any


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger of the standard library; a handler that raises is reported on standard error.

    The standard library's own handlers behave so. The callers that log here have an outcome to
    return, or are threads that others depend on.

    Args:
        name: of the logger.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """As `logging.Logger.log`."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the record names the caller
        try:
            super().log(level, msg, *args, **kwargs)
        except Exception:
            if logging.raiseExceptions:
                traceback.print_exc()
