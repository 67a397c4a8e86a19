"""The CUDA driver by ctypes: the work of a program beside kvplan, bare copies, compared bytes."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

_int, _uint, _size = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_pointer, _address = ctypes.c_void_p, ctypes.c_uint64

_CALLS: dict[str, list[Any]] = {
    "cuInit": [_uint],
    "cuDeviceGet": [_pointer, _int],
    "cuDeviceGetName": [ctypes.c_char_p, _int, _int],
    "cuDeviceGetAttribute": [_pointer, _int, _int],
    "cuDriverGetVersion": [_pointer],
    "cuDevicePrimaryCtxRetain": [_pointer, _int],
    "cuDevicePrimaryCtxRelease_v2": [_int],
    "cuCtxSetCurrent": [_pointer],
    "cuMemAlloc_v2": [_pointer, _size],
    "cuMemFree_v2": [_address],
    "cuMemcpyAsync": [_address, _address, _size, _pointer],
    "cuMemsetD8Async": [_address, ctypes.c_uint8, _size, _pointer],
    "cuStreamCreate": [_pointer, _uint],
    "cuStreamDestroy_v2": [_pointer],
    "cuStreamSynchronize": [_pointer],
    "cuStreamBeginCapture_v2": [_pointer, _int],
    "cuStreamEndCapture": [_pointer, _pointer],
    "cuGraphDestroy": [_pointer],
    "cuEventCreate": [_pointer, _uint],
    "cuEventDestroy_v2": [_pointer],
    "cuEventRecord": [_pointer, _pointer],
    "cuEventSynchronize": [_pointer],
    "cuModuleLoadDataEx": [_pointer, ctypes.c_char_p, _uint, _pointer, _pointer],
    "cuModuleUnload": [_pointer],
    "cuModuleGetFunction": [_pointer, _pointer, ctypes.c_char_p],
    "cuLaunchKernel": [_pointer, *[_uint] * 7, _pointer, _pointer, _pointer],
}
SIMULATED = "Simulated"
"""Prefix of the device's name in the simulated driver of the tests."""

_NON_BLOCKING, _NO_TIMING = 1, 2
_GLOBAL = 0  # CUstreamCaptureMode, as torch.cuda.graph captures
_MULTIPROCESSORS = 16

# Each thread reads the clock until its time is over: work that does not touch memory.
_SPIN = b"""
.version 6.3
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 spin_ns)
{
    .reg .pred %p;
    .reg .u64 %rd<4>;
    ld.param.u64 %rd0, [spin_ns];
    mov.u64 %rd1, %globaltimer;
AGAIN:
    mov.u64 %rd2, %globaltimer;
    sub.u64 %rd3, %rd2, %rd1;
    setp.lt.u64 %p, %rd3, %rd0;
    @%p bra AGAIN;
    ret;
}
"""
# Writes to an address that cannot be mapped.
_FAULT = b"""
.version 6.3
.target sm_70
.address_size 64
.visible .entry fault()
{
    .reg .u64 %rd<1>;
    .reg .u32 %r<1>;
    mov.u64 %rd0, 16;
    mov.u32 %r0, 1;
    st.global.u32 [%rd0], %r0;
    ret;
}
"""
_SPIN_NS, _THREADS, _BLOCKS = 10_000, 256, 8  # 2,048 threads fill a multiprocessor


_SHOWN = 8


def difference(found: NDArray[np.uint8], expected: NDArray[np.uint8]) -> str:
    """Describe wrong bytes and their places: missing, late and misplaced bytes look different."""
    import numpy as np

    if found.shape != expected.shape:
        return f"of shape {found.shape}, and not {expected.shape}"
    if np.array_equal(found, expected):
        return ""
    wrong = np.flatnonzero(found.reshape(-1) != expected.reshape(-1))
    first, last = int(wrong[0]), int(wrong[-1])
    here, there = (
        value.reshape(-1)[first : first + _SHOWN].tobytes() for value in (found, expected)
    )
    index = tuple(int(item) for item in np.unravel_index(first, found.shape))
    zeros = int((found.reshape(-1)[wrong] == 0).sum())
    return (
        f"{len(wrong)} of {found.size} bytes are wrong, from {first} {index} to {last}, {zeros} of "
        f"them 0: first {here.hex()} and not {there.hex()}"
    )


class DriverError(Exception):
    """A call of the driver failed."""


class Driver:
    """The driver with a device's primary context, which becomes current on the calling thread.

    Args:
        library: path of the driver's library.
        number: number of the device in this process.

    Raises:
        DriverError: a call failed.

    Attributes:
        stream: a stream that is not ordered with the default stream.
        version: the version of CUDA that the driver supports, such as 12.4.
        computes: True if `compute` runs a kernel; otherwise it sets memory.
    """

    def __init__(self, library: str = "libcuda.so.1", number: int = 0) -> None:
        self._library = ctypes.CDLL(library)
        for name, arguments in _CALLS.items():
            getattr(self._library, name).argtypes = arguments
        self._call("cuInit", 0)
        self._device = self._out(_int, "cuDeviceGet", number)
        model = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", model, len(model), self._device)
        self._context = self._out(_pointer, "cuDevicePrimaryCtxRetain", self._device)
        self.use()
        self.stream = self._out(_pointer, "cuStreamCreate", _NON_BLOCKING)
        version = self._out(_int, "cuDriverGetVersion")
        self.version = f"{version // 1000}.{version % 1000 // 10}"
        self._processors = self._out(_int, "cuDeviceGetAttribute", _MULTIPROCESSORS, self._device)
        self.computes = not model.value.startswith(SIMULATED.encode())
        if self.computes:
            self._module = self._out(_pointer, "cuModuleLoadDataEx", _SPIN, 0, None, None)
            self._spin = self._out(_pointer, "cuModuleGetFunction", self._module, b"spin")
        else:  # the simulated driver runs only kvplan's kernel
            self._scratch = self.allocate(1 << 20)

    def use(self) -> None:
        """Make the context current on this thread."""
        self._call("cuCtxSetCurrent", self._context)

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory like `cudaMalloc`."""
        return self._out(_address, "cuMemAlloc_v2", nbytes)

    def free(self, address: int) -> None:
        """Give it back."""
        self._call("cuMemFree_v2", address)

    def copy(self, dst: int, src: int, nbytes: int, stream: int | None = None) -> None:
        """Copy in one piece, and wait."""
        stream = stream or self.stream
        self._call("cuMemcpyAsync", dst, src, nbytes, stream)
        self._call("cuStreamSynchronize", stream)

    def copy_later(self, dst: int, src: int, nbytes: int) -> None:
        """Queue a copy on `stream`; return at once."""
        self._call("cuMemcpyAsync", dst, src, nbytes, self.stream)

    def write(self, address: int, array: NDArray[np.uint8]) -> None:
        """Write an array to the device."""
        self.copy(address, array.ctypes.data, array.nbytes)

    def read(self, address: int, array: NDArray[np.uint8]) -> None:
        """Fill an array from the device."""
        self.copy(array.ctypes.data, address, array.nbytes)

    def compute(self, microseconds: float) -> None:
        """Queue work of about this time on all multiprocessors; return at once.

        The work is many short blocks of threads, like a model's kernels: other work gets in
        between.
        """
        if not self.computes:
            self._call("cuMemsetD8Async", self._scratch, 1, 1 << 20, self.stream)
            return
        time = ctypes.c_uint64(_SPIN_NS)
        parameters = (_pointer * 1)(ctypes.addressof(time))
        turns = max(1, round(microseconds * 1000 / _SPIN_NS))
        sizes = self._processors * _BLOCKS * turns, 1, 1, _THREADS, 1, 1, 0
        self._call("cuLaunchKernel", self._spin, *sizes, self.stream, parameters, None)

    def fault(self) -> int:
        """Run a kernel that writes to unmapped memory, which ends the context; return the error."""
        module = self._out(_pointer, "cuModuleLoadDataEx", _FAULT, 0, None, None)
        kernel = self._out(_pointer, "cuModuleGetFunction", module, b"fault")
        self._call("cuLaunchKernel", kernel, *[1] * 6, 0, self.stream, None, None)
        return int(self._library.cuStreamSynchronize(self.stream))

    def event(self) -> int:
        """Create an event that was never recorded."""
        return self._out(_pointer, "cuEventCreate", _NO_TIMING)

    def destroy_event(self, event: int) -> None:
        """Give it back."""
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int) -> None:
        """Record an event on `stream`."""
        self._call("cuEventRecord", event, self.stream)

    def wait_event(self, event: int) -> None:
        """Wait for an event."""
        self._call("cuEventSynchronize", event)

    def synchronize(self) -> None:
        """Wait for the work of `stream`."""
        self._call("cuStreamSynchronize", self.stream)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture `stream` into a graph, which is discarded.

        Raises:
            DriverError: at the end: a call in the block has invalidated the capture.
        """
        self._call("cuStreamBeginCapture_v2", self.stream, _GLOBAL)
        try:
            yield
        finally:
            graph = _pointer()
            self._call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
            self._call("cuGraphDestroy", graph)

    def close(self) -> None:
        """Release the context; memory that was not freed stays allocated."""
        if self.computes:
            self._call("cuModuleUnload", self._module)
        else:
            self.free(self._scratch)
        self._call("cuStreamDestroy_v2", self.stream)
        self._call("cuCtxSetCurrent", None)
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise DriverError(f"{name}: {code}")

    def _out(self, kind: Any, name: str, *arguments: Any) -> int:
        out = kind()
        self._call(name, ctypes.byref(out), *arguments)
        return cast("int", out.value or 0)
