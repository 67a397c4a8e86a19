"""A program on HIXL, observed, with its peer in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvplan.hixl import MemDesc, TransferOpDesc
from kvplan.observe import Observer
from kvplan.observe.observer import peer_number
from kvplan.observe.surfaces import wrap_hixl
from kvplan.recording import Recording, read
from tests.hixl.peer import Peer
from tests.support.zygote import ROOT

PROGRAM = """
import sys
import numpy as np
import hixl
peer, address = sys.argv[1], int(sys.argv[2])
engine, memory = hixl.Hixl(), np.zeros(4096, np.uint8)
for _ in range(2):  # a second call of either changes nothing
    assert engine.initialize("127.0.0.1", {"AutoConnect": "1"}) == hixl.SUCCESS
    status, handle = engine.register_mem(
        hixl.MemDesc(memory.ctypes.data, memory.nbytes), hixl.MEM_HOST)
    assert status == hixl.SUCCESS
def copies(*rows):
    return [hixl.TransferOpDesc(memory.ctypes.data + here, address + there, nbytes)
            for here, there, nbytes in rows]
assert engine.transfer_sync(peer, hixl.READ, copies((0, 64, 16), (16, 0, 32)), 20_000) == 0
assert engine.transfer_sync(peer, hixl.WRITE, copies((4090, 0, 16)), 20_000) == hixl.PARAM_INVALID
def ended(request, every):
    while True:
        if every:
            states = {its.req: its.status for its in engine.get_all_transfer_status()[1]}
            state = states[request]
        else:
            state = engine.get_transfer_status(request)[1]
        if state.name != "WAITING":
            return state.name
requests = []
for every, op in ((False, hixl.WRITE), (True, hixl.READ)):
    status, request = engine.transfer_async(peer, op, copies((0, 128, 8)))
    assert status == 0 and ended(request, every) == "COMPLETED"
assert engine.transfer_async(peer, hixl.READ, copies((0, 0, 0)))[0] == hixl.PARAM_INVALID
engine.transfer_async(peer, op_descs=copies((0, 128, 8)), op=hixl.READ)  # its end is never seen
assert engine.deregister_mem(handle) == 0 == engine.deregister_mem(handle)
engine.finalize()
"""


def recorded(folder: Path, peer: Peer) -> Recording:
    """Run the program, and return the recording of its only engine."""
    command = ("-m", "kvplan.run", "--observe", f"hixl={folder}", "--", "-c", PROGRAM)
    subprocess.run(
        [sys.executable, "-W", "error", *command, peer.name, str(peer.address)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}"},
        check=True,
        timeout=120,
    )
    (recording,) = map(read, folder.glob("hixl-*.kvrec"))
    return recording


def test_transfers_of_a_program_on_hixl_are_recorded(tmp_path: Path) -> None:
    peer = Peer()
    try:
        recording = recorded(tmp_path, peer)
        pull, outside, push, again, empty = recording.transfers
        assert {its.peer for its in recording.transfers} == {peer_number(peer.name)}
        assert [(its.operation, its.nbytes, its.error) for its in (pull, push, again)] == [
            ("pull_ranges", 48, ""),
            ("push_ranges", 8, ""),
            ("pull_ranges", 8, ""),
        ]
        assert [(its.operation, its.nbytes, its.error) for its in (outside, empty)] == [
            ("push_ranges", 0, "ret: 103900"),
            ("pull_ranges", 0, "ret: 103900"),
        ]
        assert pull.plan is not None
        assert pull.plan.part.dst.tensor_nbytes == 4096
        found = {row.fields.get("finding") for row in recording.events} - {None}
        assert found == {"outside_registration", "deregistered_in_flight"}
        rows = [row.operation for row in recording.events]
        assert (rows.count("register_cache"), rows.count("observe")) == (1, 1)
    finally:
        peer.close()


class Hixl:
    """The observed methods of the original; each memory has the handle 7."""

    def initialize(self, local_engine: object = "", options: object = None) -> int:
        return 0

    finalize = deregister_mem = transfer_sync = transfer_async = initialize
    get_transfer_status = get_all_transfer_status = initialize

    def register_mem(self, mem_desc: object, mem_type: object) -> tuple[int, int]:
        return 0, 7


def observed(observer: Observer, **methods: Callable[..., Any]) -> type[Any]:
    """Return a new class, with these methods instead of its own, which are wrapped once."""
    module = ModuleType("hixl")
    module.Hixl = engine = type("Hixl", (), vars(Hixl) | methods)  # type: ignore[attr-defined]
    wrap_hixl(module, observer)
    return engine


def successor(engine: list[Any]) -> Any:
    """Drop the only engine of a list, and return one that takes its place in memory."""
    kind, first, others = type(engine[0]), id(engine[0]), []
    engine.clear()
    while id(one := kind()) != first:
        others.append(one)
        assert len(others) < 1000, "nothing takes the place of the engine that was collected"
    return one


def test_a_transfer_that_raises_is_recorded_with_its_reason(tmp_path: Path) -> None:
    def stopped(*_: object) -> int:
        raise TimeoutError("the peer is stopped")

    observer = Observer(tmp_path)
    engine = observed(observer, transfer_sync=stopped)()
    engine.initialize("127.0.0.1")
    with pytest.raises(TimeoutError, match="the peer is stopped"):
        engine.transfer_sync("p", "READ", [TransferOpDesc(4096, 0, 8)])
    observer.close()
    (path,) = tmp_path.glob("hixl-*.kvrec")
    (transfer,) = read(path).transfers
    assert transfer.failed
    assert (transfer.nbytes, transfer.error) == (0, "TimeoutError: the peer is stopped")


@pytest.mark.parametrize("is_another", [False, True])
def test_each_engine_has_one_recording_also_with_the_name_of_its_predecessor(
    tmp_path: Path, is_another: bool
) -> None:
    """A second call of the same engine has no effect."""
    observer = Observer(tmp_path)
    engine = observed(observer)()
    engine.initialize("127.0.0.1")
    if is_another:
        held = [engine]
        del engine
        engine = successor(held)
    engine.initialize("127.0.0.1")
    observer.close()
    assert len([*tmp_path.glob("hixl-*.kvrec")]) == 1 + is_another


@pytest.mark.parametrize("end", ["deregistered", "finalized", "dropped"])
def test_memory_with_the_handle_of_earlier_memory_is_recorded(tmp_path: Path, end: str) -> None:
    observer = Observer(tmp_path)
    held = [observed(observer)()]
    held[0].initialize("127.0.0.1")
    held[0].register_mem(MemDesc(4096, 64), "MEM_HOST")
    if end == "deregistered":
        held[0].deregister_mem(7)
    elif end == "finalized":
        held[0].finalize()
    else:
        held.append(successor(held))
    held[0].initialize("127.0.0.1")
    for _ in range(2):  # a second registration has the same handle
        held[0].register_mem(MemDesc(8192, 32), "MEM_HOST")
    observer.close()
    recordings = sorted(
        map(read, tmp_path.glob("hixl-*.kvrec")), key=lambda one: one.header.started
    )
    events = [row for recording in recordings for row in recording.events]
    assert [row.fields["bytes"] for row in events if row.operation == "register_cache"] == [64, 32]
