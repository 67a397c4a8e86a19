"""A process whose memory UCX reaches: an array, and parts of an arena."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvplan.execution.memory import HostMemory
from tests.transport.owner import Owner

TIMEOUT_MS = 20_000
NBYTES = 1 << 20
SHARED_MEMORY = '{"UCX_TLS": "shm"}'
Bytes = NDArray[np.uint8]


class UcxOwner(Owner):
    """A process with a registered array, and an arena with two registered parts."""

    module = "tests.transport.ucx.ucx_process"

    def __init__(self) -> None:
        super().__init__()
        self.run(
            f"""
            array = pattern(1, {NBYTES})
            arena = transport.allocate({NBYTES})
            within = np.frombuffer(arena, dtype=np.uint8)
            within[:] = pattern(2, {NBYTES})
            held = [transport.register(part) for part in (array, within[:65536], within[131072:])]
            """
        )


def host_memory(array: Bytes) -> HostMemory:
    one = np.array([array.ctypes.data], dtype=np.uint64)
    return HostMemory(one, np.array([array.nbytes], np.uint64), writable=True, owner=array)
