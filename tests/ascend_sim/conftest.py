"""The simulated ACL library in this process; other variants have processes of their own."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.ascend_sim.acl_library import Acl

REPEAT_INITIALIZE = 100002


@pytest.fixture
def acl() -> Iterator[Acl]:
    """Device 0 is set in this thread; a test that leaves something behind fails."""
    library = Acl()
    assert library.aclInit(None) in (0, REPEAT_INITIALIZE)
    gc.collect()  # engines of tests before this one: not while it runs
    before = library.leaks()
    library.ok("aclrtSetDevice", 0)
    yield library
    library.core.kvsim_faults_clear()
    for name in ("latency_us", "bandwidth"):
        library.set(name, 0)
    left = library.leaks()
    library.ok("aclrtResetDevice", 0)
    assert left == before
