"""The tests of copies, with each version of the driver in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_sim.build import DEFAULT, VARIANTS
from tests.cuda_sim.simulator import VARIANT
from tests.support import suite

HERE = Path(__file__).parent


@pytest.mark.skipif(VARIANT != DEFAULT, reason="this is such a process")
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != DEFAULT])
@pytest.mark.slow
def test_copies_pass_with_another_version_of_the_driver(variant: str) -> None:
    """A process can load only one version of the library."""
    done = suite.run(HERE / "test_copies.py", environment={"KVSIM_CUDA_VARIANT": variant})
    assert done.returncode == 0, done.stdout[-6000:]
