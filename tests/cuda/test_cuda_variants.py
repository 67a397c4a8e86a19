"""The tests of copies again, each version of the driver in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_sim.build import DEFAULT, VARIANTS
from tests.cuda_sim.simulator import VARIANT

HERE = Path(__file__).parent


@pytest.mark.skipif(VARIANT != DEFAULT, reason="this is such a process")
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != DEFAULT])
@pytest.mark.slow
def test_copies_with(variant: str) -> None:
    """A process loads a library once."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "test_copies.py"],
        env={**os.environ, "KVSIM_CUDA_VARIANT": variant},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
