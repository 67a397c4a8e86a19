"""The stand-in for libcuda.so.1 as a test sees it, and how engines find it.

In a ``conftest.py``: ``from tests.cuda_sim.simulator import cuda_simulator, sim_folder``. A test
that uses the fixture `cuda_simulator`, and the processes that it starts, find the stand-in where a
driver would be; a violation of CUDA's rules fails it.
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
    """Of the stand-in that this process has loaded, or will."""

    accelerator = "cuda"

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self._core.kvsim_last_violation.restype = ctypes.c_char_p

    def violations(self) -> int:
        """Return how many there were in this process; each is a line of the log, too."""
        return int(self._core.kvsim_violations())

    def last_violation(self) -> str:
        """Return what the latest was; "" if there was none."""
        text: bytes = self._core.kvsim_last_violation()
        return text.decode()

    def end_hangs(self) -> None:
        """Let the work go on that a fault ``hang`` holds."""
        self._core.kvsim_hangs_end()


@cache
def controls(variant: str = VARIANT) -> CudaControls:
    """Those of this process."""
    return CudaControls(build(variant))


@contextmanager
def found(variant: str = VARIANT) -> Iterator[Path]:
    """Let this process, and those that it starts, find the stand-in."""
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
    """The stand-in, found by this process and those that it starts; none may break CUDA's rules."""
    with found():
        simulator = controls()
        simulator.set("log", sim_folder / "log")  # another folder's tests may have loaded it first
        log = Log(sim_folder / "log")
        yield simulator
        simulator.clear_faults()
        simulator.end_hangs()
        violations = [call.fields["what"] for call in log.calls("violation")]
        assert not violations, violations
