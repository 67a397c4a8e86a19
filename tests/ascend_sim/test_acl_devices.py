"""Devices: numbers, attributes, primary contexts, and shared use."""

from __future__ import annotations

import ctypes

import pytest

from tests.ascend_sim.acl_library import Acl, in_process

WRONG_DEVICE, NO_CONTEXT, UNSUPPORTED, PARAM = 107001, 107002, 207000, 107000


@pytest.mark.parametrize("device", [-1, 8, 2**31 - 1])
def test_unknown_devices_are_refused(acl: Acl, device: int) -> None:
    assert acl.stored("aclrtGetDeviceCount") == 8
    assert acl.aclrtSetDevice(device) == WRONG_DEVICE
    assert f"device {device}: there are 8" in acl.message()


def test_visible_devices_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "5,2,9,1")
    answer = in_process("""
        acl.aclInit(None)
        physical = [acl.stored("aclrtGetPhyDevIdByLogicDevId", device) for device in range(2)]
        answer([
            acl.stored("aclrtGetDeviceCount"), physical,
            acl.stored("aclrtGetLogicDevIdByPhyDevId", 2),
            acl.aclrtGetLogicDevIdByPhyDevId(1, ctypes.byref(ctypes.c_int32())),
        ])
    """)
    assert answer == [2, [5, 2], 1, WRONG_DEVICE]


def test_attributes_depend_on_the_product() -> None:
    program = """
        acl.aclInit(None)
        out = ctypes.c_int64(-1)
        rows = []
        for attribute in (402, 403, 404, 405, 999):
            rows.append([acl.aclrtGetDeviceInfo(3, attribute, ctypes.byref(out)), out.value])
        answer(rows)
    """
    missing = [UNSUPPORTED, 3]
    assert in_process(program) == [[0, 3], missing, missing, missing, [PARAM, 3]]
    a3 = in_process(program, soc="Ascend910_9391", server_id=2, super_pod_id=7)
    assert a3 == [[0, 3], [0, 19], [0, 2], [0, 7], [PARAM, 7]]


def test_a_device_is_set_per_thread_and_shared() -> None:
    # In a process of its own, because an engine of another test may keep the device set here.
    shared, device, gone, here = in_process("""
        acl.aclInit(None)
        acl.ok("aclrtSetDevice", 0)
        mine = acl.made("aclrtGetCurrentContext")

        def other():
            acl.ok("aclrtSetDevice", 0)
            shared = acl.made("aclrtGetCurrentContext") == mine
            acl.ok("aclrtSetDevice", 7)
            device = acl.stored("aclrtGetDevice")
            acl.ok("aclrtResetDevice", 7)
            gone = acl.aclrtGetDevice(ctypes.byref(ctypes.c_int32()))
            acl.ok("aclrtResetDevice", 0)
            return [shared, device, gone]

        answer([*in_thread(other), acl.stored("aclrtGetDevice")])
    """)
    assert (shared, device, gone, here) == (True, 7, NO_CONTEXT, 0)


def test_a_device_is_reset_as_often_as_it_was_set() -> None:
    codes = in_process("""
        acl.aclInit(None)
        acl.ok("aclrtSetDevice", 2)
        acl.ok("aclrtSetDevice", 2)
        acl.made("aclrtMalloc", 4096, 0)
        acl.made("aclrtCreateStream")
        first = [acl.aclrtResetDevice(2), acl.leaks()]
        second = [acl.aclrtResetDevice(2), acl.leaks()]
        third = acl.aclrtResetDevice(2)
        acl.ok("aclrtSetDevice", 2)
        acl.ok("aclrtSetDevice", 2)
        answer([first, second, third, acl.aclrtResetDeviceForce(2), acl.aclrtResetDevice(2)])
    """)
    left = {"streams": 1, "device_bytes": 4096}
    assert codes == [[0, left], [0, {}], WRONG_DEVICE, 0, WRONG_DEVICE]


def test_a_program_may_create_contexts(acl: Acl) -> None:
    primary = acl.made("aclrtGetCurrentContext")
    context = acl.made("aclrtCreateContext", 1)
    assert acl.stored("aclrtGetDevice") == 1
    stream = acl.made("aclrtCreateStream")
    acl.ok("aclrtSetCurrentContext", primary)
    assert acl.aclrtSynchronizeStream(stream) == 107003
    assert acl.aclrtDestroyStream(stream) == 107003
    acl.ok("aclrtSetCurrentContext", context)
    acl.ok("aclrtDestroyStream", stream)
    acl.ok("aclrtDestroyContext", context)
    assert acl.aclrtGetDevice(ctypes.byref(ctypes.c_int32())) == NO_CONTEXT
    assert acl.aclrtSetCurrentContext(context) == PARAM
    assert acl.aclrtDestroyContext(context) == PARAM
    acl.ok("aclrtSetCurrentContext", primary)
    assert acl.aclrtDestroyContext(primary) == PARAM
