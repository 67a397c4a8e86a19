"""A service in a process of its own, with a file's bytes for memory.

Argument: the file. Otherwise as tests/transport/owner_process.py.
"""

import mmap
import sys
from pathlib import Path

import numpy as np

from kvnative._tcp import TcpService
from tests.tcp.peer import dial
from tests.transport.owner_process import serve

if __name__ == "__main__":
    with Path(sys.argv[1]).open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
    service = TcpService(threads=1, max_ranges=256, name="peer")
    names = {"memory": memory, "base": memory.ctypes.data, "links": [], "dial": dial, "np": np}
    serve({"service": service, **names})
