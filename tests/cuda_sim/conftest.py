"""The stand-in for libcuda.so.1 in this process; other variants run in processes of their own."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.cuda_sim.cuda_library import Cuda


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    """The stand-in with device 0's primary context current. A test that leaks resources fails."""
    library = Cuda()
    library.ok("cuInit", 0)
    gc.collect()  # collects engines of earlier tests before this test runs
    before = library.leaks()
    library.primary()
    yield library
    library.core.kvsim_faults_clear()
    library.core.kvsim_hangs_end()
    for name in ("latency_us", "bandwidth", "cuda_staged_us"):
        library.set(name, 0)
    library.ok("cuDevicePrimaryCtxRelease_v2", 0)
    library.ok("cuCtxSetCurrent", None)
    assert library.leaks() == before
