"""A process that reaches another one's GPU memory by transport local, and offers its own.

As a peer's module it provides one `side`. Memory is either kvplan's own, which is exported as a
descriptor, or the program's, allocated by cuMemAlloc as torch and CuPy do.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import kvplan
from kvnative._device import DeviceBuffer
from kvplan import CacheDesc, DataType, Placement, Rows, Transfer
from kvplan.device.cuda import CudaDevice
from kvplan.device.memory import DeviceMemory
from kvplan.transport.local import LocalTransport
from kvplan.transport.local.link import LocalLink
from kvplan.transport.local.registrations import LocalRegistration
from kvplan.transport.protocol import DeviceRange
from tests.cuda_sim.cuda_library import Access, Cuda, Location, allocation
from tests.cuda_sim.simulator import controls
from tests.support.few_descriptors import spare_descriptors
from tests.support.peer import Peer

BLOCKS, BLOCK = 8, 1 << 16
NBYTES = BLOCKS * BLOCK
GRANULE = 2 << 20
DEADLINE_S = 30.0
SESSION = b"a link"
Whose = Literal["kvplan", "program"]


def pattern(seed: int, nbytes: int = NBYTES) -> NDArray[np.uint8]:
    """Return bytes that both processes can compute."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def blocks(of: bytes | NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.frombuffer(of, np.uint8).reshape(BLOCKS, -1)


def desc(placement: Placement = Placement.DEVICE, nbytes: int = NBYTES) -> CacheDesc:
    return CacheDesc(1, (BLOCKS, nbytes // BLOCKS), DataType.DT_UINT8, placement)


PULL = kvplan.plan(Transfer(Rows(desc(), [1, 6, 0]), Rows(desc(), [0, 3, 7])), local="dst")
PUSH = kvplan.plan(Transfer(Rows(desc(), [1, 6, 0]), Rows(desc(), [0, 3, 7])), local="src")


def expected(seed: int) -> np.ndarray:
    """Return the blocks of `PULL` or `PUSH` into zeros."""
    made = np.zeros((BLOCKS, BLOCK), np.uint8)
    made[[0, 3, 7]] = blocks(pattern(seed))[[1, 6, 0]]
    return made


class Side:
    """A device, a transport that shares its memory, and a program that has memory there, too.

    Args:
        device_id: number of the device.
    """

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        self.program = Cuda()
        self.program.ok("cuInit", 0)
        self._context = self.program.primary(device_id)
        self._before = controls().left(), controls().violations()
        self.device = CudaDevice(device_id)
        self.transport = LocalTransport(device=self.device)
        self._buffers: dict[int, DeviceBuffer] = {}
        self._programs: list[int] = []
        self._registered: dict[int, LocalRegistration] = {}
        self._links: list[LocalLink] = []
        self._messages: list[str] = []
        self._few = ExitStack()  # limits of descriptors
        handler = logging.Handler()
        handler.emit = lambda record: self._messages.append(record.getMessage())  # type: ignore[method-assign]
        self._handler = handler
        logging.getLogger("kvplan").addHandler(handler)

    def enter(self) -> None:
        """Make the program's context current again, after another side was closed."""
        self.program.ok("cuCtxSetCurrent", self._context)

    def allocate(self, whose: Whose, seed: int, nbytes: int = NBYTES) -> int:
        """Return new memory that is filled with a pattern."""
        if whose == "kvplan":
            buffer = self.device.allocate(nbytes)
            address = buffer.address
            self._buffers[address] = buffer
        else:
            address = self.program.made("cuMemAlloc_v2", nbytes)
            self._programs.append(address)
        self.device.write(address, pattern(seed, nbytes))
        return address

    def offer(
        self,
        whose: Whose,
        seed: int,
        nbytes: int = NBYTES,
        *,
        writable: bool = True,
        part: tuple[int, int] | None = None,
    ) -> int:
        """Allocate memory, and let peers reach all of it or a part (offset, nbytes)."""
        address = self.allocate(whose, seed, nbytes)
        offset, size = part or (0, nbytes)
        self.register(address + offset, size, self._buffers.get(address), writable=writable)
        return address

    def register(
        self,
        address: int,
        nbytes: int = NBYTES,
        buffer: DeviceBuffer | None = None,
        *,
        writable: bool = True,
    ) -> None:
        memory = DeviceRange(address, nbytes, buffer)
        self._registered[address] = self.transport.register(memory, writable=writable)

    def expandable(self, pieces: Sequence[bool] = (False,)) -> int:
        """Return memory of several adjacent pieces of a granule, like torch's expandable segments.

        Args:
            pieces: for each piece, True if another process may map it.
        """
        nbytes = len(pieces) * GRANULE
        address = self.program.made("cuMemAddressReserve", nbytes, 0, 0, 0)
        for index, is_shared in enumerate(pieces):
            self.map_piece(address + index * GRANULE, is_shared=is_shared)
        return address

    def map_piece(self, address: int, *, is_shared: bool = True) -> None:
        """Map new memory at reserved addresses."""
        program = self.program
        wanted = allocation(self.device_id, int(is_shared))
        handle = program.made("cuMemCreate", GRANULE, ctypes.byref(wanted), 0)
        program.ok("cuMemMap", address, GRANULE, 0, handle, 0)
        program.ok("cuMemRelease", handle)
        access = Access(location=Location(1, self.device_id), flags=3)
        program.ok("cuMemSetAccess", address, GRANULE, ctypes.byref(access), 1)

    def unmap_piece(self, address: int) -> None:
        self.program.ok("cuMemUnmap", address, GRANULE)

    def free_expandable(self, address: int, num_pieces: int = 1) -> None:
        self.program.ok("cuMemUnmap", address, num_pieces * GRANULE)
        self.program.ok("cuMemAddressFree", address, num_pieces * GRANULE)

    def answer(self, metadata: bytes) -> None:
        """Link to a peer; from then on its requests for descriptors are answered."""
        self._links.append(self.transport.connect(metadata, session=SESSION))

    def spare_descriptors(self, count: int | None) -> None:
        """Limit the number of descriptors that this process can open; None lifts the limit."""
        self._few.close()
        if count is not None:
            self._few.enter_context(spare_descriptors(count))

    def write(self, address: int, content: bytes) -> None:
        self.device.write(address, content)

    def metadata(self) -> bytes:
        return self.transport.metadata()

    def contents(self, address: int, nbytes: int = NBYTES) -> bytes:
        found = np.empty(nbytes, np.uint8)
        self.device.read(address, found)
        return found.tobytes()

    def deregister(self, address: int) -> list[str]:
        """End a registration of `offer`; return the logged messages."""
        before = len(self._messages)
        self.transport.deregister(self._registered.pop(address))
        return self._messages[before:]

    def free(self, address: int) -> None:
        """Free memory. Memory of kvplan is freed when its last user has ended."""
        if self._buffers.pop(address, None) is None:
            self._programs.remove(address)
            self.program.ok("cuMemFree_v2", address)

    def local(self, address: int, nbytes: int = NBYTES) -> DeviceMemory:
        """Return memory of this side as a side of a transfer."""
        buffer = self._buffers.get(address)
        return DeviceMemory.from_addresses(
            self.device, desc(nbytes=nbytes), [address], owner=buffer or self
        )

    def num_descriptors(self) -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    def end(self) -> None:
        """Free all memory."""
        logging.getLogger("kvplan").removeHandler(self._handler)
        while self._links:
            self._links.pop().close()
        self.transport.close()
        self._registered.clear()
        self._buffers.clear()
        gc.collect()
        for address in self._programs:
            self.program.ok("cuMemFree_v2", address)
        self.device.close()
        del self.device, self.transport
        gc.collect()
        self.program.ok("cuDevicePrimaryCtxRelease_v2", self.device_id)
        self.program.ok("cuCtxSetCurrent", None)

    def close(self) -> dict[str, Any]:
        """End everything; return the leaks and the violation of CUDA's rules, if any."""
        self.end()
        left, violations = self._before
        found: dict[str, Any] = {}
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:  # memory that a peer has used for long is released soon
            found = {name: n for name, n in controls().left().items() if n > left.get(name, 0)}
            if not found:
                break
            time.sleep(0.001)
        if controls().violations() != violations:
            found["violation"] = controls().last_violation()
        return found


def zeros(side: Side) -> int:
    address = side.allocate("kvplan", 0)
    side.device.write(address, bytes(NBYTES))
    return address


def names(device_id: str) -> dict[str, Any]:
    """Return the names of a peer: a side, and functions that make more of them."""
    return {"side": Side(int(device_id)), "Side": Side}


class Other(Peer):
    """The other process, whose `side` is on a device.

    Args:
        device_id: the device's number in that process.
        environment: variables of that process besides those of this one.
    """

    module = "tests.cuda.side"

    def __init__(self, device_id: int = 0, **environment: str) -> None:
        super().__init__(str(device_id), environment={**os.environ, **environment})

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the other process's side; return its result."""
        self.start(method, *arguments, **keywords)
        return self.answer()

    def start(self, method: str, *arguments: Any, **keywords: Any) -> None:
        """Begin a call without waiting; `answer` must follow."""
        self.send(
            f"result = side.{method}(*arguments, **keywords)",
            arguments=arguments,
            keywords=keywords,
        )
