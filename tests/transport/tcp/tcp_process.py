"""The names that the process of a `TcpPeer` has: a transport over TCP."""

import threading
from typing import Any

import numpy as np

from kvplan.transport.tcp.transport import TcpTransport
from tests.transport.owner_process import pattern
from tests.transport.tcp.streams import Accepted, Dialled


def names(connections: str) -> dict[str, Any]:
    transport = TcpTransport(connections=int(connections))
    known = {"Accepted": Accepted, "Dialled": Dialled, "np": np, "pattern": pattern}
    return {"transport": transport, "threading": threading, **known}
