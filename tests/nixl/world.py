"""Two agents in one process, and the rows that use them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

Row = Callable[["World"], Any]
ROWS: dict[str, Row] = {}
SIZE = 1 << 16


def row(call: Row) -> Row:
    ROWS[call.__name__] = call
    return call


class World:
    """Two agents with memory, of which `here` knows `there`."""

    def __init__(self, api: Any, bindings: Any) -> None:
        self.api, self.bindings = api, bindings
        self.here, self.there = self.agent("here"), self.agent("there")
        self.mine = np.zeros(SIZE, np.uint8)
        self.theirs = (np.arange(SIZE) % 251).astype(np.uint8)
        self.registered = self.here.register_memory([self.of(self.mine)], "DRAM")
        self.exported = self.there.register_memory([self.of(self.theirs)], "DRAM")
        self.name = self.here.add_remote_agent(self.there.get_agent_metadata())

    def agent(self, name: str, **options: Any) -> Any:
        return self.api.nixl_agent(name, self.api.nixl_agent_config(**options))

    @staticmethod
    def of(array: Any) -> tuple[int, int, int, str]:
        return (array.ctypes.data, array.nbytes, 0, "")

    def lists(self, *ranges: tuple[int, int, int]) -> tuple[Any, Any]:
        """Return descriptors of both ends, for ranges (local offset, remote offset, bytes)."""
        mine, theirs = self.mine.ctypes.data, self.theirs.ctypes.data
        return (
            self.here.get_xfer_descs([(mine + a, n, 0) for a, _, n in ranges], "DRAM"),
            self.here.get_xfer_descs([(theirs + b, n, 0) for _, b, n in ranges], "DRAM"),
        )

    def request(self, *ranges: tuple[int, int, int], op: str = "READ", note: bytes = b"") -> Any:
        mine, theirs = self.lists(*(ranges or [(0, 0, 4096)]))
        return self.here.initialize_xfer(op, mine, theirs, "there", note)

    def wait(self, handle: Any, note: bytes | None = None) -> str:
        state = self.here.transfer(handle) if note is None else self.here.transfer(handle, note)
        return self.end(handle, state)

    def end(self, handle: Any, state: str = "PROC") -> str:
        deadline = time.monotonic() + 30
        while state == "PROC" and time.monotonic() < deadline:
            state = self.here.check_xfer_state(handle)
        return state

    def notes(self, agent: Any, count: int) -> dict[str, list[bytes]]:
        """Wait for `count` messages, for 30 s at most, and return those that have arrived."""
        found: dict[str, list[bytes]] = {}
        deadline = time.monotonic() + 30
        while sum(map(len, found.values())) < count and time.monotonic() < deadline:
            for name, messages in agent.get_new_notifs().items():
                found.setdefault(name, []).extend(messages)
        return found


def raised(call: Callable[[], Any]) -> str:
    try:
        value = call()
    except Exception as error:
        return type(error).__name__
    return f"returned a {type(value).__name__}"
