"""A side of HCCL links in this process: a device, its transport, and visible memory."""

from __future__ import annotations

import ctypes
import json
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvplan
from kvplan import CacheDesc, DataType, Rows, Shard, Transfer
from kvplan.device.ascend import AscendDevice
from kvplan.device.memory import DeviceMemory
from kvplan.transport.hccl.link import HcclLink, HcclPeerMemory
from kvplan.transport.hccl.transport import HcclTransport
from kvplan.transport.protocol import DeviceRange
from tests.ascend.simulator import controls

BLOCKS, BLOCK, TENSORS = 40, 3000, 3
TENSOR = BLOCKS * BLOCK
DESC = CacheDesc(TENSORS, (BLOCKS, BLOCK), DataType.DT_UINT8, shard=Shard(num_layers=TENSORS))
SRC, DST = [7, 8, 9, 30, 2, 39], [0, 20, 21, 22, 5, 39]
PULL = kvplan.plan(Transfer(Rows(DESC, SRC), Rows(DESC, DST)), local="dst")
PUSH = kvplan.plan(Transfer(Rows(DESC, SRC), Rows(DESC, DST)), local="src")
DEADLINE_S = 20.0


def on_a_host_of_its_own(device_id: int) -> str:
    """Return llm.LocalCommRes of a device that is connected to others by RDMA."""
    device = {"device_id": str(device_id), "device_ip": f"10.1.0.{device_id + 1}"}
    servers = [{"server_id": f"10.0.0.{device_id + 1}", "device": [device]}]
    return json.dumps({"version": "1.0", "status": "completed", "server_list": servers})


class Side:
    """A device with memory for the tensors of DESC."""

    def __init__(self, device_id: int, *, registers: bool = True, **options: Any) -> None:
        self.device = AscendDevice(device_id)
        self.transport = HcclTransport(self.device, **options)
        self.buffer = self.device.allocate(TENSORS * TENSOR)
        self.addresses = [self.buffer.address + i * TENSOR for i in range(TENSORS)]
        self.registration: Any = self.register() if registers else None

    def register(self) -> Any:
        buffer = self.buffer
        return self.transport.register(DeviceRange(buffer.address, buffer.nbytes, buffer))

    @property
    def seen(self) -> NDArray[np.uint8]:
        """Return views of the tensors."""
        return seen(self.buffer).reshape(TENSORS, BLOCKS, BLOCK)

    def fill(self, seed: int) -> NDArray[np.uint8]:
        """Fill the tensors with a pattern, and return a copy of it."""
        self.seen[:] = np.random.default_rng(seed).integers(0, 256, self.seen.shape, np.uint8)
        return self.seen.copy()

    @property
    def memory(self) -> DeviceMemory:
        sizes = np.full(TENSORS, TENSOR, np.uint64)
        addresses = np.array(self.addresses, np.uint64)
        return DeviceMemory(self.device, addresses, sizes, writable=True, owner=self.buffer)

    def peer_memory(
        self, link: HcclLink, *, writable: bool = False, metadata: bytes | None = None
    ) -> HcclPeerMemory:
        """Return the tensors of this side as the peer reaches them over its link."""
        return link.memory(self.addresses, TENSOR, writable=writable, metadata=metadata)

    def close(self) -> None:
        self.transport.close()
        self.device.close()
        self.__dict__.clear()  # a fixture may outlive the memory's last allowed use


def seen(buffer: Any) -> NDArray[np.uint8]:
    """Return a view of device memory, which must not outlive the memory."""
    view = controls().host_view(buffer.address)
    return np.frombuffer((ctypes.c_uint8 * buffer.nbytes).from_address(view), np.uint8)


def moved(src: NDArray[np.uint8], dst: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the result of SRC -> DST, computed by NumPy."""
    left = dst.copy()
    left[:, DST] = src[:, SRC]
    return left


def link_both(
    one: Side, two: Side, session: bytes = b"session", timeout_ms: float = 10000
) -> tuple[HcclLink, HcclLink]:
    """Link two ends, each in a thread of its own."""
    metadata = one.transport.metadata(), two.transport.metadata()
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(side.transport.connect, item, timeout_ms=timeout_ms, session=session)
            for side, item in zip((one, two), reversed(metadata), strict=True)
        ]
        first, second = (call.result(DEADLINE_S) for call in calls)
    join(first, second)
    return first, second


def join(one: HcclLink, two: HcclLink) -> None:
    """Make both ends renew together when one asks, as engines do."""
    generations = [0]
    mutex = threading.Lock()

    def ask(timeout_ms: float | None) -> None:
        with mutex, ThreadPoolExecutor(2) as threads:
            generations.append(generations[-1] + 1)
            generation = generations[-1]
            metadata = one.renewable.open(generation), two.renewable.open(generation)
            both = one.renewable, two.renewable
            made = [threads.submit(end.renew, generation, timeout_ms=5000) for end in both]
            done, _ = wait(made, DEADLINE_S, FIRST_EXCEPTION)
            failure = next((error for outcome in done if (error := outcome.exception())), None)
            if failure is not None:
                for end in both:
                    end.abandon(generation)
                raise failure
            one.renewable.adopt(generation, metadata[1])
            two.renewable.adopt(generation, metadata[0])

    for here, there in ((one, two), (two, one)):
        here.renewable.request_renewal = ask
        here.renewable.notify_unused = there.renewable.unused
