"""llm.LocalCommRes of version 1.3, and a process with one side of links over HIXL."""

from __future__ import annotations

import gc
import json
from typing import Any

import numpy as np

from kvplan.transport.hccl.link import HcclLink
from tests.ascend.hccl_side import DESC, PULL, PUSH, TENSORS, Side
from tests.ascend.simulator import controls, found

__all__ = ["ADDRESS", "names", "resources"]

ADDRESS = "127.0.0.1"
VARIANT = "9.1"


def resources(device_id: int, protocol: str = "ub_ctp", **changes: Any) -> str:
    """The option of a device with one port."""
    comm_ids = {
        "ub_ctp": f"00000000007f020000100000df14900{device_id}",
        "uboe": f"10.3.0.{device_id + 1}",
        "roce": f"10.1.0.{device_id + 1}",
        "hccs": str(device_id),
    }
    port = {"protocol": protocol, "comm_id": comm_ids[protocol], "placement": "device"}
    given = {"version": "1.3", "net_instance_id": "superpod1_1", "endpoint_list": [port]}
    return json.dumps(given | changes)


class HixlSide:
    """What a test asks of the process."""

    def __init__(self, device_id: int) -> None:
        self._found = found(VARIANT)
        self._found.__enter__()
        self.controls = controls(VARIANT)
        self.side = Side(device_id, local_comm_res=resources(device_id), hixl_address=ADDRESS)
        self.link: HcclLink

    def metadata(self) -> bytes:
        return self.side.transport.metadata()

    def connect(self, metadata: bytes) -> str:
        self.link = self.side.transport.connect(metadata, timeout_ms=10000, session=b"session")
        return self.link.way

    def facts(self) -> dict[str, Any]:
        hccl = self.side.transport._hccl
        facts = {"path": hccl.library.path, "generation": hccl.library.generation}
        return facts | {"reaches": sorted(self.side.transport.reaches)}

    def fill(self, seed: int) -> bytes:
        return self.side.fill(seed).tobytes()

    def bytes(self) -> bytes:
        return self.side.seen.tobytes()

    def addresses(self) -> tuple[list[int], bytes]:
        return self.side.addresses, self.side.transport.metadata([self.side.registration])

    def move(self, direction: str, addresses: list[int], metadata: bytes) -> None:
        import kvplan

        size = self.side.buffer.nbytes // TENSORS
        remote = self.link.memory(addresses, size, writable=True, metadata=metadata)
        if direction == "pull":
            kvplan.execute(PULL, remote, self.side.memory)
        elif direction == "push":
            kvplan.execute(PUSH, self.side.memory, remote)
        else:
            host = np.zeros((TENSORS, *DESC.shape), np.uint8)
            kvplan.execute(PULL, remote, list(host))
            self.side.seen[:] = host

    def deregister(self) -> None:
        self.side.transport.deregister(self.side.registration)

    def fault(self, specification: str) -> None:
        self.controls.add_fault(specification)

    def close(self) -> dict[str, int]:
        if hasattr(self, "link"):
            self.link.close()
            del self.link
        self.side.close()
        gc.collect()
        return self.controls.left()


def names(device_id: str) -> dict[str, Any]:
    return {"side": HixlSide(int(device_id))}
