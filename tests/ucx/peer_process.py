"""A worker of UCX in a process of its own, with a file's bytes for memory, and a generation table.

Argument: the file. Otherwise as tests/transport/owner_process.py.
"""

import mmap
import sys
from pathlib import Path

import numpy as np

from kvnative._host import GenerationTable
from kvnative._ucx import UcxLibrary, UcxWorker
from kvplan.transport.ucx.library import find
from tests.transport.owner_process import serve

SLOTS = 16  # as peer.py's

if __name__ == "__main__":
    with Path(sys.argv[1]).open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
    worker, board = UcxWorker(UcxLibrary.load(find().path)), GenerationTable(SLOTS)
    serve(
        {
            "worker": worker,
            "memory": memory,
            "base": memory.ctypes.data,
            "board": board,
            "shown": worker.map(board.address, SLOTS * 8),
            "tickets": worker.tickets(),
            "region": worker.map(memory.ctypes.data, memory.nbytes),
            "np": np,
        }
    )
