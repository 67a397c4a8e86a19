"""Arguments of the wrong type: they are refused as NIXL's bindings refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvplan.addressed.connections import MAX_BODY_NBYTES
from kvplan.nixl import nixl_agent
from kvplan.nixl._bindings import nixlBackendError, nixlInvalidParamError


@pytest.mark.parametrize("wrong", [5, True, None, [1, 2], 2.5], ids=repr)
def test_a_message_is_text_or_bytes(wrong: Any) -> None:
    """`bytes(5)` would be five zero bytes."""
    agent, memory = nixl_agent("alone"), np.zeros(64, np.uint8)
    ours = agent.register_memory([(memory.ctypes.data, 64, 0, "")], "DRAM").trim()
    handle = agent.initialize_xfer("READ", ours, ours, "alone")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("notif_msg", lambda: agent.send_notif("alone", wrong)),
        ("notif_msg", lambda: agent.initialize_xfer("READ", ours, ours, "alone", wrong)),
        ("lookup_tag", lambda: agent.check_remote_xfer_done("alone", wrong)),
        ("metadata", lambda: agent.add_remote_agent(wrong)),
        ("msg", lambda: agent.agent.genNotif("alone", wrong)),
        ("data", lambda: agent.agent.loadRemoteMD(wrong)),
    ]
    for name, call in calls:
        with pytest.raises(TypeError, match=rf"^{name}=.* must be .*bytes-like"):
            call()
    assert agent.get_new_notifs() == {}
    agent.release_xfer_handle(handle)
    agent.agent.close()


@pytest.mark.parametrize("message", [b"m", bytearray(b"m"), np.frombuffer(b"m", np.uint8), "m"])
def test_a_message_may_be_any_buffer(message: Any) -> None:
    agent = nixl_agent("alone")
    agent.send_notif("alone", message)
    assert agent.get_new_notifs() == {"alone": [b"m"]}
    agent.agent.close()


@pytest.mark.parametrize("receiver", ["alone", "peer"])
def test_a_message_of_more_than_1_mib_is_refused(receiver: str) -> None:
    """A message to the agent itself is refused too, and so is one that a transfer carries."""
    agent, peer, memory = nixl_agent("alone"), nixl_agent("peer"), np.zeros(64, np.uint8)
    ours, theirs = (
        each.register_memory([(memory.ctypes.data, 64, 0, "")], "DRAM").trim()
        for each in (agent, agent if receiver == "alone" else peer)
    )
    agent.add_remote_agent(peer.get_agent_metadata())
    longest = b"m" * MAX_BODY_NBYTES
    agent.send_notif(receiver, longest)
    with pytest.raises(nixlBackendError, match="at most 1048576"):
        agent.send_notif(receiver, longest + b"m")
    handle = agent.initialize_xfer("READ", ours, theirs, receiver, longest + b"m")
    assert agent.transfer(handle) == "ERR"
    taker = agent if receiver == "alone" else peer
    assert [*map(len, taker.get_new_notifs()["alone"])] == [MAX_BODY_NBYTES]
    for each in (agent, peer):
        each.agent.close()


@pytest.mark.parametrize("wrong", [[], {}, 5, None, np.array([1, 2])], ids=repr)
def test_a_name_is_text_or_bytes(wrong: Any) -> None:
    agent = nixl_agent("alone")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("remote_agent_name", lambda: agent.send_notif(wrong, b"m")),
        ("remote_agent_name", lambda: agent.check_remote_xfer_done(wrong, b"m")),
        ("remote_agent", lambda: agent.make_connection(wrong)),
        ("agent", lambda: agent.remove_remote_agent(wrong)),
        ("agent", lambda: agent.check_remote_metadata(wrong)),
        ("agent_name", lambda: agent.prep_xfer_dlist(wrong, [(4096, 64, 0)], "DRAM")),
        ("remote_agent", lambda: agent.agent.genNotif(wrong, b"m")),
        ("name", lambda: agent.agent.makeConnection(wrong)),
    ]
    for name, call in calls:
        with pytest.raises(TypeError, match=rf"^{name}=.* must be str"):
            call()
    agent.agent.close()


@pytest.mark.parametrize("wrong", [0, 1, True, "READ", None], ids=repr)
def test_an_operation_is_a_member_of_its_enum(wrong: Any) -> None:
    """0 is the number of NIXL_READ, and was taken for a write."""
    agent, memory = nixl_agent("alone"), np.arange(64, dtype=np.uint8)
    one = agent.register_memory([(memory.ctypes.data, 8, 0, "")], "DRAM").trim()
    side = agent.prep_xfer_dlist("alone", one)._handle
    for call in (
        lambda: agent.agent.makeXferReq(wrong, side, [0], side, [0]),
        lambda: agent.agent.createXferReq(wrong, one, one, "alone"),
    ):
        with pytest.raises(TypeError, match=r"^operation=.* must be nixl_xfer_op_t"):
            call()
    agent.agent.close()


@pytest.mark.parametrize("kind", ["number", "other", "none"])
def test_handles_and_lists_are_of_their_own_kind(kind: str) -> None:
    agent, memory = nixl_agent("alone"), np.zeros(64, np.uint8)
    held = agent.register_memory([(memory.ctypes.data, 64, 0, "")], "DRAM")
    ours = held.trim()
    side = agent.prep_xfer_dlist("alone", ours)
    handle = agent.initialize_xfer("READ", ours, ours, "alone")
    no_side, no_transfer, no_list, no_memory = (
        {"number": 1, "other": other, "none": None}[kind] for other in (handle, side, held, ours)
    )
    calls: list[tuple[str, Callable[[], object]]] = [
        (
            "local_xfer_side",
            lambda: agent.make_prepped_xfer("READ", no_side, [0], side, [0]),
        ),
        (
            "remote_xfer_side",
            lambda: agent.make_prepped_xfer("READ", side, [0], no_side, [0]),
        ),
        ("handle", lambda: agent.release_dlist_handle(no_side)),
        ("handle", lambda: agent.transfer(no_transfer)),
        ("handle", lambda: agent.check_xfer_state(no_transfer)),
        ("handle", lambda: agent.get_xfer_telemetry(no_transfer)),
        ("handle", lambda: agent.query_xfer_backend(no_transfer)),
        ("handle", lambda: agent.release_xfer_handle(no_transfer)),
        ("req_handle", lambda: agent.estimate_xfer_cost(no_transfer)),
        ("local_descs", lambda: agent.initialize_xfer("READ", no_list, ours, "alone")),
        ("remote_descs", lambda: agent.initialize_xfer("READ", ours, no_list, "alone")),
        ("descs", lambda: agent.agent.checkRemoteMD("alone", no_list)),
        ("descs", lambda: agent.agent.registerMem(no_memory)),
        ("descs", lambda: agent.deregister_memory(no_memory)),
        ("descs", lambda: agent.get_partial_agent_metadata(no_memory)),
    ]
    for name, call in calls:
        with pytest.raises(TypeError, match=rf"^{name}=.* must be nixl"):
            call()
    agent.deregister_memory(held)
    agent.agent.close()


def test_a_handle_of_another_agent_is_refused() -> None:
    """Both agents count from 1, so a number alone would name a transfer of either."""
    memory = np.zeros(64, np.uint8)
    agents, handles, sides = [nixl_agent(name) for name in ("one", "other")], [], []
    for agent in agents:
        ours = agent.register_memory([(memory.ctypes.data, 64, 0, "")], "DRAM").trim()
        handles.append(agent.initialize_xfer("READ", ours, ours, agent.name))
        sides.append(agent.prep_xfer_dlist(agent.name, ours))
    one = agents[0]
    for call in (
        lambda: one.transfer(handles[1]),
        lambda: one.check_xfer_state(handles[1]),
        lambda: one.make_prepped_xfer("READ", sides[1], [0], sides[0], [0]),
        lambda: one.make_prepped_xfer("READ", sides[0], [0], sides[1], [0]),
        lambda: one.release_xfer_handle(handles[1]),
        lambda: one.release_dlist_handle(sides[1]),
    ):
        with pytest.raises(nixlInvalidParamError, match=r"is of agent 'other', not 'one'$"):
            call()
    for agent, handle, side in zip(agents, handles, sides, strict=True):
        assert agent.transfer(handle) == "DONE"
        assert agent.make_prepped_xfer("READ", side, [0], side, [0])
        agent.agent.close()


@pytest.mark.parametrize("wrong", [None, 0, ["a"], [2**64], [None]], ids=repr)
def test_indices_that_are_no_integers_are_named(wrong: Any) -> None:
    agent, memory = nixl_agent("alone"), np.zeros(64, np.uint8)
    side = agent.prep_xfer_dlist(
        "alone", agent.register_memory([(memory.ctypes.data, 64, 0, "")], "DRAM").trim()
    )
    for name, indices in (("local_indices", (wrong, [0])), ("remote_indices", ([0], wrong))):
        with pytest.raises(TypeError, match=rf"^{name}=.* must be a list or an array of integers"):
            agent.make_prepped_xfer("READ", side, indices[0], side, indices[1])
    agent.agent.close()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_metadata_may_be_any_buffer(kind: Callable[[bytes], Any]) -> None:
    agent, other = nixl_agent("alone"), nixl_agent("other")
    assert agent.add_remote_agent(kind(other.get_agent_metadata())) == b"other"
    for each in (agent, other):
        each.agent.close()


class Tensor:
    """A tensor of 16 bytes in the memory of device 0 or of the host."""

    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda = is_cuda

    def data_ptr(self) -> int:
        return 4096

    def is_contiguous(self) -> bool:
        return True

    def numel(self) -> int:
        return 4

    def element_size(self) -> int:
        return 4

    def get_device(self) -> int:
        return 0


@pytest.mark.parametrize("given", ["DRAM", "VRAM", None])
def test_tensors_have_the_kind_of_their_own_memory(given: str | None) -> None:
    """NIXL ignores `mem_type` for tensors, too."""
    agent = nixl_agent("lists")
    try:
        for is_cuda, kind in ((True, "VRAM_SEG"), (False, "DRAM_SEG")):
            for call in (agent.get_xfer_descs, agent.get_reg_descs):
                assert call([Tensor(is_cuda)], given).getType().name == kind
    finally:
        agent.agent.close()


def test_an_agent_that_is_closed_says_so_by_an_error_of_nixl() -> None:
    agent, other, memory = nixl_agent("closed"), nixl_agent("other"), np.zeros(64, np.uint8)
    held = agent.register_memory([(memory.ctypes.data, 64, 0, "")], "DRAM")
    agent.agent.close()
    for call in (
        agent.get_new_notifs,
        lambda: agent.add_remote_agent(other.get_agent_metadata()),
        lambda: agent.get_plugin_params("UCX"),
        lambda: agent.get_backend_mem_types("UCX"),
        lambda: agent.deregister_memory(held),
        lambda: agent.send_notif("closed", b"to itself"),
    ):
        with pytest.raises(nixlBackendError, match="the engine is finalized"):
            call()
    other.agent.close()


def test_the_name_of_an_agent_is_text_that_messages_can_carry() -> None:
    longest = 512 * "\u00e9"  # 1024 bytes
    agent, peer = nixl_agent(longest), nixl_agent(b"peer")
    assert peer.name == "peer"
    agent.add_remote_agent(peer.get_agent_metadata())
    agent.send_notif("peer", b"message")
    assert peer.get_new_notifs() == {longest: [b"message"]}
    for each in (agent, peer):
        each.agent.close()
    for wrong in ("", longest + "x"):
        with pytest.raises(ValueError, match=r"^agent_name has \d+ bytes; it must have 1 to 1024"):
            nixl_agent(wrong)
    with pytest.raises(TypeError, match=r"^agent_name=5 must be str"):
        nixl_agent(5)  # type: ignore[arg-type]


def test_an_argument_that_is_not_text_of_unicode_is_named() -> None:
    agent = nixl_agent("alone")
    for argument, call in (
        ("notif_msg", lambda: agent.send_notif("alone", "\udcff")),
        ("lookup_tag", lambda: agent.check_remote_xfer_done("alone", "\udcff")),
        ("agent_name", lambda: nixl_agent("\udcff")),
        ("remote_agent_name", lambda: agent.send_notif(b"\xff", b"message")),
        ("agent", lambda: agent.remove_remote_agent(b"\xff")),
        (r"desc\[3\]", lambda: agent.get_reg_descs([(4096, 1, 0, "\udcff")], "DRAM")),
    ):
        with pytest.raises(ValueError, match=f"^{argument}=b?'.(xff|udcff)' is not Unicode text"):
            call()
