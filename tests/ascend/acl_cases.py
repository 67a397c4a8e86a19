"""Copies of scattered bytes between a device and the host, or within a device."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvnative._device import Device
from kvnative._lower import Descriptors
from kvnative._pinned import pin
from tests.ascend.simulator import VARIANT, Controls
from tests.native.scatter import UNTOUCHED, Scattered, scatter

HAS_BATCH = VARIANT in ("8.5", "hccl-only", "batch-v2")
_SUFFIX = "V2" if VARIANT == "batch-v2" else ""
BATCH, BATCH_ASYNC = f"aclrtMemcpyBatch{_SUFFIX}", f"aclrtMemcpyBatchAsync{_SUFFIX}"
DIRECTIONS = ("host_to_device", "device_to_host", "device_to_device")
FOREVER = 60_000  # milliseconds, longer than any of these transfers takes


@dataclass
class Side:
    """Memory of one side, at the address of descriptors and in the view of the test."""

    address: int
    seen: NDArray[np.uint8]
    owners: tuple[Any, ...]


def on_device(device: Device, simulator: Controls, contents: NDArray[np.uint8]) -> Side:
    buffer = device.allocate(contents.nbytes)
    view = (ctypes.c_uint8 * contents.nbytes).from_address(simulator.host_view(buffer.address))
    seen = np.frombuffer(view, np.uint8)
    seen[:] = contents
    return Side(buffer.address, seen, (buffer,))


def on_host(device: Device, contents: NDArray[np.uint8], pinned: bool) -> Side:
    """Return memory of whole pages, which stays pinned as long as the side if `pinned`."""
    pages = mmap.mmap(-1, contents.nbytes)
    seen = np.frombuffer(pages, np.uint8)
    seen[:] = contents
    owners = (pin(device, seen.ctypes.data, contents.nbytes, keep=seen),) if pinned else ()
    return Side(seen.ctypes.data, seen, owners)


@dataclass
class Case(Scattered):
    """A case of `scatter` and its two sides, which it keeps alive."""

    sides: tuple[Side, Side]


def between(
    device: Device,
    simulator: Controls,
    direction: str,
    sizes: list[int],
    *,
    pinned: bool = True,
    seed: int = 0,
) -> Case:
    """Return descriptors of these sizes in a direction, from random to untouched bytes."""
    plan = scatter(sizes, seed)

    def side(kind: str, contents: NDArray[np.uint8]) -> Side:
        if kind == "device":
            return on_device(device, simulator, contents)
        return on_host(device, contents, pinned)

    source_kind, target_kind = direction.split("_to_")
    source, target = side(source_kind, plan.source), side(target_kind, plan.target)
    descriptors = Descriptors.from_columns(
        plan.dst_offsets + np.uint64(target.address),
        plan.src_offsets + np.uint64(source.address),
        plan.nbytes,
    )
    return Case(
        source.seen,
        target.seen,
        plan.src_offsets,
        plan.dst_offsets,
        plan.nbytes,
        descriptors,
        (source, target),
    )


def mixed_sizes(count: int, most: int, seed: int = 0) -> list[int]:
    """Return random sizes from 1 to `most`."""
    return [int(integer) for integer in np.random.default_rng(seed).integers(1, most + 1, count)]


__all__ = [
    "BATCH",
    "BATCH_ASYNC",
    "DIRECTIONS",
    "FOREVER",
    "HAS_BATCH",
    "UNTOUCHED",
    "VARIANT",
    "Case",
    "between",
    "mixed_sizes",
    "on_device",
    "on_host",
]
