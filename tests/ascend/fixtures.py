"""Fixtures of tests on the simulated device; a folder's conftest.py imports those it needs."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvnative._acl import AclLibrary
from kvnative._device import Device
from tests.ascend.simulator import Controls, Log, controls, found
from tests.support.left import check_nothing_left


@pytest.fixture(scope="session")
def sim_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all processes of a test run share.

    A process reads its settings once, so all conftest.py that import this fixture use one folder.
    """
    folder = tmp_path_factory.getbasetemp() / "kvsim"
    folder.mkdir(exist_ok=True)
    os.environ["KVSIM_DIR"] = str(folder)
    os.environ["KVSIM_LOG"] = str(folder / "log")
    return folder


@pytest.fixture
def sim_log(sim_folder: Path) -> Log:
    """A log of the calls that a test's processes make."""
    # Tests of another folder may have loaded the library first.
    controls().set("log", sim_folder / "log")
    return Log(sim_folder / "log")


@pytest.fixture
def simulator(sim_folder: Path) -> Iterator[Controls]:
    """The simulator of CANN 8.5, for this process and those that it starts."""
    with found():
        yield controls()
        controls().clear_faults()


@pytest.fixture
def device(simulator: Controls) -> Iterator[Device]:
    """Device 3 of eight. A test that leaks its resources fails."""
    before = simulator.left()  # of an engine whose background still waits for its peer
    device = AclLibrary.load().device(3)
    yield device
    device.close()
    del device
    gc.collect()
    check_nothing_left(simulator.left, before)
