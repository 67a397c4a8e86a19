"""A process that offers memory over UCX, one-sidedly. See tests/transport/owner_process.py."""

import threading

import numpy as np

from kvplan.transport.ucx.transport import UcxTransport
from tests.transport.owner_process import pattern, serve

if __name__ == "__main__":
    transport = UcxTransport(mode="one_sided", max_registrations=64)
    serve({"transport": transport, "np": np, "pattern": pattern, "threading": threading})
