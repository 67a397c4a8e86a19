"""Registrations last as long as their handles are known, also if calls are interrupted."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import hixl
from tests.faults.gate import Gate
from tests.hixl.peer import Peer
from tests.hixl.places import Place, registered
from tests.hixl.test_faults import LONG_MS, blocks, in_thread
from tests.support import forked
from tests.support.interrupts import Interrupts


def interrupted_registering() -> int:
    """Interrupt `register_mem` at each place; the next call returns the registered handles."""
    engine, memory = hixl.Hixl(), np.zeros(4096, np.uint8)
    desc = hixl.MemDesc(memory.ctypes.data, 4096)
    assert engine.initialize("127.0.0.1") == hixl.SUCCESS
    interrupts = Interrupts("/kvplan/")
    while interrupts.call(lambda: engine.register_mem(desc, hixl.MEM_HOST)):
        _, handle = engine.register_mem(desc, hixl.MEM_HOST)
        assert engine.deregister_mem(handle) == hixl.SUCCESS
        assert engine.datadist.caches() == [], interrupts.place
    engine.finalize()
    return interrupts.place


def interrupted_deregistering() -> int:
    """Interrupt `deregister_mem` at each place; after the next call no registration is left."""
    engine, memory = hixl.Hixl(), np.zeros(4096, np.uint8)
    desc = hixl.MemDesc(memory.ctypes.data, 4096)
    assert engine.initialize("127.0.0.1") == hixl.SUCCESS
    interrupts = Interrupts("/kvplan/")
    goes_on = True
    while goes_on:
        _, handle = engine.register_mem(desc, hixl.MEM_HOST)
        goes_on = interrupts.call(lambda handle=handle: engine.deregister_mem(handle))
        assert engine.deregister_mem(handle) == hixl.SUCCESS
        assert engine.datadist.caches() == [], interrupts.place
    engine.finalize()
    return interrupts.place


@pytest.mark.parametrize("function", ["interrupted_registering", "interrupted_deregistering"])
def test_a_call_that_was_interrupted_can_be_repeated(function: str) -> None:
    code = f"from tests.hixl.test_registering import {function}; print({function}())"
    done = forked.python(code, imported=("tests.hixl.test_registering",))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def test_each_of_two_threads_that_deregister_memory_waits_for_its_transfers(
    gated: hixl.Hixl, place: Place, peer: Peer, gate: Gate
) -> None:
    memory = registered(gated, place)
    assert gated.connect(peer.name, LONG_MS) == hixl.SUCCESS
    moved = blocks(memory, peer)
    call, _ = in_thread(lambda: gated.transfer_sync(peer.name, hixl.READ, moved, LONG_MS))
    gate.wait()
    first, _ = in_thread(lambda: gated.deregister_mem(memory.handle))
    while gated.datadist.caches():
        pass
    second, found = in_thread(lambda: gated.deregister_mem(memory.handle))
    for _ in range(20):  # memory can be registered meanwhile
        other = registered(gated, place)
        assert gated.deregister_mem(other.handle) == hixl.SUCCESS
    is_early = found != []
    gate.open()
    for thread in (first, second, call):
        thread.join()
    assert (is_early, found) == (False, [hixl.SUCCESS])
