"""A process that offers memory over UCX. See tests/transport/owner_process.py."""

import threading

import numpy as np

from kvplan.transport.ucx.transport import UcxTransport
from tests.transport.owner_process import pattern, serve

if __name__ == "__main__":
    transport = UcxTransport(settings='{"UCX_TLS": "shm"}', max_registrations=64)
    serve({"transport": transport, "np": np, "pattern": pattern, "threading": threading})
