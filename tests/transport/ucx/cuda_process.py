"""A process that offers memory of a GPU over UCX. See tests/transport/owner_process.py."""

import threading

import numpy as np

from kvplan.transport.protocol import DeviceRange
from kvplan.transport.ucx.transport import UcxTransport
from tests.support.cuda import CudaMemory
from tests.transport.owner_process import pattern, serve

if __name__ == "__main__":
    names = {"np": np, "pattern": pattern, "threading": threading}
    names |= {"CudaMemory": CudaMemory, "DeviceRange": DeviceRange}
    serve({"transport": UcxTransport(settings='{"UCX_TLS": "cuda,shm"}'), **names})
