"""A framework in the same process (torch_npu) lets its device's context stop on failure."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import LLMStatusCode
from kvplan.device.ascend import AscendDevice
from tests.ascend.hccl_side import PULL, PUSH, Side, link_both
from tests.ascend.hccl_sides import MakeSide
from tests.ascend.simulator import Controls
from tests.support.refusals import refused

NBYTES = 4096
DEVICE = 6  # used by no other test: its primary context is unusable after a failure here
STOP_ON_FAILURE = ctypes.c_uint64(1)


class Framework:
    """A stream in the primary context of a device, which stops on failure."""

    def __init__(self, acl: ctypes.CDLL) -> None:
        self._acl = acl
        self._stream, self._memory = ctypes.c_void_p(), ctypes.c_void_p()
        assert acl.aclrtSetDevice(DEVICE) == 0
        assert acl.aclrtCreateStream(ctypes.byref(self._stream)) == 0
        assert acl.aclrtSetStreamFailureMode(self._stream, STOP_ON_FAILURE) == 0
        assert acl.aclrtMalloc(ctypes.byref(self._memory), ctypes.c_size_t(NBYTES), 0) == 0

    def computes(self) -> int:
        """Return the result of the framework's own work: 0, or an error."""
        nbytes = ctypes.c_size_t(NBYTES)
        memset = self._acl.aclrtMemsetAsync
        code: int = memset(self._memory, nbytes, 1, nbytes, self._stream)
        return code or self._acl.aclrtSynchronizeStream(self._stream)

    def close(self) -> None:
        self._acl.aclrtDestroyStreamForce(self._stream)
        self._acl.aclrtFree(self._memory)
        self._acl.aclrtResetDevice(DEVICE)


@pytest.fixture
def framework(simulator: Controls) -> Iterator[Framework]:
    device = AscendDevice(DEVICE)
    made = Framework(ctypes.CDLL(device.native.library.path))
    device.close()
    assert made.computes() == 0
    yield made
    made.close()


def test_an_own_context_ends_with_its_last_user(simulator: Controls) -> None:
    gc.collect()
    before = simulator.contexts()
    first, second = AscendDevice(DEVICE), AscendDevice(DEVICE)
    backend = first.backend("host_to_device")
    assert simulator.contexts() == before + 1
    for item in (first, second):
        item.close()
    assert simulator.contexts() == before + 1  # the context of the backend's streams
    del first, second, item, backend
    gc.collect()
    assert simulator.contexts() == before


def test_a_thread_without_a_context_gets_no_error_message(simulator: Controls) -> None:
    """The runtime keeps a thread's message, and would add it to the program's next error."""
    device = AscendDevice(DEVICE)
    acl = ctypes.CDLL(device.native.library.path)
    acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
    messages: list[bytes | None] = []

    def work() -> None:
        device.native.memory()
        messages.append(acl.aclGetRecentErrMsg())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    device.close()
    assert messages == [None]


def test_a_thread_without_a_context_gets_the_frameworks_context(
    framework: Framework, make_side: MakeSide
) -> None:
    """Otherwise the thread would use a context that is destroyed with the last engine."""
    codes: list[int] = []
    one = make_side(DEVICE)

    def work() -> None:
        one.device.native.memory()
        codes.append(framework.computes())  # 107003 in another context than the stream's

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == [0]


@pytest.mark.parametrize("fault", ["HcclBatchPut:1=sync:507057", "HcclBatchGet:1=sync:507057"])
def test_a_failed_transfer_does_not_stop_the_framework(
    simulator: Controls, framework: Framework, make_side: MakeSide, two: Side, fault: str
) -> None:
    one = make_side(DEVICE)
    link, _ = link_both(one, two)
    remote: Any = two.peer_memory(link, writable=True)
    simulator.add_fault(fault)
    with refused(LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR):
        if "Put" in fault:
            kvplan.execute(PUSH, one.memory, remote)
        else:
            kvplan.execute(PULL, remote, one.memory)
    assert framework.computes() == 0


def test_a_failed_copy_does_not_stop_the_framework(
    simulator: Controls, framework: Framework, make_side: MakeSide
) -> None:
    one = make_side(DEVICE)
    host = np.frombuffer(one.transport.allocate(one.buffer.nbytes), np.uint8)
    pinned = one.device.pin(host.ctypes.data, host.nbytes)
    simulator.add_fault("aclrtMemcpyBatchAsync:1=sync:507053")
    with refused(LLMStatusCode.LLM_DEVICE_MEM_ERROR):
        kvplan.execute(PULL, one.memory, list(host.reshape(one.seen.shape)))
    pinned.close()
    assert framework.computes() == 0
