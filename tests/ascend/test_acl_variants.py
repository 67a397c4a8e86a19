"""The tests of ACL, with each other variant of the libraries in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ascend.simulator import VARIANT
from tests.ascend_sim.build import VARIANTS
from tests.support import suite

HERE = Path(__file__).parent
OTHERS = [name for name in VARIANTS if name not in {"8.5", "9.0", "9.1"}]
"""Variants whose ACL differs from that of 8.5; 9.0 and 9.1 only add HIXL."""


@pytest.mark.skipif(VARIANT != "8.5", reason="this is such a process")
@pytest.mark.parametrize("variant", OTHERS)
@pytest.mark.slow
def test_the_tests_of_acl_pass_with_another_variant(variant: str) -> None:
    """A process can load only one version of a library."""
    files = [HERE / "test_acl_device.py"]
    if variant != "hccl-only":  # the ACL of that variant is that of 8.5
        files += [HERE / f"test_{name}.py" for name in ("acl_copy", "acl_abort", "acl_processes")]
        files.append(HERE / "test_channel_concurrency.py")
    done = suite.run(*files, environment={"KVSIM_VARIANT": variant})
    assert done.returncode == 0, done.stdout[-6000:]
