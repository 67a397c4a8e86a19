"""Arguments of the wrong type: they are refused as NIXL's bindings refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvplan.nixl import nixl_agent
from kvplan.nixl._bindings import nixlBackendError


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
    agent = nixl_agent("closed")
    agent.agent.close()
    with pytest.raises(nixlBackendError, match="the engine is finalized"):
        agent.get_new_notifs()


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
