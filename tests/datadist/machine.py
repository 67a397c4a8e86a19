"""Machines that tests of transfers run on: this host, or a device; see tests/ascend/device.py."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvplan import LlmDataDist, Transfers
from tests.support.holding import LetGo, held_transfers
from tests.support.over_tcp import OverTcp


class Machine(Protocol):
    """The place of a test's caches, and access to their content.

    Attributes:
        name: "host", "ascend", "cuda", "tcp", "ascend_tcp" or "cuda_tcp".
        transport: the transport that links its engines.
        engine: the class of engines, whose `arrays` of a cache are views on any machine.
    """

    name: str
    transport: str
    engine: type[LlmDataDist]

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a view of the program's own memory, where Placement.DEVICE puts caches."""

    def addresses(self, arrays: Iterable[NDArray[Any]]) -> list[int]:
        """Return the addresses that a program registers for results of `zeros`."""

    def held_transfers(self) -> AbstractContextManager[tuple[Transfers, LetGo]]:
        """Make transfers that wait for a call, or on an Ascend device for 100 ms."""

    def left(self) -> dict[str, int]:
        """Return the counts, by kind, of objects on the device that this process still has."""


class Host:
    """The memory of this process, without an accelerator."""

    name = "host"
    transport = "local"
    engine = LlmDataDist

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return np.zeros(shape, dtype)

    def addresses(self, arrays: Iterable[NDArray[Any]]) -> list[int]:
        return [array.ctypes.data for array in arrays]

    def held_transfers(self) -> AbstractContextManager[tuple[Transfers, LetGo]]:
        return held_transfers()

    def left(self) -> dict[str, int]:
        return {}


class Across(Host):
    """Host memory that is reached over TCP, as between hosts."""

    name = "tcp"
    transport = "tcp"
    engine = OverTcp


def on_host_only(machine: Machine, why: str) -> None:
    """Skip a test that needs a property of host memory."""
    import pytest  # peers import this module, but do not need pytest

    if machine.name.startswith(("ascend", "cuda")):
        pytest.skip(why)


def where_memory_is_mapped(machine: Machine) -> None:
    """Skip a test of mapped memory of the peer if this machine does not map it."""
    on_host_only(machine, "memory of devices is not mapped")
    if machine.transport != "local":
        import pytest

        pytest.skip(f"memory is not mapped over {machine.transport}")


def skip_if_peers_serve(machine: Machine) -> None:
    """Skip a test whose peer is stopped during a transfer if the peer must serve it."""
    import pytest

    if machine.transport == "tcp":
        pytest.skip("requests are served by the peer's process, though not by its Python")


def machine_of(name: str, cluster_id: int) -> Machine:
    """Return the machine of that name for a cluster's engine; a process may have several."""
    if name.startswith("cuda"):
        from tests.cuda.device import SimulatedCuda, SimulatedCudaOverTcp

        return (SimulatedCuda if name == "cuda" else SimulatedCudaOverTcp)(cluster_id)
    if not name.startswith("ascend"):
        return Across() if name == "tcp" else Host()
    from tests.ascend.device import SimulatedAscend, SimulatedAscendOverTcp

    return (SimulatedAscend if name == "ascend" else SimulatedAscendOverTcp)(cluster_id)
