"""The memory of the demo's KV caches: of the host, or of an Ascend device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan import Cache, LlmDataDist

from .paged_cache import BlockTable, PagedCache
from .requirements import SetupError

DEVICES = ("host", "ascend", "simulated")
SIMULATED = "The devices are SIMULATED: no NPU takes part, and no time says anything about one"


def prepare(device: str) -> None:
    """Let this process, and those that it starts, find the device.

    Raises:
        SetupError: the simulator is not there, or cannot be built.
    """
    if device != "simulated":
        return
    try:
        from tests.ascend_sim.build import build
    except ImportError:
        raise SetupError(
            "the simulated device is built from tests/ascend_sim: run from a checkout of kvplan"
        ) from None
    try:
        os.environ["ASCEND_HOME_PATH"] = str(build())
    except (OSError, RuntimeError) as error:
        raise SetupError(f"the simulated device cannot be built: {error}") from error
    os.environ.pop("KVPLAN_ASCEND_LIBRARY", None)


def options(device: str, number: int) -> dict[str, str]:
    """Return the options of an engine for its device, the `number`-th of this demo."""
    if device == "host":
        return {"kvplan.accelerator": "none"}
    return {"kvplan.accelerator": "ascend", "llm.DeviceId": str(number)}


def described(device: str, datadist: LlmDataDist) -> str:
    """Say where the caches of an engine lie."""
    if datadist.device is None:
        return "KV cache in host memory"
    text = f"KV cache in memory of device {datadist.device.id}, {datadist.device.name}"
    if device == "simulated":
        text += ": SIMULATED"
    return text


def tensors_of(datadist: LlmDataDist, cache: Cache) -> PagedCache:
    """Return the cache for the model to compute with, wherever it lies."""
    if datadist.device is None:
        return PagedCache(datadist.arrays(cache))
    return DeviceCache(datadist.device, cache)


def store(datadist: LlmDataDist, cache: Cache, number: int, tensor: NDArray[np.float16]) -> None:
    """Write one tensor of a cache as a whole, wherever it lies."""
    if datadist.device is None:
        datadist.arrays(cache)[number][...] = tensor
    else:
        datadist.device.write(cache.tensor_addrs[number], tensor.data)


@dataclass(frozen=True)
class Run:
    """Rows (tokens) of a request that lie side by side: which, and from which row of a tensor."""

    first: int
    last: int
    row: int


def runs(block_table: BlockTable, block_size: int, start: int, end: int) -> Iterator[Run]:
    """Yield where the tokens `start` to `end` of a request lie, neighbours together."""
    positions = np.arange(start, end)
    rows = block_table[positions // block_size] * block_size + positions % block_size
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    for first, last in zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True):
        yield Run(first, last, int(rows[first]))


class DeviceCache(PagedCache):
    """A paged cache in the memory of a device.

    NumPy computes on the host, so what the model reads and writes is copied, each time: an NPU's
    kernels would work on the cache where it is.
    """

    def __init__(self, device: Any, cache: Cache) -> None:
        self._device = device
        self._addresses = cache.tensor_addrs
        desc = cache.cache_desc
        self._shape = tuple(desc.shape)
        self.block_size = desc.shape[1]
        self._row_nbytes = desc.stride // self.block_size

    def fill(self, value: float) -> None:
        """Write `value` everywhere."""
        tensor = np.full(self._shape, value, np.float16)
        for address in self._addresses:
            self._device.write(address, tensor)

    def snapshot(self) -> list[NDArray[Any]]:
        """Return every tensor as it is now, on the host."""
        tensors = [np.empty(self._shape, np.float16) for _ in self._addresses]
        for address, tensor in zip(self._addresses, tensors, strict=True):
            self._device.read(address, tensor)
        return tensors

    def write(
        self, tensor: int, block_table: BlockTable, start: int, rows: NDArray[np.float32]
    ) -> None:
        """Store `rows` (tokens, kv_heads, head_size) at the request's positions from `start` on."""
        stored = np.ascontiguousarray(rows, np.float16)
        for run in runs(block_table, self.block_size, start, start + len(rows)):
            address = self._addresses[tensor] + run.row * self._row_nbytes
            self._device.write(address, stored[run.first : run.last])

    def gather(self, tensor: int, block_table: BlockTable, length: int) -> NDArray[np.float32]:
        """Return the request's first `length` tokens, in order: (length, kv_heads, head_size)."""
        rows = np.empty((length, *self._shape[2:]), np.float16)
        for run in runs(block_table, self.block_size, 0, length):
            address = self._addresses[tensor] + run.row * self._row_nbytes
            self._device.read(address, rows[run.first : run.last])
        return rows.astype(np.float32)
