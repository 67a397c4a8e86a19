"""A process that offers memory over TCP. See tests/transport/owner_process.py."""

import sys
import threading

import numpy as np

from kvplan.transport.tcp.transport import TcpTransport
from tests.transport.owner_process import pattern, serve
from tests.transport.tcp.streams import Accepted, Dialled

if __name__ == "__main__":
    names = {"Accepted": Accepted, "Dialled": Dialled, "np": np, "pattern": pattern}
    transport = TcpTransport(connections=int(sys.argv[1]))
    serve({"transport": transport, "threading": threading, **names})
