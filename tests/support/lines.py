"""An action before a chosen line of a call, where a signal handler could run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from types import CodeType, FrameType
from typing import Any

__all__ = ["interrupted"]


def interrupted(
    at: int,
    call: Callable[[], object],
    action: Callable[[], object],
    inside: Container[CodeType],
) -> bool:
    """Run `call`, with `action` before its `at`-th line in `inside`; return False if fewer run."""
    lines = 0

    def before_line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        if event == "line" and lines == at:
            sys.settrace(None)
            action()
        return before_line

    def enter(frame: FrameType, event: str, _: object) -> Any:
        return before_line if frame.f_code in inside else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines >= at
