"""A model's compute on a simulated device: a stream of a framework, in the primary context."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

from tests.ascend.simulator import VARIANT
from tests.ascend_sim.acl_library import Acl

SYNC = 1


class Compute:
    """A stream whose work waits while it is held.

    Args:
        device_id: of the device.

    Attributes:
        npu_stream: its handle, as that of `torch_npu.npu.Stream`.
    """

    def __init__(self, device_id: int = 3) -> None:
        self._acl = Acl(VARIANT)
        self._device_id = device_id
        self._acl.ok("aclrtSetDevice", device_id)
        self.npu_stream = self._acl.made("aclrtCreateStream")
        self._gates: list[int] = []
        self._events: list[int] = []

    def hold(self) -> None:
        """What is issued from here on waits for `release`."""
        gate = self._acl.made("aclrtCreateEvent")  # one of this kind waits for its first record
        self._gates.append(gate)
        self._acl.ok("aclrtStreamWaitEvent", self.npu_stream, gate)

    def release(self) -> None:
        """Let what waits for the oldest `hold` go on."""
        gate = self._gates.pop(0)
        self._acl.ok("aclrtRecordEvent", gate, None)
        self._acl.ok("aclrtSynchronizeEvent", gate)
        self._events.append(gate)

    def fill(self, address: int, nbytes: int, value: int) -> None:
        """Compute `value` into each byte of device memory."""
        self._acl.ok("aclrtMemsetAsync", address, nbytes, value, nbytes, self.npu_stream)

    def event(self) -> SimpleNamespace:
        """Return an event behind what was issued so far, as one of torch_npu."""
        name = "aclrtCreateEventExWithFlag"
        event = self._acl.made(name, SYNC)
        self._events.append(event)
        self.record(event)
        return SimpleNamespace(npu_event=event)

    def record(self, event: int) -> None:
        """Record an event again, behind what was issued so far."""
        self._acl.ok("aclrtRecordEvent", event, self.npu_stream)

    def destroy(self, event: int) -> None:
        """Destroy an event, whatever it was recorded for."""
        self._events.remove(event)
        self._acl.ok("aclrtDestroyEvent", event)

    def wait(self) -> None:
        """Wait for all that was issued; nothing is held."""
        self._acl.ok("aclrtSynchronizeStream", self.npu_stream)

    def close(self) -> None:
        """Give all of it up, held or not."""
        self._acl.ok("aclrtSetDevice", self._device_id)
        self._acl.ok("aclrtDestroyStreamForce", ctypes.c_void_p(self.npu_stream))
        for event in [*self._gates, *self._events]:
            self._acl.ok("aclrtDestroyEvent", event)
