"""The names that the process of a `CudaOwner` has: a transport over UCX, for GPU memory."""

import threading
from typing import Any

import numpy as np

from kvplan.transport.protocol import DeviceRange
from kvplan.transport.ucx.transport import UcxTransport
from tests.support.cuda import CudaMemory
from tests.transport.owner_process import pattern


def names() -> dict[str, Any]:
    known = {"np": np, "pattern": pattern, "threading": threading}
    known |= {"CudaMemory": CudaMemory, "DeviceRange": DeviceRange}
    return {"transport": UcxTransport(settings='{"UCX_TLS": "cuda,shm"}'), **known}
