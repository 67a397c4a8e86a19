"""Fixtures of tests on the simulated device; a folder's conftest.py imports those that it needs."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvnative._acl import AclLibrary
from kvnative._device import Device
from tests.ascend.simulator import Controls, Log, controls, found


@pytest.fixture(scope="session")
def sim_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all processes of a test run share; the settings are read once a process.

    So it is one folder, though each conftest.py that imports this makes a fixture of its own.
    """
    folder = tmp_path_factory.getbasetemp() / "kvsim"
    folder.mkdir(exist_ok=True)
    os.environ["KVSIM_DIR"] = str(folder)
    os.environ["KVSIM_LOG"] = str(folder / "log")
    return folder


@pytest.fixture
def sim_log(sim_folder: Path) -> Log:
    """What a test's processes call."""
    controls().set("log", sim_folder / "log")  # another folder's tests may have loaded it first
    return Log(sim_folder / "log")


@pytest.fixture
def simulator(sim_folder: Path) -> Iterator[Controls]:
    """The simulator of CANN 8.5, found by this process and those that it starts."""
    with found():
        yield controls()
        controls().clear_faults()


@pytest.fixture
def device(simulator: Controls) -> Iterator[Device]:
    """Number 3 of eight; nothing may be left of it."""
    device = AclLibrary.load().device(3)
    yield device
    device.close()
    del device
    gc.collect()
    assert simulator.left() == {}
