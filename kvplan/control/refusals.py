"""What peers sent that was refused: all of it counted, little of it logged."""

from __future__ import annotations

import time
from typing import Final

from kvplan.logs import Log

_LOG_INTERVAL_S: Final = 1.0

_log = Log("kvplan.control")


class Refusals:
    """Counts refusals; logs one a second at most, so that nobody can fill a disk from outside."""

    def __init__(self) -> None:
        self.count = 0
        self._logged_count = 0
        self._logged = float("-inf")

    def note(self, peer: str, reason: str) -> None:
        """Count one refusal, and log it if none was logged within the last second."""
        self.count += 1
        now = time.monotonic()
        if now - self._logged < _LOG_INTERVAL_S:
            return
        others = self.count - self._logged_count - 1
        self._logged, self._logged_count = now, self.count
        _log.warning("event=refused peer=%s reason=%r unlogged=%d", peer, reason, others)
