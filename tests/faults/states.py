"""Waits for the state of a link: each step of a link is logged, and a log record wakes the wait."""

from __future__ import annotations

import logging
import time
from threading import Condition

from kvplan import LinkState, LinkStatus, LlmDataDist
from tests.faults.gate import DEADLINE_S


class _Changed(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.condition = Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.condition:
            self.condition.notify_all()


def link_of(datadist: LlmDataDist, cluster_id: int) -> LinkStatus | None:
    return next((link for link in datadist.links() if link.cluster_id == cluster_id), None)


def wait_for_state(datadist: LlmDataDist, cluster_id: int, state: LinkState | None) -> str:
    """Wait until the link with a cluster is in a state (None: removed), and return its error."""
    logger = logging.getLogger("kvplan")
    changed, level = _Changed(), logger.level
    logger.addHandler(changed)
    logger.setLevel(logging.INFO)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while True:
            with changed.condition:
                link = link_of(datadist, cluster_id)
                if (link and link.state) is state:
                    return link.last_error if link else ""
                left = deadline - time.monotonic()
                assert left > 0, f"{link} is not {state}"
                changed.condition.wait(left)
    finally:
        logger.removeHandler(changed)
        logger.setLevel(level)
