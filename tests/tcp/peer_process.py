"""The names of a `TcpPeer`: a service, with the bytes of a file as memory."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from kvnative._tcp import TcpService
from tests.tcp.peer import dial


def names(path: str) -> dict[str, Any]:
    with Path(path).open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
    service = TcpService(threads=1, max_ranges=256, name="peer")
    known = {"memory": memory, "base": memory.ctypes.data, "links": [], "dial": dial, "np": np}
    return {"service": service, **known}
