"""Memory is forgotten once no transfer uses it, and not before."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from kvplan.mooncake.engine import TransferEngine
from tests.support.interrupts import Interrupts

ROOT = Path(__file__).parents[2]
SIZE = 4096
THREADS = 8


def engine() -> TransferEngine:
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made


def first_buffer(here: TransferEngine) -> int:
    return here.get_first_buffer_address(f"127.0.0.1:{here.get_rpc_port()}")


def interrupted() -> int:
    """Interrupt at each place in turn, and unregister again; return how many places there are."""
    here, memory = engine(), np.zeros(SIZE, np.uint8)
    address = memory.ctypes.data
    interrupts = Interrupts("/kvplan/")
    goes_on = True
    while goes_on:
        assert here.register_memory(address, SIZE) == 0, interrupts.place
        goes_on = interrupts.call(lambda: here.unregister_memory(address))
        is_known = first_buffer(here) == address
        assert is_known or not here.datadist.caches(), interrupts.place
        assert here.unregister_memory(address) == (0 if is_known else -1), interrupts.place
        assert here.datadist.caches() == [], interrupts.place
    here.close()
    return interrupts.place


def test_a_call_that_was_interrupted_can_be_repeated() -> None:
    code = "from tests.mooncake.test_unregistering import interrupted; print(interrupted())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def test_of_several_threads_one_forgets_the_memory() -> None:
    here, memory = engine(), np.zeros(SIZE, np.uint8)
    found: list[int] = []
    for _ in range(20):
        assert here.register_memory(memory.ctypes.data, SIZE) == 0
        together = threading.Barrier(THREADS)

        def unregister(together: threading.Barrier = together) -> None:
            together.wait()
            found.append(here.unregister_memory(memory.ctypes.data))

        threads = [threading.Thread(target=unregister) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert first_buffer(here) == 0
        assert here.datadist.caches() == []
    assert found.count(0) >= 20
    here.close()
