"""Transfers between two processes: right bytes, none after a release, and errors with a reason.

Most tests come from reports of users of NIXL (transfer-apis.md of the issue), and check that the
reported fault does not occur.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.nixl import _bindings as bindings
from kvplan.nixl import nixl_agent
from kvplan.nixl.metadata import Regions
from kvplan.recording import read
from tests.nixl.conftest import Here, MakeHere, pattern
from tests.nixl.peer import MIB
from tests.support.refusals import refused

KIB = 1 << 10


@pytest.mark.parametrize("nbytes", [1, 4 * MIB + 1, 8 * MIB, 12 * MIB + 4 * KIB])
def test_bytes_of_any_size_arrive(make: MakeHere, nbytes: int) -> None:
    here = make(12 * MIB + 8 * KIB)
    assert here.move((1, 3, nbytes)) == "DONE"
    assert np.array_equal(here.memory[1 : 1 + nbytes], pattern(3, nbytes))
    assert here.memory[0] == 0xAB
    assert here.memory[1 + nbytes] == 0xAB


def test_a_write_arrives_before_its_notification(make: MakeHere) -> None:
    here = make()
    here.memory[:64] = 7
    assert here.move((0, 128, 64), op="WRITE", note=b"written") == "DONE"
    found, sums = here.peer.run(
        """
        found = {}
        while not found:
            found = agent.get_new_notifs()
        result = found, (int(memory[128:192].min()), int(memory[128:192].max()), int(memory[192]))
        """
    )
    assert found == {"here": [b"written"]}
    assert sums == (7, 7, 192)


def test_a_handle_that_is_released_at_once_writes_nothing_more(make: MakeHere) -> None:
    """NIXL #2044: bytes landed for seconds after the release."""
    here = make(64 * MIB)
    handle = here.request((0, 0, 64 * MIB))
    here.agent.transfer(handle)
    here.agent.release_xfer_handle(handle)
    here.memory[:] = 0xAB
    # Earlier requests on this link are over when this one has arrived.
    assert here.move((0, 0, KIB)) == "DONE"
    assert (here.memory[KIB:] == 0xAB).all()


@pytest.mark.parametrize("fault", ["release", "remove", "deregister"])
def test_an_owner_that_was_stopped_writes_nothing_when_it_goes_on(
    make: MakeHere, fault: str, way: str
) -> None:
    if way == "local":
        pytest.skip("over local the owner takes no part")
    here = make(16 * MIB)
    handle = here.request((0, 0, 16 * MIB))
    here.peer.stop()
    try:
        assert here.agent.transfer(handle) == "PROC"
        if fault == "release":
            here.agent.release_xfer_handle(handle)
        elif fault == "remove":
            here.agent.remove_remote_agent("there")
        else:
            here.agent.deregister_memory(here.registered)
        here.memory[:] = 0xCD  # the blocks have another request's content
    finally:
        here.peer.resume()
    other = make(KIB, name="other", peer=here.peer)
    assert other.move((0, 0, KIB)) == "DONE"  # the owner has answered since
    assert (here.memory == 0xCD).all()


def test_one_of_eight_ranges_that_is_not_mapped_any_more_is_named(
    make: MakeHere, caplog: pytest.LogCaptureFixture
) -> None:
    here = make(8 * 64 * KIB)
    here.peer.run(
        """
        import ctypes
        libc, at = ctypes.CDLL(None), ctypes.c_void_p(memory.ctypes.data + 5 * 65536)
        libc.mmap.restype = ctypes.c_void_p  # without access: another mapping could fill a hole
        assert libc.mmap(at, ctypes.c_size_t(65536), 0, 0x32, -1, ctypes.c_long(0)) == at.value
        """
    )
    # Apart from each other, so that they are eight descriptors.
    handle = here.request(*((64 * KIB * i, 64 * KIB * i, 32 * KIB) for i in range(8)))
    with caplog.at_level(logging.WARNING, "kvplan.nixl"):
        state = here.agent.transfer(handle)
        assert here.end(handle, state) == "ERR"
    start = here.peer.address + 5 * 65536
    assert f"{start:#x}" in caplog.text
    assert "descriptor 5" in caplog.text
    assert "NIXL_READ of 8 descriptors of there" in caplog.text
    assert here.agent.check_xfer_state(handle) == "ERR"
    assert here.move((0, 0, 32 * KIB)) == "DONE"  # the others can be read


def test_a_read_of_withdrawn_memory_fails(make: MakeHere, caplog: pytest.LogCaptureFixture) -> None:
    here = make()
    handle = here.request((0, 0, KIB))
    here.peer.run("agent.deregister_memory(registered)")
    with caplog.at_level(logging.WARNING, "kvplan.nixl"):
        assert here.end(handle, here.agent.transfer(handle)) == "ERR"
    assert "NIXL_READ of 1 descriptor" in caplog.text
    assert f"{here.peer.address:#x}" in caplog.text
    assert (here.memory == 0xAB).all()


def test_eight_readers_of_an_owner_that_is_killed(make: MakeHere) -> None:
    first = make(4 * MIB, name="reader 0")
    readers = [first, *(make(4 * MIB, f"reader {i}", first.peer) for i in range(1, 8))]
    outcomes: list[str] = []
    begun = threading.Barrier(9)

    def read(here: Here) -> None:
        handle = here.request((0, 0, 4 * MIB))
        begun.wait()
        try:
            while here.end(handle, here.agent.transfer(handle)) == "DONE":
                pass
        except bindings.nixlRemoteDisconnectError:
            outcomes.append("gone")
        here.agent.deregister_memory(here.registered)
        here.memory[:] = 0xEE

    threads = [threading.Thread(target=read, args=(here,)) for here in readers]
    for thread in threads:
        thread.start()
    begun.wait()
    first.peer.kill()
    for thread in threads:
        thread.join()
    assert outcomes == ["gone"] * 8
    assert all((here.memory == 0xEE).all() for here in readers)


def test_an_agent_that_was_started_again_replaces_itself(make: MakeHere) -> None:
    here = make()
    assert here.move((0, 0, KIB)) == "DONE"
    here.peer.kill()
    again = make(name="another").peer
    assert here.agent.add_remote_agent(again.metadata) == b"there"
    here.peer = again
    here.memory[:KIB] = 0
    assert here.move((0, 0, KIB)) == "DONE"
    assert np.array_equal(here.memory[:KIB], pattern(0, KIB))


@pytest.mark.parametrize("made", ["lists", "transfer", "posted transfer"])
def test_what_was_prepared_for_a_process_does_not_move_with_its_successor(made: str) -> None:
    """The addresses are registered there, too, but hold other content."""
    theirs, ours = np.full(KIB, 1, np.uint8), np.zeros(KIB, np.uint8)
    here, there = nixl_agent("here"), nixl_agent("there")
    for agent, memory in ((here, ours), (there, theirs)):
        agent.register_memory([(memory.ctypes.data, KIB, 0, "")], "DRAM")
    here.add_remote_agent(there.get_agent_metadata())

    def lists() -> list[Any]:
        return [
            here.prep_xfer_dlist(name, [(memory.ctypes.data, KIB, 0)], "DRAM")
            for name, memory in (("", ours), ("there", theirs))
        ]

    def transfer(mine: Any, remote: Any) -> Any:
        return here.make_prepped_xfer("READ", mine, [0], remote, [0], b"read")

    def end(handle: Any) -> str:
        state = here.transfer(handle)
        while state == "PROC":
            state = here.check_xfer_state(handle)
        return state

    prepared = lists()
    handle = None if made == "lists" else transfer(*prepared)
    if made == "posted transfer":
        assert end(handle) == "DONE"
    there.agent.close()
    ours[:] = 0
    theirs[:] = 2
    successor = nixl_agent("there")
    successor.register_memory([(theirs.ctypes.data, KIB, 0, "")], "DRAM")
    here.add_remote_agent(successor.get_agent_metadata())
    for _ in range(2):
        with pytest.raises(bindings.nixlRemoteDisconnectError, match="'there' is another process"):
            here.transfer(handle or transfer(*prepared))
    assert not ours.any()
    assert successor.get_new_notifs() == {}
    assert (end(transfer(*lists())), set(ours.tolist())) == ("DONE", {2})
    for agent in (here, successor):
        agent.agent.close()


def test_registrations_come_and_go_without_a_rest(make: MakeHere) -> None:
    here = make()
    for _ in range(3):
        views = [here.row(64 * i, 128) for i in range(200)]
        held = here.agent.register_memory(views, "DRAM")
        assert held.descCount() == 200
        here.agent.deregister_memory(held)
        with pytest.raises(bindings.nixlNotFoundError):
            here.agent.deregister_memory(held)
    assert len(here.agent.agent._handles) == 1
    assert here.move((0, 0, KIB)) == "DONE"


def test_the_transports_of_a_plugin_are_those_of_its_links(make: MakeHere, way: str) -> None:
    """A link that is not made yet has none."""
    here, agent = make(), nixl_agent("other")
    assert agent.get_plugin_params("UCX")["transports"] == ""
    agent.add_remote_agent(here.agent.get_agent_metadata())
    agent.make_connection("here")
    here.peer.stop()
    try:
        agent.add_remote_agent(here.peer.metadata)
        end = time.monotonic() + 60
        while len(agent.agent.engine.datadist.links()) < 2:
            assert time.monotonic() < end
        assert agent.get_plugin_params("UCX")["transports"] == way
    finally:
        here.peer.resume()
    agent.agent.close()


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_list_that_is_refused_registers_nothing(wrong: int) -> None:
    """Any of the entries may be the refused one."""
    agent, memory = nixl_agent("alone"), np.zeros(3 * KIB, np.uint8)
    entries = [(memory.ctypes.data + KIB * i, KIB, 0, "") for i in range(3)]
    entries[wrong] = (1, KIB, 0, "")  # no process has memory there
    with pytest.raises(bindings.nixlBackendError):
        agent.register_memory(entries, "DRAM")
    assert agent.agent.engine.datadist._running().registry.entries() == []
    assert (agent.agent._handles, [*agent.agent._local.regions]) == ({}, [])
    agent.agent.close()


def test_a_transfer_posted_again_forgets_the_earlier_failure() -> None:
    agent, memory = nixl_agent("alone"), np.arange(2 * KIB, dtype=np.uint64).view(np.uint8)
    at = memory.ctypes.data
    agent.register_memory([(at, 2 * KIB, 0, "")], "DRAM")
    here, there = (agent.get_xfer_descs([(at + i * KIB, KIB, 0)], "DRAM") for i in (0, 1))
    handle = agent.initialize_xfer("READ", here, there, "alone")
    (transfer,) = agent.agent._transfers.values()
    agent.agent._failed(transfer, LLMException("gone", status_code=LLMStatusCode.LLM_LINK_FAILED))
    with pytest.raises(bindings.nixlRemoteDisconnectError):
        agent.check_xfer_state(handle)
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    assert [state, agent.check_xfer_state(handle)] == ["DONE"] * 2
    assert np.array_equal(memory[:KIB], memory[KIB : 2 * KIB])
    agent.agent.close()


def test_memory_of_another_device_number_is_other_memory() -> None:
    agent, memory = nixl_agent("alone"), np.zeros(KIB, np.uint8)
    third, fourth = ([(memory.ctypes.data, KIB, number, "")] for number in (3, 4))
    agent.register_memory(third, "DRAM")
    with pytest.raises(bindings.nixlNotFoundError, match="of device 4 is not registered"):
        agent.deregister_memory(agent.get_reg_descs(fourth, "DRAM"))
    agent.deregister_memory(agent.get_reg_descs(third, "DRAM"))
    agent.agent.close()


def test_memory_is_withdrawn_as_often_as_it_was_registered() -> None:
    """A list that names memory more often is refused, and withdraws none of it."""
    agent, memory = nixl_agent("alone"), np.zeros(KIB, np.uint8)
    row = (memory.ctypes.data, KIB, 0, "")
    once, twice = (agent.get_reg_descs([row] * times, "DRAM") for times in (1, 2))
    registry = agent.agent.engine.datadist._running().registry
    agent.register_memory(once)
    with pytest.raises(bindings.nixlNotFoundError):
        agent.deregister_memory(twice)
    assert len(registry.entries()) == 1
    agent.register_memory(once)
    agent.deregister_memory(twice)
    assert registry.entries() == []
    assert (agent.agent._handles, [*agent.agent._local.regions]) == ({}, [])
    agent.agent.close()


def test_memory_is_known_from_its_registration_to_its_end() -> None:
    """A search for the memory does not keep it longer."""
    regions, kind = Regions("this agent"), bindings.DRAM_SEG
    one, two = (0, 4096, 64, 0), (0, 8192, 64, 0)
    rows = {region: np.array([region[1:]], np.uint64) for region in (one, two)}
    for held in ([], [one], [one, two], [two], []):
        if new := set(held) - set(regions.regions):
            regions.add(new)
        for closed_name in set(regions.regions) - set(held):
            regions.remove(closed_name)
        for region, row in rows.items():
            if region in held:
                regions.check("local", kind, row)
            else:
                with refused("LLM_KV_CACHE_NOT_EXIST", "this agent has registered"):
                    regions.check("local", kind, row)


def test_plans_and_recordings_have_the_names_of_regions(make: MakeHere, tmp_path: Path) -> None:
    here = make(KIB)
    with here.agent.agent.engine.datadist.record(tmp_path / "moved.kvrec"):
        assert here.move((0, 0, KIB)) == "DONE"
    (transfer,) = read(tmp_path / "moved.kvrec").transfers
    assert transfer.plan is not None
    text = transfer.plan.explain()
    assert re.search(r"memory \d+ \(kv of there\).* -> memory \d+ \(kv of here\)", text)


def test_the_times_of_a_transfer_are_microseconds(make: MakeHere) -> None:
    here = make(64 * MIB)
    handle = here.request((0, 0, 64 * MIB))
    began = time.monotonic()
    state = here.agent.transfer(handle)
    posted = time.monotonic()
    assert here.end(handle, state) == "DONE"
    ended, found = time.monotonic(), here.agent.get_xfer_telemetry(handle)
    assert 0 < found.postDuration <= (posted - began) * 1e6
    assert found.postDuration <= found.xferDuration <= (ended - began) * 1e6
    assert began * 1e6 - 1 <= found.startTime <= posted * 1e6


def test_transfers_with_a_removed_agent_have_stopped(
    make: MakeHere, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "local":
        pytest.skip("over local the owner takes no part")
    monkeypatch.setenv("KVPLAN_HEARTBEAT_TIMEOUT_MS", "3600000")  # so that no timeout ends them
    here = make(16 * MIB)
    size = 4 * MIB
    handles = [here.request((size * i, size * i, size)) for i in range(3)]
    here.peer.stop()
    try:
        assert [here.agent.transfer(handle) for handle in handles] == ["PROC"] * 3
        here.agent.remove_remote_agent("there")
        assert [here.end(handle) for handle in handles] == ["ERR"] * 3
    finally:
        here.peer.resume()


def test_an_error_without_a_text_is_the_outcome_of_its_transfer() -> None:
    agent, memory = nixl_agent("alone"), np.zeros(128, np.uint8)
    first, second = ([(memory.ctypes.data + at, 64, 0)] for at in (0, 64))
    agent.register_memory([(memory.ctypes.data, 128, 0, "")], "DRAM")

    def refuse(_: object) -> None:
        raise LLMException(status_code=LLMStatusCode.LLM_LINK_BUSY)

    agent.agent.engine.datadist.on_plan(refuse)
    ours, theirs = (agent.get_xfer_descs(each, "DRAM") for each in (first, second))
    assert ours is not None
    assert theirs is not None
    handle = agent.initialize_xfer("READ", ours, theirs, "alone")
    assert agent.transfer(handle) == "ERR"
    assert agent.check_xfer_state(handle) == "ERR"
    agent.agent.close()


def test_a_message_to_a_dead_agent_is_an_error(make: MakeHere) -> None:
    here = make()
    here.peer.kill()

    def send() -> None:
        while True:  # until this end knows
            here.agent.send_notif("there", b"text")

    with pytest.raises((bindings.nixlRemoteDisconnectError, bindings.nixlBackendError)):
        send()


def test_views_that_come_and_go_cost_no_more_each_time() -> None:
    # Calls are counted, because times depend on the machine.
    agent = nixl_agent("views")
    memory = np.zeros(200 * 4096, np.uint8)
    views = [(memory.ctypes.data + 4096 * i, 4096, 0, f"view {i}") for i in range(200)]
    counts: list[int] = []

    def count(frame: object, event: str, argument: object) -> None:
        counts[-1] += event == "call"

    try:
        for _ in range(8):
            counts.append(0)
            sys.setprofile(count)
            try:
                agent.deregister_memory(agent.register_memory(views, "DRAM"))
            finally:
                sys.setprofile(None)
    finally:
        agent.agent.close()
    assert counts[-1] <= 1.2 * counts[1]


def test_telemetry_that_a_program_makes_begins_at_0() -> None:
    made = bindings.nixlXferTelemetry()
    times = made.startTime, made.postDuration, made.xferDuration
    assert (*times, made.totalBytes, made.descCount) == (0, 0, 0, 0, 0)
