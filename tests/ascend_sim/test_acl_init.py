"""Initialization, messages, the log and reports of leaks."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

from tests.ascend_sim.acl_library import DEFAULT, Acl, in_process, in_thread

NOT_INITIALIZED, REPEATED, FINISHED, NO_CONTEXT = 100001, 100002, 100037, 107002


def test_init_and_finalize_alternate() -> None:
    codes = in_process("""
        out = ctypes.c_void_p()
        answer([
            acl.aclrtSetDevice(0), acl.aclFinalize(), acl.aclInit(None), acl.aclInit(None),
            acl.aclrtSetDevice(0), acl.aclFinalize(), acl.aclFinalize(), acl.aclrtSetDevice(0),
            acl.aclInit(None),
        ])
    """)
    missing = NOT_INITIALIZED
    assert codes == [missing, missing, 0, REPEATED, 0, 0, FINISHED, missing, 0]


def test_version_and_product_are_those_of_the_variant() -> None:
    program = """
        acl.aclInit(None)
        numbers = [ctypes.c_int32() for _ in range(3)]
        acl.ok("aclrtGetVersion", *map(ctypes.byref, numbers))
        answer([[number.value for number in numbers], acl.aclrtGetSocName().decode()])
    """
    assert in_process(program, "8.1") == [[1, 13, 0], "Ascend910B1"]
    assert in_process(program, soc="Ascend910_9391") == [[1, 16, 0], "Ascend910_9391"]


def test_an_invalid_setting_ends_the_program() -> None:
    code, text = in_process("", soc="H100")
    assert code < 0
    assert "KVSIM_SOC=H100 is not a value that the simulator knows" in text


def test_messages_are_per_thread_and_taken_once(acl: Acl) -> None:
    acl.message()
    assert acl.aclrtFree(0) == 100000
    assert in_thread(acl.message) == ""
    assert acl.message() == "ES0000: pointer is NULL"
    assert acl.message() == ""


def test_calls_without_a_context_are_refused(acl: Acl) -> None:
    memory = acl.made("aclrtMalloc", 8, 0)
    out = ctypes.byref(ctypes.c_void_p())
    calls: list[tuple[Any, ...]] = [
        ("aclrtMalloc", out, 1, 0),
        ("aclrtMallocHost", out, 1),
        ("aclrtFree", memory),
        ("aclrtCreateStream", out),
        ("aclrtCreateEventExWithFlag", out, 1),
        ("aclrtSynchronizeStream", None),
        ("aclrtSynchronizeDevice",),
        ("aclrtMemcpy", memory, 8, memory, 8, DEFAULT),
        ("aclrtMemcpyAsync", memory, 8, memory, 8, DEFAULT, None),
        ("aclrtPointerGetAttributes", memory, out),
        ("aclrtGetDevice", out),
        ("aclrtGetCurrentContext", out),
    ]
    codes = in_thread(lambda: [getattr(acl, name)(*arguments) for name, *arguments in calls])
    assert codes == [NO_CONTEXT] * len(calls)
    acl.ok("aclrtFree", memory)


def test_the_log_has_every_call_and_all_leaks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    in_process(
        """
        acl.aclInit(None)
        acl.aclrtSetDevice(1)
        memory = acl.made("aclrtMalloc", 100, 0)
        stream = acl.made("aclrtCreateStream")
        acl.aclrtDestroyStream(stream)
        acl.aclFinalize()
        answer(memory)
        """,
        log=log,
    )
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["call"] for line in lines] == [
        *("aclInit", "aclrtSetDevice", "aclrtMalloc", "aclrtCreateStream", "aclrtDestroyStream"),
        *("leaks", "aclFinalize", "leaks"),
    ]
    assert (lines[2]["bytes"], lines[2]["device"], lines[2]["code"]) == (100, 1, 0)
    assert [(line["when"], line["device_bytes"], line["streams"]) for line in lines[5::2]] == [
        ("aclFinalize", 100, 0),
        ("exit", 100, 0),
    ]


def test_calls_in_a_forked_child_fail_without_hanging() -> None:
    answer = in_process("""
        acl.aclInit(None)
        acl.aclrtSetDevice(0)
        memory = acl.made("aclrtMalloc", 4096, 0)
        stream = acl.made("aclrtCreateStream")
        acl.fault("aclrtMemsetAsync:1=hang")
        acl.ok("aclrtMemsetAsync", memory, 4096, 1, 4096, stream)
        read, write = os.pipe()
        if not os.fork():
            codes = [
                acl.aclrtSynchronizeStream(stream), acl.aclrtFree(memory), acl.aclrtSetDevice(0),
                acl.aclrtDestroyStreamForce(stream),
            ]
            os.write(write, json.dumps([codes, acl.message()]).encode())
            os._exit(0)
        os.wait()
        theirs = json.loads(os.read(read, 10000))
        answer([theirs, acl.aclrtDestroyStreamForce(stream), acl.aclrtFree(memory)])
    """)
    (codes, message), destroyed, freed = answer
    assert codes == [507899] * 4
    assert "fork" in message
    assert (destroyed, freed) == (0, 0)
