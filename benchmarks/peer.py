"""The other process: it holds a filled pool until its standard input ends."""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.copying import TENSOR_NBYTES, TENSORS, Pool
from kvplan.transport.local import LocalTransport


def serve(kind: str) -> None:
    """Hold an "arena", or "registered" ordinary memory; print its address and how to connect."""
    with LocalTransport() as transport:
        if kind == "arena":
            arena = transport.allocate(TENSORS * TENSOR_NBYTES)
            pool = Pool(np.frombuffer(arena, dtype=np.uint64)).fill()
        else:
            pool = Pool.mapped().fill()
        transport.register(pool.words)
        print(pool.words.ctypes.data, transport.metadata().hex(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    serve(sys.argv[1])
