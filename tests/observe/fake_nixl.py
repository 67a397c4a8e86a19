"""A module with the surface of `nixl._api`, whose memory is all in one process."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


class Handle:
    """A handle of a list or a transfer."""

    def __init__(self, *values: Any) -> None:
        self.values = values


class nixl_agent:  # noqa: N801 - the name that programs import
    """An agent that moves bytes at the `polls`-th query of the state; 0: at once."""

    polls = 0

    def __init__(self, agent_name: str, nixl_conf: object = None) -> None:
        self.name = agent_name
        self.states: dict[Handle, int] = {}

    def register_memory(self, reg_list: Any, mem_type: str | None = None) -> Any:
        return reg_list

    def deregister_memory(self, dereg_list: Any) -> None:
        pass

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Any, mem_type: str | None = None
    ) -> Handle:
        ranges = []
        for address, nbytes, _, *strided in map(list, xfer_list):
            stride, count = strided or (0, 1)
            ranges += [(address + number * stride, nbytes) for number in range(count)]
        return Handle(np.array(ranges, np.int64))

    def make_prepped_xfer(
        self, operation: str, local_xfer_side: Handle, local_indices: Any,
        remote_xfer_side: Handle, remote_indices: Any, notif_msg: bytes = b"",
    ) -> Handle:  # fmt: skip
        if len(local_indices) != len(remote_indices):
            raise ValueError("indices differ in length")
        here = local_xfer_side.values[0][np.asarray(local_indices)]
        there = remote_xfer_side.values[0][np.asarray(remote_indices)]
        return Handle(operation, here, there)

    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str,
        notif_msg: bytes = b"",
    ) -> Handle:  # fmt: skip
        here, there = (
            np.array([its[:2] for its in d], np.int64) for d in (local_descs, remote_descs)
        )
        return Handle(operation, here, there)

    def transfer(self, handle: Handle, notif_msg: bytes = b"") -> str:
        self.states[handle] = self.polls
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: Handle) -> str:
        if self.states[handle] > 0:
            self.states[handle] -= 1
            return "PROC"
        operation, here, there = handle.values
        for (a, n), (b, _) in zip(here.tolist(), there.tolist(), strict=True):
            ctypes.memmove(*((a, b) if operation == "READ" else (b, a)), n)
        return "DONE"

    def release_xfer_handle(self, handle: Handle) -> None:
        self.states.pop(handle, None)

    def release_dlist_handle(self, handle: Handle) -> None:
        pass

    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None:
        pass
