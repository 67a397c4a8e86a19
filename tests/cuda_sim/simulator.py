"""Controls and fixtures of the stand-in for libcuda.so.1.

A ``conftest.py`` imports ``cuda_simulator`` and ``sim_folder`` from here. With the fixture
`cuda_simulator`, a test and the processes that it starts find the stand-in in place of a driver.
The test fails on a violation of CUDA's rules.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.ascend.fixtures import sim_folder
from tests.ascend.simulator import Controls, Log
from tests.cuda_sim.build import DEFAULT, build

__all__ = ["CudaControls", "Log", "controls", "cuda_simulator", "found", "sim_folder"]

LIBRARY = "KVPLAN_CUDA_LIBRARY"
VARIANT = os.environ.get("KVSIM_CUDA_VARIANT", DEFAULT)  # of this process


class CudaControls(Controls):
    """Controls of the stand-in that this process has loaded or will load."""

    accelerator = "cuda"

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self._core.kvsim_last_violation.restype = ctypes.c_char_p

    def violations(self) -> int:
        """Return the number of violations in this process, which the log describes."""
        return int(self._core.kvsim_violations())

    def last_violation(self) -> str:
        """Return the text of the latest violation, or ""."""
        text: bytes = self._core.kvsim_last_violation()
        return text.decode()

    def end_hangs(self) -> None:
        """Release the work that a fault ``hang`` holds."""
        self._core.kvsim_hangs_end()


@cache
def controls(variant: str = VARIANT) -> CudaControls:
    """Return the controls of this process."""
    return CudaControls(build(variant))


@contextmanager
def found(variant: str = VARIANT) -> Iterator[Path]:
    """Make this process, and those that it starts, find the stand-in."""
    before = os.environ.get(LIBRARY)
    os.environ[LIBRARY] = str(build(variant))
    try:
        yield build(variant)
    finally:
        if before is None:
            del os.environ[LIBRARY]
        else:
            os.environ[LIBRARY] = before


@pytest.fixture
def cuda_simulator(sim_folder: Path) -> Iterator[CudaControls]:
    """The stand-in for this process and its children, which must not violate CUDA's rules."""
    with found():
        simulator = controls()
        # Tests of another folder may have loaded the stand-in first.
        simulator.set("log", sim_folder / "log")
        log = Log(sim_folder / "log")
        yield simulator
        simulator.clear_faults()
        simulator.end_hangs()
        violations = [call.fields["what"] for call in log.calls("violation")]
        assert not violations, violations
