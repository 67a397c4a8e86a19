"""A process with a side or an engine that links over HIXL, and its llm.LocalCommRes."""

from __future__ import annotations

import gc
import json
from typing import Any

import numpy as np

import kvplan
from kvnative._executor import Executor
from kvplan import (
    BlockLease,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LLMException,
    LlmRole,
    Options,
    Rows,
    Transfer,
)
from kvplan.transport.hccl.link import HcclLink
from kvplan.transport.hccl.transport import HcclTransport
from kvplan.transport.protocol import DeviceRange
from tests.ascend.hccl_end import columns
from tests.ascend.hccl_side import DEADLINE_S, DESC, PULL, PUSH, TENSORS, Side, link_both
from tests.ascend.simulator import controls, found

__all__ = ["ADDRESS", "names", "resources"]

ADDRESS = "127.0.0.1"
VARIANT = "9.1"
BLOCKS = CacheDesc(2, (40, 16), DataType.DT_INT32)
MINE, THEIRS = [3, 4, 9], [0, 7, 8]


def resources(device_id: int, protocol: str = "ub_ctp", **changes: Any) -> str:
    """Return the option of a device with one port."""
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
    """A side of HIXL links, for calls from a test."""

    def __init__(self, device_id: int) -> None:
        self._found = found(VARIANT)
        self._found.__enter__()
        self.controls = controls(VARIANT)
        self.device_id = device_id
        self.link: HcclLink
        self.open()

    def open(self, **options: Any) -> None:
        """Open the transport, in place of an earlier one."""
        if hasattr(self, "side"):
            self.side.close()
        comm_res = resources(self.device_id)
        self.side = Side(self.device_id, local_comm_res=comm_res, hixl_address=ADDRESS, **options)

    def open_after_a_failure(self) -> None:
        """Open again while the error of a failed attempt keeps its registrations."""
        self.side.close()
        del self.side
        self.fault("HixlCSServerRegMem:2=503900")
        failures = []
        try:
            self.open()
        except LLMException as error:
            failures.append(error)
        self.open()
        del failures[0]
        gc.collect()

    def open_another(self) -> None:
        comm_res = resources(self.device_id)
        HcclTransport(self.side.device, local_comm_res=comm_res, hixl_address=ADDRESS)

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

    def get_many(self, remote: int, count: int) -> int:
        """Read `count` rows of 64 bytes in the opposite order; return the status."""
        local = self.side.buffer.address
        rows = [(local + 64 * i, remote + 64 * (count - 1 - i), 64) for i in range(count)]
        backend = self.link.connection().communicator.backend("get")
        with Executor(backend) as executor:
            return executor.run(columns("get", rows), 20000).status

    def deregister(self) -> None:
        self.side.transport.deregister(self.side.registration)

    def register(self) -> None:
        self.side.registration = self.side.register()

    def fault(self, specification: str) -> None:
        self.controls.add_fault(specification)

    def lingers(self) -> int:
        """Return the number of ranges that aborted operations still use."""
        return self.controls.lingers()

    def unlink(self) -> None:
        self.link.close()
        del self.link

    def close(self) -> dict[str, int]:
        if hasattr(self, "link"):
            self.unlink()
        self.side.close()
        gc.collect()
        return self.controls.left()


class HixlBoth:
    """Two linked sides in this process, which renew together when one asks."""

    def __init__(self) -> None:
        self._found = found(VARIANT)
        self._found.__enter__()
        self.controls = controls(VARIANT)
        self.sides = [
            Side(number, local_comm_res=resources(number), hixl_address=ADDRESS)
            for number in range(2)
        ]
        self.links = [*link_both(*self.sides)]

    def deregister_during_a_renewal(self) -> None:
        """Deregister memory, and then other memory that the next connection binds."""
        side, renewable = self.sides[1], self.links[1].renewable
        hccl, ask = side.transport._hccl, renewable.request_renewal
        other = side.device.allocate(4096)
        later = [side.transport.register(DeviceRange(other.address, 4096, other))]
        assert ask is not None

        def renew(timeout_ms: float | None) -> None:
            ask(timeout_ms)
            if later:
                side.transport.deregister(later.pop())
                while hccl.num_open > 1:  # the previous connection is being closed
                    hccl.background.wait(DEADLINE_S)
                hccl.background.wait(DEADLINE_S)

        renewable.request_renewal = renew
        side.transport.deregister(side.registration)

    def close(self) -> None:
        while self.links:
            self.links.pop().close()
        while self.sides:
            self.sides.pop().close()


class HixlEngine:
    """An engine of cluster `device_id`, with caches whose keys are 1, 2 and so on."""

    def __init__(self, device_id: int) -> None:
        self._found = found(VARIANT)
        self._found.__enter__()
        self.controls = controls(VARIANT)
        self.device_id = device_id
        self.caches: list[Cache] = []

    def start(self) -> str:
        """Start the engine, and return its address."""
        self.engine = LlmDataDist(self.device_id, LlmRole.MIX)
        self.engine.initialize(
            Options(
                listen_ip_info="127.0.0.1:0",
                device_id=self.device_id,
                transport="hccl",
                local_comm_res=resources(self.device_id),
                hixl_address=ADDRESS,
            )
        )
        return self.engine.listen_address

    def link(self, peer: int, address: str) -> None:
        self.engine.link_clusters([ClusterInfo(peer, address)], timeout_ms=10000).raise_for_status()

    def allocate(self, value: int) -> None:
        """Make another cache, filled with a value."""
        key = BlocksCacheKey(1, len(self.caches) + 1)
        self.caches.append(self.engine.allocate_blocks_cache(BLOCKS, key))
        self.fill(len(self.caches), value)

    def fill(self, number: int, value: int) -> None:
        content = [np.full(BLOCKS.shape, value, np.int32) for _ in range(BLOCKS.num_tensors)]
        self.engine.write_cache(self.caches[number - 1], content)

    def deallocate(self, number: int) -> None:
        self.engine.deallocate_cache(self.caches[number - 1])

    def values(self, number: int) -> list[int]:
        """Return the different values in the blocks MINE and in their neighbours."""
        arrays = self.engine.arrays(self.caches[number - 1], copy=True)
        return sorted({int(value) for array in arrays for value in np.unique(array[MINE])})

    def pull(self, peer: int, theirs: int, own: int, timeout_ms: float = 10000) -> str:
        return self._run(Rows(BlocksCacheKey(peer, theirs), THEIRS), own, timeout_ms, is_pull=True)

    def push(self, peer: int, theirs: int, own: int, timeout_ms: float = 10000) -> str:
        rows = Rows(BlocksCacheKey(peer, theirs), MINE)
        return self._run(rows, own, timeout_ms, is_pull=False)

    def lease(self, number: int) -> bytes:
        """Lease the blocks THEIRS of a cache."""
        self.leased = self.engine.lease_blocks(self.caches[number - 1], THEIRS)
        return self.leased.to_bytes()

    def release(self) -> None:
        self.engine.release(self.leased)

    def push_leased(self, lease: bytes, own: int) -> str:
        rows = Rows(BlockLease.from_bytes(lease), THEIRS)
        return self._run(rows, own, 10000, is_pull=False)

    def _run(self, remote: Rows, own: int, timeout_ms: float, *, is_pull: bool) -> str:
        local = Rows(self.caches[own - 1], MINE)
        sides = (remote, local) if is_pull else (local, remote)
        try:
            self.engine.run(Transfer(*sides), timeout_ms=timeout_ms)
        except LLMException as error:
            return error.status_code.name
        return "LLM_SUCCESS"

    def fault(self, specification: str) -> None:
        self.controls.add_fault(specification)

    def close(self) -> dict[str, int]:
        self.engine.finalize()
        self.caches.clear()
        del self.engine
        gc.collect()
        return self.controls.left()


def names(kind: str, device_id: str = "0") -> dict[str, Any]:
    if kind == "both":
        return {"side": HixlBoth()}
    return {"side": (HixlSide if kind == "side" else HixlEngine)(int(device_id))}
