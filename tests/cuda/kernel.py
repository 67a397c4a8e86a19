"""The copy kernel, compiled for the host, with descriptors over memory of this process."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cuda_sim.build import SANITIZE

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "kvnative/src/cuda" / name for name in ("copy.cu", "copy_kernel.h")]
FLAGS = (
    *("-std=c++17", "-O2", "-shared", "-fPIC", "-DKVN_CUDA_HOST", "-Wall", "-Wextra", "-Werror"),
    *("-Wno-unknown-pragmas", f"-I{ROOT / 'kvnative/src'}"),
    *SANITIZE,
)
FEW = 128
PIECE = 4096
LOOK = 256 << 10
WARPS = 8
NEVER = 2**64 - 1
# These differ from the host's addresses, so an address without translation is detected. They are
# multiples of 256, like all device memory.
DST, SRC = 0x7F00_0000_0000, 0x7E00_0000_0000

U64 = ctypes.c_ulonglong


class Control(ctypes.Structure):
    """The struct `kvn_copy_control`."""

    _fields_ = [("begun", ctypes.c_uint), ("stop", ctypes.c_uint), ("reserved", ctypes.c_uint * 14)]


class Work(ctypes.Structure):
    """The struct `kvn_copy_work`."""

    _fields_ = [
        ("control", ctypes.POINTER(Control)),
        ("nbytes_each", U64),
        ("count", ctypes.c_uint),
        ("num_pieces", ctypes.c_uint),
    ]


class Few(ctypes.Structure):
    """The struct `kvn_copy_few`."""

    _fields_ = [
        ("work", Work),
        *((name, U64 * FEW) for name in ("dst", "src", "nbytes")),
        ("first_piece", ctypes.c_uint * FEW),
    ]


class Many(ctypes.Structure):
    """The struct `kvn_copy_many`."""

    _fields_ = [
        ("work", Work),
        *((name, ctypes.POINTER(U64)) for name in ("dst", "src", "nbytes")),
        ("first_piece", ctypes.POINTER(ctypes.c_uint)),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """Compile the kernel unless that was done before, and load it."""
    source = ROOT / "tests/cuda/kernel_host.cc"
    content = b"\0".join(
        [repr(FLAGS).encode(), *(source.read_bytes() for source in (*SOURCES, source))]
    )
    made = ROOT / "build/cuda_kernel" / f"{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not made.exists():
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("needs a C++ compiler (Debian: apt install g++)")
        made.parent.mkdir(parents=True, exist_ok=True)
        partial = made.with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, "-x", "c++", str(source), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        partial.replace(made)
    loaded = ctypes.CDLL(str(made))
    loaded.kvn_host_launch.restype = U64
    return loaded


class Descriptors:
    """Descriptors (dst, src, nbytes), as offsets in the memory of both sides."""

    def __init__(self, rows: Sequence[tuple[int, int, int]]) -> None:
        self.rows = list(rows)
        self.control = Control()

    def expected(self, dst: NDArray[np.uint8], src: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the destination after the copies, computed by NumPy."""
        expected = dst.copy()
        for to, at, nbytes in self.rows:
            expected[to : to + nbytes] = src[at : at + nbytes]
        return expected

    def launch(
        self,
        dst: NDArray[np.uint8],
        src: NDArray[np.uint8],
        *,
        blocks: int,
        few: bool,
        alike: bool = False,
        stop_at: int = NEVER,
    ) -> int:
        """Run the kernel, and return the number of bytes that it has stored.

        Raises:
            AssertionError: the kernel has used bytes outside of all descriptors.
        """
        item = library()
        marks = np.zeros(dst.size, np.uint8), np.zeros(src.size, np.uint8)
        for to, at, nbytes in self.rows:
            marks[0][to : to + nbytes] = 1
            marks[1][at : at + nbytes] = 1
        for is_store, first, memory, marked in ((1, DST, dst, marks[0]), (0, SRC, src, marks[1])):
            item.kvn_host_side(
                is_store,
                U64(first),
                U64(memory.size),
                ctypes.c_void_p(memory.ctypes.data),
                ctypes.c_void_p(marked.ctypes.data),
            )
        refused = U64()
        work = self._few(alike) if few else self._many(alike)
        arguments = (ctypes.byref(work), None) if few else (None, ctypes.byref(work))
        stored = item.kvn_host_launch(*arguments, blocks, U64(stop_at), ctypes.byref(refused))
        assert not refused.value, f"{refused.value:#x} is in no descriptor, or not aligned"
        return int(stored)

    def _work(self, alike: bool) -> tuple[Work, list[list[int]]]:
        count = len(self.rows)
        sizes = [nbytes for _, _, nbytes in self.rows]
        pieces = [-(-nbytes // PIECE) for nbytes in sizes]
        firsts = [sum(pieces[:i]) for i in range(count)]
        assert not alike or len(set(sizes)) <= 1
        work = Work(
            ctypes.pointer(self.control), sizes[0] if alike and sizes else 0, count, sum(pieces)
        )
        columns = [[DST + row[0] for row in self.rows], [SRC + row[1] for row in self.rows]]
        return work, [*columns, *([] if alike else [sizes, firsts])]

    def _few(self, alike: bool) -> Few:
        work, columns = self._work(alike)
        few = Few(work)
        for name, column in zip(("dst", "src", "nbytes", "first_piece"), columns, strict=False):
            getattr(few, name)[: len(column)] = column
        return few

    def _many(self, alike: bool) -> Many:
        work, columns = self._work(alike)
        many = Many(work)
        for name, column in zip(("dst", "src", "nbytes"), columns, strict=False):
            setattr(many, name, (U64 * len(column))(*column))
        if not alike:
            many.first_piece = (ctypes.c_uint * len(columns[3]))(*columns[3])
        return many
