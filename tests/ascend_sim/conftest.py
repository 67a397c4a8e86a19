"""The simulated ACL library in this process; other variants run in processes of their own."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.ascend_sim.acl_library import Acl

REPEAT_INITIALIZE = 100002


@pytest.fixture
def acl() -> Iterator[Acl]:
    """The library, with device 0 set in this thread. A test that leaks resources fails."""
    library = Acl()
    assert library.aclInit(None) in (0, REPEAT_INITIALIZE)
    gc.collect()  # collects engines of earlier tests before this test runs
    before = library.leaks()
    library.ok("aclrtSetDevice", 0)
    yield library
    library.core.kvsim_faults_clear()
    for name in ("latency_us", "bandwidth"):
        library.set(name, 0)
    left = library.leaks()
    library.ok("aclrtResetDevice", 0)
    assert left == before
