"""A model's compute on a simulated device: a stream of a framework in the primary context."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from tests.ascend.simulator import VARIANT, Controls
from tests.ascend_sim.acl_library import Acl
from tests.cuda_sim.cuda_library import Cuda

_PLAIN = 0  # events of this kind wait for their first record
_NO_FAULT = (ctypes.c_int * 2)()


class Compute:
    """A stream that can be held, in the primary context, which the constructor makes current.

    Subclasses have the attributes of `torch_npu.npu.Stream` or `torch.cuda.Stream`.
    """

    handle: int

    def __init__(self, simulator: Controls, device_id: int = 3) -> None:
        core = self._core = simulator._core
        core.sim_stream_find.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        core.sim_stream_release.argtypes = [ctypes.c_void_p]
        core.sim_event_create.argtypes = [ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
        core.sim_event_destroy.argtypes = [ctypes.c_void_p]
        for name in ("sim_event_stream_wait", "sim_event_record"):
            getattr(core, name).argtypes = [ctypes.c_void_p] * 3
        self._device_id = device_id
        self._held: list[int] = []
        self._gates: list[int] = []
        self._events: list[int] = []

    def hold(self) -> None:
        """Make work that is issued from now on wait for `release`."""
        gate = ctypes.c_void_p()
        assert self._core.sim_event_create(_PLAIN, 0, ctypes.byref(gate)) == 0
        self._on_stream("sim_event_stream_wait", gate, self.handle)
        assert gate.value
        self._held.append(gate.value)
        self._gates.append(gate.value)

    def release(self) -> None:
        """Release the work that waits for the oldest `hold`."""
        self._on_stream("sim_event_record", ctypes.c_void_p(self._held.pop(0)), None)

    def _on_stream(self, call: str, event: ctypes.c_void_p, stream: int | None) -> None:
        found = ctypes.c_void_p()
        assert self._core.sim_stream_find(stream, ctypes.byref(found)) == 0
        assert getattr(self._core, call)(event, found, _NO_FAULT) == 0
        self._core.sim_stream_release(found)

    def fill(self, address: int, nbytes: int, value: int) -> None:
        """Issue work that sets each byte of device memory to `value`."""
        raise NotImplementedError

    def event(self) -> Any:
        """Return an event of a framework, recorded behind the work issued so far."""
        raise NotImplementedError

    def record(self, event: int) -> None:
        """Record an event again, behind the work issued so far."""
        raise NotImplementedError

    def destroy(self, event: int) -> None:
        """Destroy an event, even if its work is not done."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait for all issued work; no work may be held."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait for destroyed streams whose work was pending: CUDA still finishes that work."""

    def close(self) -> None:
        """Release held work, and free all resources."""
        while self._held:
            self.release()
        self.wait()
        for event in list(self._events):
            self.destroy(event)
        for gate in self._gates:
            assert self._core.sim_event_destroy(gate) == 0


class AscendCompute(Compute):
    """Compute on an Ascend device."""

    def __init__(self, simulator: Controls, device_id: int = 3) -> None:
        super().__init__(simulator, device_id)
        self._acl = Acl(VARIANT)
        self._acl.ok("aclrtSetDevice", device_id)
        self.handle = self.npu_stream = self._acl.made("aclrtCreateStream")

    def fill(self, address: int, nbytes: int, value: int) -> None:
        self._acl.ok("aclrtMemsetAsync", address, nbytes, value, nbytes, self.handle)

    def event(self) -> Any:
        event = self._acl.made("aclrtCreateEventExWithFlag", 1)
        self._events.append(event)
        self.record(event)
        return SimpleNamespace(npu_event=event)

    def record(self, event: int) -> None:
        self._acl.ok("aclrtRecordEvent", event, self.handle)

    def destroy(self, event: int) -> None:
        self._events.remove(event)
        self._acl.ok("aclrtDestroyEvent", event)

    def wait(self) -> None:
        self._acl.ok("aclrtSynchronizeStream", self.handle)

    def close(self) -> None:
        self._acl.ok("aclrtSetDevice", self._device_id)
        super().close()
        self._acl.ok("aclrtDestroyStream", self.handle)


class CudaCompute(Compute):
    """Compute on a CUDA device."""

    def __init__(self, simulator: Controls, device_id: int = 3) -> None:
        super().__init__(simulator, device_id)
        self._cuda = Cuda()
        before = ctypes.c_void_p()
        self._cuda.ok("cuCtxGetCurrent", ctypes.byref(before))
        self._before = before.value
        self._context = self._cuda.primary(device_id)
        self.handle = self.cuda_stream = self._cuda.made("cuStreamCreate", 1)
        self._read: list[int] = []

    def fill(self, address: int, nbytes: int, value: int) -> None:
        self._cuda.ok("cuMemsetD8Async", address, value, nbytes, self.handle)

    def read(self, address: int, nbytes: int) -> int:
        """Issue a copy of device or pinned bytes into new memory, and return its address."""
        seen = self._cuda.made("cuMemAlloc_v2", nbytes)
        self._read.append(seen)
        self._cuda.ok("cuMemcpyAsync", seen, address, nbytes, self.handle)
        return seen

    def seen(self, at: int, nbytes: int) -> bytes:
        """Return the bytes at the address of a `read`, after waiting for the work."""
        self.wait()
        return bytes(self._cuda.view(at, nbytes))

    @property
    def is_done(self) -> bool:
        """True if all issued work is done."""
        return bool(self._cuda.cuStreamQuery(self.handle) == 0)

    def capture(self) -> AbstractContextManager[None]:
        """Capture the stream into a graph, and check that no call invalidates the capture."""
        return self._cuda.capturing(self.handle)

    def event(self) -> Any:
        event = self._cuda.made("cuEventCreate", 2)
        self._events.append(event)
        self.record(event)
        return SimpleNamespace(cuda_event=event)

    def record(self, event: int) -> None:
        self._cuda.ok("cuEventRecord", event, self.handle)

    def destroy(self, event: int) -> None:
        self._events.remove(event)
        self._cuda.ok("cuEventDestroy_v2", event)

    def wait(self) -> None:
        self._cuda.ok("cuStreamSynchronize", self.handle)

    def settle(self) -> None:
        self._cuda.ok("cuCtxSetCurrent", self._context)
        self._cuda.ok("cuCtxSynchronize")

    def close(self) -> None:
        self._cuda.ok("cuCtxSetCurrent", self._context)
        super().close()
        for item in self._read:
            self._cuda.ok("cuMemFree_v2", item)
        self._cuda.ok("cuStreamDestroy_v2", self.handle)
        self._cuda.ok("cuCtxSetCurrent", self._before)
        self._cuda.ok("cuDevicePrimaryCtxRelease_v2", self._device_id)


def compute_on(simulator: Controls, device_id: int = 3) -> Any:
    """Return compute on a device of the simulated kind."""
    kind = AscendCompute if simulator.accelerator == "ascend" else CudaCompute
    return kind(simulator, device_id)


def handle_of(event: Any) -> int:
    """Return the handle in an event that `Compute.event` has returned."""
    (handle,) = vars(event).values()
    assert isinstance(handle, int)
    return handle
