"""A process that offers memory over several lanes. See tests/transport/owner_process.py."""

import sys
import threading

import numpy as np

from kvplan.transport.ucx.transport import UcxTransport
from tests.transport.owner_process import pattern, serve

if __name__ == "__main__":
    transport = UcxTransport(mode="gathered", devices="lo", lanes=int(sys.argv[1]))
    serve({"transport": transport, "np": np, "pattern": pattern, "threading": threading})
