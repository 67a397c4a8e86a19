from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvplan.nixl import nixl_agent, nixl_agent_config
from tests.nixl.peer import MIB, Peer

Bytes = NDArray[np.uint8]


class Here:
    """An agent of this process, which knows the peer, and its memory."""

    def __init__(self, peer: Peer, nbytes: int = MIB, name: str = "here") -> None:
        self.peer = peer
        self.agent = nixl_agent(name, nixl_agent_config(capture_telemetry=True))
        self.memory = np.full(nbytes, 0xAB, np.uint8)
        self.registered = self.agent.register_memory([self.row(0, nbytes)], "DRAM")
        assert self.agent.add_remote_agent(peer.metadata) == b"there"
        self.agent.make_connection("there")

    def row(self, at: int, nbytes: int) -> tuple[int, int, int, str]:
        return (self.memory.ctypes.data + at, nbytes, 0, "kv of here")

    def request(self, *ranges: tuple[int, int, int], op: str = "READ", note: bytes = b"") -> Any:
        """Make a transfer of ranges (local offset, remote offset, bytes)."""
        agent, ours, theirs = self.agent, self.memory.ctypes.data, self.peer.address
        return agent.initialize_xfer(
            op,
            agent.get_xfer_descs([(ours + a, n, 0) for a, _, n in ranges], "DRAM"),
            agent.get_xfer_descs([(theirs + b, n, 0) for _, b, n in ranges], "DRAM"),
            "there",
            note,
        )

    def end(self, handle: Any, state: str = "PROC") -> str:
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        return state

    def move(self, *ranges: tuple[int, int, int], op: str = "READ", note: bytes = b"") -> str:
        handle = self.request(*ranges, op=op, note=note)
        return self.end(handle, self.agent.transfer(handle))


MakeHere = Callable[..., Here]


@pytest.fixture(params=["local", "tcp"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The transport of agents that are made later, also in other processes."""
    monkeypatch.setenv("KVPLAN_TRANSPORT", request.param)
    return str(request.param)


@pytest.fixture
def make(way: str) -> Iterator[MakeHere]:
    """A function that makes a peer with memory of a size, and an agent here with as much."""
    with ExitStack() as held:

        def make(nbytes: int = MIB, name: str = "here", peer: Peer | None = None) -> Here:
            if peer is None:
                peer = Peer(nbytes)
                held.callback(peer.close)
            here = Here(peer, nbytes, name)
            held.callback(here.agent.agent.close)
            return here

        yield make


def pattern(first: int, nbytes: int) -> Bytes:
    """Return the content of a peer's memory from an offset on."""
    return np.resize(np.roll(np.arange(251, dtype=np.uint8), -first), nbytes)
