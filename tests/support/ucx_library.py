"""Which UCX the tests run with: the wheel's, or that of KVPLAN_UCX_LIBRARY when they were started.

Most load none: tests/conftest.py hides it, so that engines say the same everywhere, and because
loading one takes 0.4 s of a core in each process. Those that want it ask for the fixture `ucx`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvplan.transport.ucx.library import OVERRIDE, Found, find

_TESTED = "KVPLAN_TESTED_UCX"  # what the processes that pytest-xdist starts find in its stead


def hide() -> None:
    """Let this process, and those that it starts, find none."""
    if named := os.environ.get(OVERRIDE):
        os.environ.setdefault(_TESTED, named)
    os.environ[OVERRIDE] = ""


@contextmanager
def found() -> Iterator[Found]:
    """Let this process, and those that it starts, find it."""
    before = os.environ[OVERRIDE]
    if named := os.environ.get(_TESTED):
        os.environ[OVERRIDE] = named
    else:
        del os.environ[OVERRIDE]
    try:
        yield find()
    finally:
        os.environ[OVERRIDE] = before
