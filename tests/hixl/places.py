"""The environments of hixl's engines: this host over local or tcp, or simulated devices."""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan import hixl
from tests.support.over_tcp import KEYS
from tests.support.ports import free_port

Bytes = NDArray[np.uint8]
MIB = 1 << 20


class Place(NamedTuple):
    """An environment, "host", "tcp" or "ascend", for the engine of this number."""

    name: str
    number: int

    @property
    def options(self) -> dict[str, str]:
        if self.name == "tcp":
            return dict(KEYS)
        if self.name == "ascend":
            return {"kvplan.accelerator": "ascend", "llm.DeviceId": str(self.number)}
        return {}

    @property
    def mem_type(self) -> hixl.MemType:
        return hixl.MEM_DEVICE if self.name == "ascend" else hixl.MEM_HOST

    def zeros(self, nbytes: int = MIB) -> tuple[Bytes, int]:
        """Return memory as the test sees it, and its address for hixl."""
        if self.name == "ascend":
            from tests.ascend.device import SimulatedAscend

            machine: Any = SimulatedAscend(self.number)
            array = machine.zeros((nbytes,), np.uint8)
            (address,) = machine.addresses([array])
            return array, address
        # Pages of its own, so that freed memory is not mapped any more.
        array = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        return array, array.ctypes.data


class Memory(NamedTuple):
    """Registered memory: an array, its address, and its handle."""

    array: Bytes
    address: int
    handle: int


def registered(engine: hixl.Hixl, place: Place, nbytes: int = MIB) -> Memory:
    array, address = place.zeros(nbytes)
    status, handle = engine.register_mem(hixl.MemDesc(address, nbytes), place.mem_type)
    assert status == hixl.SUCCESS
    return Memory(array, address, handle)


def free_name(host: str = "127.0.0.1") -> str:
    """Return a name at which no engine listens."""
    port = free_port(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def pattern(nbytes: int = MIB, seed: int = 1) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
