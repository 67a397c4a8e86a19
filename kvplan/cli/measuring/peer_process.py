"""The other process: `python -m kvplan.cli.measuring.peer_process SETUP`.

It has an engine with filled caches, memory that `process_vm_readv` may read, and a plain socket
that sends as many bytes as it is asked for. It says in one line of JSON where these are, and ends
when its standard input does: so it never outlives whoever started it.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from contextlib import suppress

import numpy as np

from kvplan.cli.measuring.sizes import PEER, Setup
from kvplan.engine.datadist import LlmDataDist
from kvplan.types import LlmRole

COUNT_NBYTES = 8
"""Of a request to the plain socket: how many bytes it wants."""


def main() -> None:
    """See above."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other one
    setup = Setup.from_json(sys.argv[1])
    generator = np.random.default_rng(0)
    kept = []
    with LlmDataDist(PEER, LlmRole.PROMPT) as engine, socket.socket() as listener:
        engine.initialize(setup.options("127.0.0.1:0"))
        for number, shape in enumerate(setup.shapes):
            if shape.registered:
                memory = np.empty((shape.tensors, *shape.desc.shape), np.uint8)
                addresses = [int(it.ctypes.data) for it in memory]
                engine.register_blocks_cache(shape.desc, addresses, setup.key(number))
                tensors = list(memory)
                kept.append(memory)
            else:
                cache = engine.allocate_blocks_cache(shape.desc, setup.key(number))
                tensors = engine.arrays(cache)
            for tensor in tensors:
                tensor[:] = generator.integers(0, 256, tensor.shape, np.uint8)
        plain = bytearray(b"\1") * setup.plain_nbytes  # its pages are there
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=_serve, args=(listener, plain), daemon=True).start()
        found = {
            "address": engine.listen_address,
            "plain_address": np.frombuffer(plain, np.uint8).ctypes.data if plain else 0,
            "port": listener.getsockname()[1],
        }
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


def _serve(listener: socket.socket, plain: bytearray) -> None:
    """Send what one connection asks for, until it ends."""
    with suppress(OSError):  # closed at the end, here or there
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while asked := connection.recv(COUNT_NBYTES, socket.MSG_WAITALL):
                connection.sendall(memoryview(plain)[: int.from_bytes(asked)])


if __name__ == "__main__":
    main()
