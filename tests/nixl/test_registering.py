"""Registrations last as long as an agent knows them; prepared lists belong to the named agent."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvplan.nixl._api import nixl_agent
from kvplan.nixl._bindings import nixlNotFoundError, nixlRemoteDisconnectError
from tests.support import forked
from tests.support.interrupts import Interrupts


def interrupted(name: str) -> int:
    """Interrupt `name` at each place; then the agent's memory can be deregistered once."""
    agent, memory = nixl_agent("a"), np.zeros(2 * 4096, np.uint8)
    rows = [(memory.ctypes.data + 4096 * i, 4096, 0, "") for i in range(2)]
    descs = agent.get_reg_descs(rows, "DRAM")
    assert descs is not None
    caches = agent.agent.engine.datadist.caches
    interrupts = Interrupts("/kvplan/nixl/")
    goes_on = True
    while goes_on:
        if name == "deregister_memory":
            agent.register_memory(descs)
        goes_on = interrupts.call(lambda: getattr(agent, name)(descs))
        is_known = agent.agent._local.regions != {}
        if is_known:
            agent.deregister_memory(descs)
        else:
            with pytest.raises(nixlNotFoundError):
                agent.deregister_memory(descs)
        assert caches() == [], (interrupts.place, is_known)
    agent.agent.close()
    return interrupts.place


@pytest.mark.parametrize("name", ["register_memory", "deregister_memory"])
def test_a_call_that_was_interrupted_leaves_nothing_unknown(name: str) -> None:
    code = f"from tests.nixl.test_registering import interrupted; print(interrupted({name!r}))"
    done = forked.python(code, imported=("tests.nixl.test_registering",))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_a_list_is_prepared_for_the_agent_that_is_named_in_any_order() -> None:
    agent, memory = nixl_agent("a"), np.zeros(64, np.uint8)
    descs = agent.register_memory([(memory.ctypes.data, 64, 0, "")], "DRAM").trim()
    prepare = agent.agent.prepXferDlist
    local = [prepare(descs), prepare(descs=descs), prepare(descs=descs, agent_name="")]
    assert all(agent.agent._sides[number].agent == "" for number in local)
    assert agent.agent._sides[prepare(descs=descs, backend=[], agent_name="a")].agent == "a"
    with pytest.raises(nixlNotFoundError, match="'other' is not known"):
        prepare(descs=descs, agent_name="other")
    with pytest.raises(TypeError, match="remote_agent"):
        prepare(descs=descs, remote_agent="other")
    with pytest.raises(nixlNotFoundError, match="'other' is not known"):
        prepare(descs, agent_name="other")
    for incomplete in ((), ("other",), ("other", "DRAM")):
        with pytest.raises(TypeError, match="needs descs, or mem_type and array"):
            prepare(*incomplete)
    agent.agent.close()


def test_another_process_at_the_address_of_an_agent_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of its successor has the same addresses, and the content of other requests."""
    ours, theirs = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    here = nixl_agent("here")
    here.register_memory([(ours.ctypes.data, 64, 0, "")], "DRAM")
    monkeypatch.setenv("KVPLAN_LISTEN_IP_INFO", f"ipc://{tmp_path}/there")
    handle = None
    for life in (1, 2):
        theirs[:] = life
        there = nixl_agent("there")
        there.register_memory([(theirs.ctypes.data, 64, 0, "")], "DRAM")
        if handle is not None:
            for call in (
                partial(here.transfer, handle),
                partial(here.make_connection, "there"),
                partial(here.send_notif, "there", b"7"),
            ):
                with pytest.raises(nixlRemoteDisconnectError, match="load its metadata again"):
                    call()
            assert (set(ours.tolist()), there.get_new_notifs()) == ({1}, {})
        here.add_remote_agent(there.get_agent_metadata())
        lists = (
            here.get_xfer_descs([(memory.ctypes.data, 64, 0)], "DRAM") for memory in (ours, theirs)
        )
        handle = here.initialize_xfer("READ", *lists, "there")
        state = here.transfer(handle)
        while state == "PROC":
            state = here.check_xfer_state(handle)
        assert (state, set(ours.tolist())) == ("DONE", {life})
        there.agent.close()
    here.agent.close()
