"""Memory is known as long as it is registered, even if calls are interrupted or refused."""

from __future__ import annotations

import logging
import logging.handlers
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

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
    """Interrupt at each place, unregister again, and return the number of places."""
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


def interrupted_registering() -> int:
    """Interrupt `register_memory` at each place: memory held by the engine can be unregistered."""
    here, memory = engine(), np.zeros(SIZE, np.uint8)
    address = memory.ctypes.data
    interrupts = Interrupts("/kvplan/")
    while interrupts.call(lambda: here.register_memory(address, SIZE)):
        is_held = here.datadist.caches() != []
        assert here.unregister_memory(address) == (0 if is_held else -1), interrupts.place
        assert here.datadist.caches() == [], interrupts.place
    here.close()
    return interrupts.place


def interrupted_batch() -> int:
    """Interrupt `batch_register_memory` at each place: it registers all or nothing."""
    here, memory = engine(), np.zeros(3 * SIZE, np.uint8)
    addresses = [memory.ctypes.data + i * SIZE for i in range(3)]
    interrupts, found = Interrupts("/kvplan/"), []

    def register() -> None:
        found.append(here.batch_register_memory(addresses, [SIZE] * 3))

    while interrupts.call(register):
        held = len(here.datadist.caches())
        assert held in (0, 3), interrupts.place
        assert here.batch_unregister_memory(addresses) == (0 if held else -1), interrupts.place
        assert here.datadist.caches() == [], interrupts.place
    here.close()
    return interrupts.place


def interrupted_managed() -> int:
    """Interrupt `allocate_managed_buffer` at each place: no freed memory stays registered."""
    here = engine()
    interrupts = Interrupts("/kvplan/")
    while interrupts.call(lambda: here.allocate_managed_buffer(SIZE)):
        for listed in here.datadist.caches():
            address = first_buffer(here)
            assert here.read_bytes_from_buffer(address, SIZE) == bytes(SIZE), listed
            assert here.free_managed_buffer(address, SIZE) == 0, interrupts.place
        assert here.datadist.caches() == [], interrupts.place
    here.close()
    return interrupts.place


def interrupted_freeing() -> int:
    """Interrupt `free_managed_buffer` at each place: the next call frees the rest."""
    here = engine()
    records = logging.handlers.BufferingHandler(10_000)
    logging.getLogger("kvplan.mooncake").addHandler(records)
    interrupts = Interrupts("/kvplan/")
    goes_on = True
    while goes_on:
        address = here.allocate_managed_buffer(SIZE)
        goes_on = interrupts.call(lambda address=address: here.free_managed_buffer(address, SIZE))
        is_freed = here.free_managed_buffer(address, SIZE) == -1
        why = records.buffer[-1].getMessage() if is_freed else ""
        assert not why or "must come from allocate_managed_buffer" in why, (interrupts.place, why)
        assert here.datadist.caches() == [], interrupts.place
    here.close()
    return interrupts.place


def withdrawn_meanwhile() -> int:
    """Unregister the first piece of a batch at each place; the last piece is refused.

    The second piece is withdrawn, although the first one cannot be any more, and the log has a
    line.
    """
    here, memory = engine(), np.zeros(2 * SIZE, np.uint8)
    first, second = memory.ctypes.data, memory.ctypes.data + SIZE
    records = logging.handlers.BufferingHandler(100)
    logging.getLogger("kvplan.mooncake").addHandler(records)
    interrupts = Interrupts("/kvplan/mooncake/")
    taken, notified = [], 0
    signal.signal(signal.SIGINT, lambda *_: taken.append(here.unregister_memory(first) == 0))

    def register() -> None:
        assert here.batch_register_memory([first, second, second], [SIZE, SIZE, 1]) == -1

    while interrupts.call(register):
        assert here.datadist.caches() == [], interrupts.place
        assert first_buffer(here) == 0, interrupts.place
        lines = [record.getMessage() for record in records.buffer]
        assert lines.pop().startswith("batch_register_memory"), lines
        why = f"unregister_memory {first:#x}: no registered memory begins"
        notified += taken[-1] and any(line.startswith(why) for line in lines)
        records.flush()
    here.close()
    return notified


@pytest.mark.parametrize(
    ("function", "min_places"),
    [
        ("interrupted", 30),
        ("interrupted_registering", 30),
        ("interrupted_batch", 90),
        ("interrupted_managed", 30),
        ("interrupted_freeing", 30),
        ("withdrawn_meanwhile", 0),
    ],
)
def test_an_interrupted_call_leaves_no_unknown_registration(function: str, min_places: int) -> None:
    code = f"from tests.mooncake.test_unregistering import {function}; print({function}())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > min_places


def test_only_one_of_several_threads_unregisters_the_memory() -> None:
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


def test_memory_is_found_while_other_memory_is_unregistered() -> None:
    here, memory = engine(), np.arange(3 * SIZE, dtype=np.uint16)
    first, second, third = (memory.ctypes.data + SIZE * i for i in range(3))
    for address in (first, second, third):
        assert here.register_memory(address, SIZE) == 0

    class Searched(int):
        """An address whose search another thread interrupts."""

        def __lt__(self, other: int) -> bool:
            here.unregister_memory(first)
            return int(self) < other

    here._check_host(Searched(second), 2)  # the public calls make a plain int of the address
    assert here.register_memory(first, SIZE) == 0
    here._check_host(Searched(third), 2)
    assert here.register_memory(first, SIZE) == 0
    assert here.read_bytes_from_buffer(third, 2) == memory[SIZE].tobytes()
    here.close()
