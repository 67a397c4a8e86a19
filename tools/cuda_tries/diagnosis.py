"""A diagnosis of the driver and this host by direct questions: without kvplan, and without NumPy.

It comes first, and says something where all else fails. Each question stands alone. Run as a
program it is the other process of the questions, or holds a context: a driver that no process uses
starts again for each.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.cuda_tries.notes import Notes

_int, _size, _pointer, _address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64
_SYS_PIDFD_OPEN, _SYS_PIDFD_GETFD = 434, 438  # on all processors
_PTRACE_BIT = 19
_NOT_THERE = -1
_MIB = 1 << 20
_WAIT_S = 15

PACKAGES = (
    *("numpy", "msgspec", "pyzmq", "click", "rich", "cython", "setuptools", "pytest"),
    *("torch", "cupy-cuda12x", "cupy-cuda13x", "jax", "numba"),
    *("libucx-cu12", "libucx-cu13", "nixl-cu12", "nixl-cu13"),
)
ATTRIBUTES = {
    "multiprocessors": 16,
    "compute mode": 20,  # 0 default, 2 prohibited, 3 one process at a time
    "copy engines": 40,
    "L2": 38,
    "ECC": 32,
    "time limit of kernels": 17,
    "unified addresses": 41,
    "host memory mapped": 19,
    "host memory registered": 99,
    "with the same address": 91,
    "pageable memory accessed": 88,
    "virtual memory": 102,
    "virtual memory by descriptors": 103,
    "virtual memory by fabric handles": 128,
    "memory pools": 115,
    "handles of memory pools": 119,
    "IPC of events": 125,
    "waits for values": 122,
    "atomics with the host": 86,
    "GPUDirect RDMA": 116,
    "GPUDirect RDMA of virtual memory": 110,
    "dma-buf": 124,
}
"""Attributes of a device, with their numbers for `cuDeviceGetAttribute`."""


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", _int), ("id", _int)]


class Allocation(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", _int),
        ("handle_types", _int),
        ("location", Location),
        ("windows", _pointer),
        ("flags", ctypes.c_uint8 * 8),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", _int)]


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class Refused(Exception):  # noqa: N818
    """A call has failed."""


class Driver:
    """The library; `call` raises what it says."""

    def __init__(self) -> None:
        named = os.environ.get("KVPLAN_CUDA_LIBRARY", "libcuda.so.1")
        path = Path(named, "libcuda.so.1") if Path(named).is_dir() else named
        if not named:
            raise OSError("KVPLAN_CUDA_LIBRARY is empty: no library is used")
        self.library = ctypes.CDLL(str(path))
        self.device = 0

    def code(self, name: str, *arguments: Any) -> int:
        """Return the result of a call; -1 if the library lacks the call."""
        function = getattr(self.library, name, None)
        return _NOT_THERE if function is None else int(function(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        code = self.code(name, *arguments)
        if code == _NOT_THERE:
            raise Refused(f"{name}: this driver has no such call")
        if code:
            raise Refused(f"{name}: {self.name_of(code)}")

    def out(self, kind: Any, name: str, *arguments: Any) -> int:
        """Return the answer of a call whose first argument takes it."""
        made = kind()
        self.call(name, ctypes.byref(made), *arguments)
        return int(made.value or 0)

    def name_of(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self.code("cuGetErrorName", code, ctypes.byref(text)) == 0 and text.value:
            return f"{text.value.decode()} ({code})"
        return f"code {code}"

    def enter(self) -> None:
        """Make the primary context of the first device current."""
        self.call("cuInit", 0)
        self.device = self.out(_int, "cuDeviceGet", 0)
        context = self.out(_pointer, "cuDevicePrimaryCtxRetain", self.device)
        self.call("cuCtxSetCurrent", _pointer(context))

    def leave(self) -> None:
        self.call("cuCtxSetCurrent", None)
        self.call("cuDevicePrimaryCtxRelease_v2", self.device)


def try_diagnosis(notes: Notes) -> None:
    """Note this host, the driver, the device, its memory, and what two processes may share."""
    for name, value in host().items():
        notes.add(name, "says", value)
    notes.add("packages", "says", packages())
    try:
        driver = Driver()
        began = time.monotonic()
        driver.call("cuInit", 0)
    except (OSError, Refused) as error:
        notes.add("the driver", "refused", str(error))
        return
    notes.add("seconds of cuInit", "says", f"{time.monotonic() - began:.2f}")
    version = driver.out(_int, "cuDriverGetVersion")
    notes.add("CUDA of the driver", "says", f"{version // 1000}.{version % 1000 // 10}")
    devices(notes, driver)
    began = time.monotonic()
    driver.enter()
    notes.add("seconds of the context", "says", f"{time.monotonic() - began:.2f}")
    try:
        for name, check in MEMORY.items():
            ask(notes, name, check, driver)
        for name in ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"):
            has = hasattr(driver.library, name)
            notes.add(name, "ok" if has else "refused", "" if has else "not there")
        shared(notes, driver)
    finally:
        driver.leave()


def ask(notes: Notes, step: str, check: Callable[..., str], *arguments: Any) -> None:
    """Note the answer of a check. A refusal here is not a failure of kvplan."""
    try:
        notes.add(step, "ok", check(*arguments))
    except (Refused, OSError, ValueError, subprocess.SubprocessError) as error:
        notes.add(step, "refused", str(error))


# ---- the host


def host() -> dict[str, str]:
    status = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    may_trace = bool(int(status["CapEff"], 16) >> _PTRACE_BIT & 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    smi = "--query-gpu=name,driver_version,memory.used,memory.total,persistence_mode,compute_mode,"
    smi += "mig.mode.current,clocks.sm,clocks.mem,pcie.link.gen.current,pcie.link.width.current"
    return {
        "system": f"{platform.platform()}, {os.cpu_count()} processors, {memory >> 30} GiB",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "driver of the kernel": text_of("/proc/driver/nvidia/version").partition("\n")[0],
        "devices": " ".join(sorted(path.name for path in Path("/dev").glob("nvidia*"))) or "none",
        "nvidia-smi": said("nvidia-smi", smi, "--format=csv,noheader"),
        "CUDA's environment": " ".join(
            f"{key}={value}" for key, value in sorted(os.environ.items()) if "CUDA" in key
        ),
        "user": f"{os.getuid()}, may trace any process: {may_trace}",
        "seccomp, Yama": f"{status.get('Seccomp', '?').strip()}, "
        f"{text_of('/proc/sys/kernel/yama/ptrace_scope')}",
        "bytes of /dev/shm": str(shutil.disk_usage("/dev/shm").free),
        "compiler": said("gcc", "--version").partition("\n")[0],
        "compute-sanitizer": shutil.which("compute-sanitizer") or "none on PATH",
    }


def text_of(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        return f"none ({error.strerror})"


def said(*command: str) -> str:
    """Return what a program prints, if it exists."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return (done.stdout or done.stderr).strip()


def packages() -> str:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    return f"{', '.join(found)}; not there: {', '.join(missing)}"


# ---- devices


def devices(notes: Notes, driver: Driver) -> None:
    count = driver.out(_int, "cuDeviceGetCount")
    for number in range(count):
        ask(notes, f"GPU {number} of {count}", described, driver, number, count)
    ask(notes, "GPU 0 has", attributes, driver)


def described(driver: Driver, number: int, count: int) -> str:
    """Return the name of a device, and the others that it reaches."""
    device = driver.out(_int, "cuDeviceGet", number)
    name = ctypes.create_string_buffer(256)
    driver.call("cuDeviceGetName", name, len(name), device)
    major, minor = (driver.out(_int, "cuDeviceGetAttribute", item, device) for item in (75, 76))
    peers = [
        str(index)
        for index in range(count)
        if index != number and driver.out(_int, "cuDeviceCanAccessPeer", number, index)
    ]
    reaches = f"reaches {' '.join(peers)}" if peers else "reaches no other"
    return f"{name.value.decode()}, compute capability {major}.{minor}, {reaches}"


def attributes(driver: Driver) -> str:
    words = []
    for name, number in ATTRIBUTES.items():
        try:
            words.append(f"{name} {driver.out(_int, 'cuDeviceGetAttribute', number, 0)}")
        except Refused:
            words.append(f"{name} ?")
    return ", ".join(words)


# ---- memory


def free_memory(driver: Driver) -> str:
    free, total = _size(), _size()
    driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return f"{free.value / 2**30:.1f} of {total.value / 2**30:.1f} GiB are free"


POINTER = {
    "type": 2,
    "context": 1,
    "device": 9,
    "managed": 8,
    "number": 7,
    "at": 3,
    "from": 11,
    "bytes": 12,
    "IPC handle": 10,
    "pool": 17,
}
"""Attributes of an address, with their numbers for `cuPointerGetAttributes`: kvplan needs these."""


def said_of(driver: Driver, address: int) -> str:
    """Return what the driver says of memory; addresses are relative to `address`."""
    values = [_address() for _ in POINTER]
    asked = (_int * len(values))(*POINTER.values())
    places = (_pointer * len(values))(*map(ctypes.addressof, values))
    driver.call("cuPointerGetAttributes", len(values), asked, places, _address(address))
    found = {name: value.value for name, value in zip(POINTER, values, strict=True)}
    found["context"], found["pool"] = bool(found["context"]), bool(found["pool"])
    found["at"], found["from"] = found["at"] - address, found["from"] - address
    start, nbytes = _address(), _size()
    code = driver.code(
        "cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(nbytes), _address(address)
    )
    range_ = driver.name_of(code) if code else f"{start.value - address:+} {nbytes.value}"
    return ", ".join(f"{name} {item}" for name, item in found.items()) + f"; address range {range_}"


def allocated(driver: Driver) -> str:
    address = driver.out(_address, "cuMemAlloc_v2", _size(_MIB))
    said = said_of(driver, address)
    driver.call("cuMemFree_v2", _address(address))
    return said


def virtual(driver: Driver) -> str:
    memory = VirtualMemory(driver)
    said = said_of(driver, memory.address)
    memory.close()
    return f"in pieces of {memory.nbytes} bytes; {said}"


def pinned(driver: Driver) -> str:
    memory = driver.out(_pointer, "cuMemHostAlloc", _size(_MIB), 3)  # portable, mapped
    said = said_of(driver, memory)
    driver.call("cuMemFreeHost", _pointer(memory))
    return said


def registered(driver: Driver) -> str:
    with mmap.mmap(-1, _MIB) as memory:
        start = ctypes.c_ubyte.from_buffer(memory)
        at = _pointer(ctypes.addressof(start))
        try:
            driver.call("cuMemHostRegister_v2", at, _size(_MIB), 3)
            said = said_of(driver, ctypes.addressof(start))
            driver.call("cuMemHostUnregister", at)
        finally:
            del start
    return said


MEMORY: dict[str, Callable[[Driver], str]] = {
    "memory": free_memory,
    "cuMemAlloc": allocated,
    "cuMemCreate, to be exported": virtual,
    "cuMemHostAlloc": pinned,
    "cuMemHostRegister": registered,
}


class VirtualMemory:
    """One piece of the first device, mapped; made, or another process's."""

    def __init__(self, driver: Driver, descriptor: int | None = None) -> None:
        self._driver = driver
        where = Location(1, 0)
        wanted = Allocation(1, 1, where)
        self.nbytes = driver.out(_size, "cuMemGetAllocationGranularity", ctypes.byref(wanted), 0)
        if descriptor is None:
            arguments = (_size(self.nbytes), ctypes.byref(wanted), _address(0))
            self.handle = driver.out(_address, "cuMemCreate", *arguments)
        else:
            given = _pointer(descriptor)
            self.handle = driver.out(_address, "cuMemImportFromShareableHandle", given, 1)
        size = _size(self.nbytes)
        self.address = driver.out(
            _address, "cuMemAddressReserve", size, _size(0), _address(0), _address(0)
        )
        at = _address(self.address)
        driver.call("cuMemMap", at, size, _size(0), _address(self.handle), _address(0))
        driver.call("cuMemSetAccess", at, size, ctypes.byref(Access(where, 3)), _size(1))

    def export(self) -> int:
        """Return a file descriptor of the memory."""
        return self._driver.out(
            _int, "cuMemExportToShareableHandle", _address(self.handle), 1, _address(0)
        )

    def close(self) -> None:
        self._driver.call("cuMemUnmap", _address(self.address), _size(self.nbytes))
        self._driver.call("cuMemRelease", _address(self.handle))
        self._driver.call("cuMemAddressFree", _address(self.address), _size(self.nbytes))


# ---- two processes


def shared(notes: Notes, driver: Driver) -> None:
    """Let a child take what this process has, by each of the ways that kvplan uses."""
    word = b"kvplan!\n"
    target = ctypes.create_string_buffer(word, len(word))
    ask(
        notes,
        "a child reads memory of the host",
        other,
        "host",
        os.getpid(),
        ctypes.addressof(target),
    )
    ask(notes, "a child takes a descriptor", other, "descriptor", os.getpid(), sys.stderr.fileno())
    try:
        address = driver.out(_address, "cuMemAlloc_v2", _size(_MIB))
        driver.call("cuMemcpyHtoD_v2", _address(address), target, _size(len(word)))
        handle = IpcHandle()
        driver.call("cuIpcGetMemHandle", ctypes.byref(handle), _address(address))
        ask(notes, "a child reads through an IPC handle", other, "ipc", bytes(handle.bytes).hex())
        driver.call("cuMemFree_v2", _address(address))
    except Refused as error:
        notes.add("IPC handles", "refused", str(error))
    try:
        memory = VirtualMemory(driver)
        driver.call("cuMemcpyHtoD_v2", _address(memory.address), target, _size(len(word)))
        exported = memory.export()
        step = "a child maps exported memory"
        ask(notes, step, other, "virtual", os.getpid(), exported)
        os.close(exported)
        memory.close()
    except Refused as error:
        notes.add("exported memory", "refused", str(error))


def other(what: str, *arguments: object) -> str:
    """Let a process do that."""
    command = [sys.executable, __file__, what, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it exited with {done.returncode}"]
        raise Refused(lines[-1])
    return done.stdout.strip()


def take_descriptor(pid: int, number: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    process = libc.syscall(_SYS_PIDFD_OPEN, pid, 0)
    taken = libc.syscall(_SYS_PIDFD_GETFD, process, number, 0)
    if taken < 0:
        raise Refused(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
    return int(taken)


def read_host(pid: int, address: int) -> bytes:
    class Part(ctypes.Structure):
        _fields_ = [("base", _pointer), ("nbytes", _size)]

    libc = ctypes.CDLL(None, use_errno=True)
    found = ctypes.create_string_buffer(8)
    here, there = Part(ctypes.addressof(found), 8), Part(address, 8)
    if libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != 8:
        raise Refused(f"process_vm_readv: {os.strerror(ctypes.get_errno())}")
    return found.raw


def read_device(driver: Driver, address: int) -> bytes:
    found = ctypes.create_string_buffer(8)
    driver.call("cuMemcpyDtoH_v2", found, _address(address), _size(8))
    return found.raw


def child(what: str, *arguments: str) -> str:
    """Do the part of the other process, and return what it finds."""
    if what == "host":
        return read_host(*map(int, arguments)).decode()
    if what == "descriptor":
        os.close(take_descriptor(*map(int, arguments)))
        return ""
    driver = Driver()
    driver.enter()
    try:
        if what == "hold":
            if not driver.out(_int, "cuDeviceGetAttribute", ATTRIBUTES["compute mode"], 0):
                sys.stdin.read()  # in other modes it would keep all others out
            return ""
        if what == "virtual":
            descriptor = take_descriptor(*map(int, arguments))
            memory = VirtualMemory(driver, descriptor)
            os.close(descriptor)
            found = read_device(driver, memory.address)
            memory.close()
            return found.decode()
        handle = IpcHandle((ctypes.c_ubyte * 64)(*bytes.fromhex(arguments[0])))
        address = driver.out(_address, "cuIpcOpenMemHandle_v2", handle, 1)
        found, said = read_device(driver, address), said_of(driver, address)
        driver.call("cuIpcCloseMemHandle", _address(address))
        return f"{found.decode().strip()} {said}"
    finally:
        driver.leave()


if __name__ == "__main__":
    print(child(*sys.argv[1:]))
