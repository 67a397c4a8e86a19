"""The names of a `UcxPeer`: a worker, the bytes of a file as memory, and a generation table."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from kvnative._host import GenerationTable
from kvnative._ucx import UcxLibrary, UcxWorker
from kvplan.transport.ucx.library import find

SLOTS = 16  # as in peer.py


def names(path: str) -> dict[str, Any]:
    with Path(path).open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
    worker, board = UcxWorker(UcxLibrary.load(find().path)), GenerationTable(SLOTS)
    return {
        "worker": worker,
        "memory": memory,
        "base": memory.ctypes.data,
        "board": board,
        "shown": worker.map(board.address, SLOTS * 8),
        "tickets": worker.tickets(),
        "region": worker.map(memory.ctypes.data, memory.nbytes),
        "np": np,
    }
