"""Engines on a simulated device, whose memory tests see through the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan import Cache, LlmDataDist, Options
from kvplan.engine.arrays import tensor_arrays
from tests.ascend.simulator import controls

NUM_DEVICES = 8


class OnDevice(LlmDataDist):
    """Engines on a device each, numbered like their clusters."""

    def initialize(self, options: Options | Mapping[str, str] | None = None) -> None:
        given = Options.of(options)
        device_id = self.cluster_id % NUM_DEVICES
        super().initialize(replace(given, accelerator="ascend", device_id=device_id))

    def arrays(self, cache: Cache) -> list[NDArray[Any]]:
        """Return a view of each tensor, as what computes on the device has one."""
        entry = self._running().registry.resolve(cache)
        if not entry.memory.on_device:
            return super().arrays(cache)
        return tensor_arrays(entry.cache.cache_desc, Seen(entry.memory))


class Seen:
    """Device memory, where this process can see it; keeps it like an array."""

    writable = True

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        views = [controls().host_view(it) for it in memory.addresses.tolist()]
        self.addresses = np.array(views, np.uint64)
