"""Logs of this package: what a handler does wrong spoils nothing."""

from __future__ import annotations

import logging
import traceback
from typing import Any


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger of the standard library; a handler that raises is heard of on standard error.

    As its own handlers are. Who logs here has an outcome to tell, or is a thread that others depend
    on.

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
