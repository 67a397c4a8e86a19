"""An end of UCX in a process of its own, with a file's bytes for memory.

Arguments: the file, the mode. Otherwise as tests/transport/owner_process.py.
"""

import mmap
import sys
from pathlib import Path

import numpy as np

from kvnative._ucx import UcxEnd, UcxLibrary
from kvplan.transport.ucx.library import find
from tests.transport.owner_process import serve

if __name__ == "__main__":
    with Path(sys.argv[1]).open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
    end = UcxEnd(UcxLibrary.load(find().path), mode=sys.argv[2], settings={"UCX_NET_DEVICES": "lo"})
    serve({"end": end, "memory": memory, "base": memory.ctypes.data, "links": [], "np": np})
