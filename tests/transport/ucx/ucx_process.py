"""The names that the process of a `UcxOwner` has: a transport over UCX."""

import threading
from typing import Any

import numpy as np

from kvplan.transport.ucx.transport import UcxTransport
from tests.transport.owner_process import pattern


def names() -> dict[str, Any]:
    transport = UcxTransport(settings='{"UCX_TLS": "shm"}', max_registrations=64)
    return {"transport": transport, "np": np, "pattern": pattern, "threading": threading}
