"""The order in which the end of a batch is known: by its callback, then by its outcome."""

from __future__ import annotations

from kvnative._backend import KVN_OK, Backend
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from tests.support.wrappers import early_ends, ends_seen

__all__ = ["assert_no_outcome_before_its_end"]

DEADLINE_MS = 60_000


def assert_no_outcome_before_its_end(backend: Backend, descriptors: Descriptors) -> None:
    """Check the order: when the outcome is known, memory that the callback uses may be freed."""
    watched = early_ends(backend)
    with Executor(watched) as executor:
        while ends_seen(watched)[0] == 0:  # a batch may end inside of its submission
            report = executor.submit(descriptors).wait(DEADLINE_MS)
            assert report.status == KVN_OK, report.message
    assert ends_seen(watched)[1] == 0
