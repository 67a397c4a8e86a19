"""IPC handles: allocations that another process opens, and the end of their owner."""

from __future__ import annotations

import ctypes

import pytest

from tests.cuda_sim.cuda_library import Cuda, IpcHandle, in_process

INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE, ILLEGAL_ADDRESS, NOT_SUPPORTED = (
    1,
    201,
    400,
    700,
    801,
)
N = 4096

OPEN = """
    cuda.ok("cuInit", 0)
    cuda.primary()
    handle = IpcHandle()
    ctypes.memmove(ctypes.byref(handle), bytes.fromhex({handle!r}), 64)
    memory = cuda.made("cuIpcOpenMemHandle_v2", handle, 1)
"""


def export(cuda: Cuda, memory: int) -> str:
    handle = IpcHandle()
    cuda.ok("cuIpcGetMemHandle", ctypes.byref(handle), memory)
    return bytes(handle).hex()


def test_another_process_opens_an_exported_allocation(cuda: Cuda) -> None:
    memory = cuda.made("cuMemAlloc_v2", N)
    cuda.view(memory, 4)[:] = b"ours"
    program = (
        OPEN.format(handle=export(cuda, memory))
        + """
    again = cuda.made("cuIpcOpenMemHandle_v2", handle, 1)
    cuda.ok("cuIpcCloseMemHandle", again)
    got = ctypes.create_string_buffer(4)
    cuda.ok("cuMemcpyDtoH_v2", got, memory, 4)
    cuda.ok("cuMemcpyHtoD_v2", memory + 4092, b"tail", 4)
    lazy = cuda.cuIpcOpenMemHandle_v2(ctypes.byref(ctypes.c_uint64()), handle, 0)
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    other = cuda.cuIpcOpenMemHandle_v2(ctypes.byref(ctypes.c_uint64()), handle, 1)
    cuda.ok("cuCtxDestroy_v2", own)
    passed_on = cuda.cuIpcGetMemHandle(ctypes.byref(handle), memory)
    size = cuda.attribute(memory, 12)
    cuda.ok("cuIpcCloseMemHandle", memory)
    answer([again == memory, got.raw.decode(), size, lazy, other, passed_on, cuda.leaks()])
    """
    )
    assert in_process(program) == [
        *(True, "ours", N, INVALID_VALUE, INVALID_CONTEXT, INVALID_VALUE),
        {"contexts": 1},
    ]
    assert bytes(cuda.view(memory + 4092, 4)) == b"tail"
    cuda.ok("cuMemFree_v2", memory)


def test_a_handle_cannot_be_opened_in_its_own_process(cuda: Cuda) -> None:
    memory, handle = cuda.made("cuMemAlloc_v2", N), IpcHandle()
    assert cuda.cuIpcGetMemHandle(ctypes.byref(handle), memory + 512) == INVALID_VALUE
    out = ctypes.byref(ctypes.c_uint64())
    assert cuda.cuIpcOpenMemHandle_v2(out, handle, 1) == INVALID_HANDLE
    cuda.ok("cuIpcGetMemHandle", ctypes.byref(handle), memory)
    assert cuda.cuIpcOpenMemHandle_v2(out, handle, 1) == INVALID_CONTEXT
    cuda.ok("cuMemFree_v2", memory)
    with cuda.violating("not opened"):
        assert cuda.cuIpcCloseMemHandle(memory) == INVALID_VALUE


def test_freed_memory_cannot_be_opened(cuda: Cuda) -> None:
    memory = cuda.made("cuMemAlloc_v2", N)
    handle = export(cuda, memory)
    cuda.ok("cuMemFree_v2", memory)
    code, text = in_process(OPEN.format(handle=handle))
    assert code == 1
    assert "cuIpcOpenMemHandle_v2: 1" in text


@pytest.mark.parametrize("freed", [True, False])
def test_opened_memory_fails_after_a_free_and_works_after_the_owners_death(freed: bool) -> None:
    """Work on memory that its owner has freed is a violation; a dead owner's memory stays valid."""
    answer = in_process(f"""
        import subprocess, sys
        owner = subprocess.Popen(
            [sys.executable, "-c", '''
        import ctypes
        from tests.cuda_sim.cuda_library import *
        cuda = Cuda()
        cuda.ok("cuInit", 0)
        cuda.primary()
        memory, handle = cuda.made("cuMemAlloc_v2", 4096), IpcHandle()
        cuda.ok("cuIpcGetMemHandle", ctypes.byref(handle), memory)
        print(bytes(handle).hex(), flush=True)
        input()
        cuda.ok("cuMemFree_v2", memory)
        print(flush=True)
        input()
        '''.replace(chr(10) + " " * 8, chr(10))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        text = owner.stdout.readline().strip()
        cuda.ok("cuInit", 0)
        cuda.primary()
        handle = IpcHandle()
        ctypes.memmove(ctypes.byref(handle), bytes.fromhex(text), 64)
        memory = cuda.made("cuIpcOpenMemHandle_v2", handle, 1)
        if {freed}:
            owner.stdin.write(chr(10))
            owner.stdin.flush()
            owner.stdout.readline()
        else:
            owner.kill()
            owner.wait()
        code = cuda.cuMemcpyHtoD_v2(memory, b"late", 4)
        owner.kill()
        owner.wait()
        answer([code, cuda.violation()])
    """)
    assert answer == (
        [ILLEGAL_ADDRESS, "work on memory of another process, which has freed it"]
        if freed
        else [0, ""]
    )


def test_isolated_processes_cannot_export_memory() -> None:
    program = """
        cuda.ok("cuInit", 0)
        cuda.primary()
        memory, handle = cuda.made("cuMemAlloc_v2", 64), ctypes.create_string_buffer(64)
        answer([cuda.cuIpcGetMemHandle(handle, memory), cuda.attribute(memory, 10)])
    """
    assert in_process(program, cuda_ipc=0) == [NOT_SUPPORTED, 0]
