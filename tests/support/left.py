"""A check that the engines of a test leave nothing behind on a simulated device."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 30.0


def check_nothing_left(left: Callable[[], dict[str, int]], before: dict[str, int]) -> None:
    """Wait until no kind of object is more numerous than before.

    A thread frees device memory later, when no work can use it any more (`cuda/reclaim.c`).
    """
    deadline = time.monotonic() + DEADLINE_S
    while True:
        more = {kind: count for kind, count in left().items() if count > before.get(kind, 0)}
        if not more or time.monotonic() > deadline:
            assert more == {}
            return
        time.sleep(0.001)
