"""The log of the original: logger LLM_DATADIST, which writes to standard output.

The environment variable ASCEND_GLOBAL_LOG_LEVEL sets the level: "0" debug, "1" info, "2" warning,
anything else error. The variable is read once, at the first use of the log.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from functools import cache
from typing import Any, TextIO

from kvplan.system.logs import Log

_LEVELS = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING}
_FORMAT = (
    "[%(levelname)s] %(name)s(%(process)d,%(processName)s):%(asctime)s.%(msecs)03d "
    "[%(filename)s:%(lineno)d]%(thread)d %(funcName)s: %(message)s"
)
_SKIPPED_FILES = (__file__, logging.__file__)


class _StandardOutput(logging.StreamHandler[TextIO]):
    """A handler that follows `sys.stdout`, which a program may redirect."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


@cache
def get_logger() -> logging.Logger:
    """Return the logger, with its handler and level."""
    logger = logging.getLogger("LLM_DATADIST")
    logger.findCaller = _find_caller  # type: ignore[method-assign, assignment]
    logger.setLevel(_LEVELS.get(os.environ.get("ASCEND_GLOBAL_LOG_LEVEL", ""), logging.ERROR))
    handler = _StandardOutput(sys.stdout)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
    logger.addHandler(handler)
    return logger


@cache
def _ready() -> Log:
    return Log(get_logger().name)


def info(msg: str, *args: object, **kwargs: Any) -> None:
    """Log at level info; arguments as for `logging.Logger.info`."""
    _ready().info(msg, *args, **kwargs)


def warn(msg: str, *args: object, **kwargs: Any) -> None:
    """Log a warning."""
    _ready().warning(msg, *args, **kwargs)


def error(msg: str, *args: object, **kwargs: Any) -> None:
    """Log an error."""
    _ready().error(msg, *args, **kwargs)


def _find_caller(
    stack_info: bool = False, stack_level: int = 1
) -> tuple[str, int, str, str | None]:
    """Return file, line, function and, if `stack_info`, the stack of the caller that logs."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_filename not in _SKIPPED_FILES:
            if stack_level <= 1:
                break
            stack_level -= 1
        frame = frame.f_back
    stack = "".join(traceback.format_stack(frame)) if stack_info else None
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, stack
