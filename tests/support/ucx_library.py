"""The UCX library of the tests: the wheel's, or the one that KVPLAN_UCX_LIBRARY names at the start.

Most tests load none: tests/conftest.py hides it, so that engines behave alike everywhere, and
because loading it takes 0.4 s of a core in each process. Tests that need it use the fixture `ucx`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvplan.transport.ucx.library import OVERRIDE, Found, find

_TESTED = "KVPLAN_TESTED_UCX"  # the original value, for processes that pytest-xdist starts


def hide() -> None:
    """Hide the library from this process and those that it starts."""
    if named := os.environ.get(OVERRIDE):
        os.environ.setdefault(_TESTED, named)
    os.environ[OVERRIDE] = ""


@contextmanager
def found() -> Iterator[Found]:
    """Let this process and those that it starts find the library."""
    before = os.environ[OVERRIDE]
    if named := os.environ.get(_TESTED):
        os.environ[OVERRIDE] = named
    else:
        del os.environ[OVERRIDE]
    try:
        yield find()
    finally:
        os.environ[OVERRIDE] = before
