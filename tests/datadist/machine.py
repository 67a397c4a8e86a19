"""What the tests of transfers run on: this host, or a device of it; see tests/ascend/device.py."""

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
    """Where the caches of a test lie, and how it sees what is in them.

    Attributes:
        name: "host", "ascend", "cuda", "tcp", "ascend_tcp" or "cuda_tcp".
        transport: what links engines on it.
        engine: the class to make engines of; `arrays` of a cache are views, wherever it lies.
    """

    name: str
    transport: str
    engine: type[LlmDataDist]

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return memory of a program's own, as a cache with Placement.DEVICE has it: a view."""

    def addresses(self, arrays: Iterable[NDArray[Any]]) -> list[int]:
        """Return what a program registers for what `zeros` gave: `data_ptr()` of each."""

    def held_transfers(self) -> AbstractContextManager[tuple[Transfers, LetGo]]:
        """Let transfers wait for a call; those of an Ascend device wait for 100 ms instead."""

    def left(self) -> dict[str, int]:
        """Return what this process still has of the device, by kind; nothing may be left."""


class Host:
    """The memory of this process: what there is without an accelerator."""

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
    """Host memory that is reached over TCP, as it is on another host."""

    name = "tcp"
    transport = "tcp"
    engine = OverTcp


def on_host_only(machine: Machine, why: str) -> None:
    """Skip a test that asks for something that device memory has not."""
    import pytest  # a peer, which imports this module, has no use for it

    if machine.name.startswith(("ascend", "cuda")):
        pytest.skip(why)


def where_memory_is_mapped(machine: Machine) -> None:
    """Skip a test of memory that this process maps of its peer."""
    on_host_only(machine, "memory of devices is not mapped")
    if machine.transport != "local":
        import pytest

        pytest.skip(f"memory is not mapped over {machine.transport}")


def where_nobody_serves(machine: Machine) -> None:
    """Skip a test whose peer is stopped while its memory is reached."""
    import pytest

    if machine.transport == "tcp":
        pytest.skip("requests are served by the peer's process, though not by its Python")


def machine_of(name: str, cluster_id: int) -> Machine:
    """The one of that name, for what belongs to a cluster's engine; a process may have several."""
    if name.startswith("cuda"):
        from tests.cuda.device import SimulatedCuda, SimulatedCudaOverTcp

        return (SimulatedCuda if name == "cuda" else SimulatedCudaOverTcp)(cluster_id)
    if not name.startswith("ascend"):
        return Across() if name == "tcp" else Host()
    from tests.ascend.device import SimulatedAscend, SimulatedAscendOverTcp

    return (SimulatedAscend if name == "ascend" else SimulatedAscendOverTcp)(cluster_id)
