"""What the machine does without kvplan: copies, reads of another process, and a plain socket."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvnative.cores import usable_cores
from kvplan.cli.measuring.peer_process import COUNT_NBYTES
from kvplan.cli.measuring.samples import Sample
from kvplan.status import LLMException

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan.cli.measuring.pair import Pair


class _Span(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def memory(nbytes: int) -> NDArray[np.uint8]:
    """Bytes whose pages are there."""
    return np.ones(nbytes, np.uint8)


@contextmanager
def copies(nbytes: int) -> Iterator[dict[int, Sample]]:
    """`memcpy` of that many bytes, by number of threads: one, and as many as there are cores."""
    source, target = memory(nbytes), memory(nbytes)
    cores = usable_cores()
    with ThreadPoolExecutor(cores) as pool:
        yield {it: _copy(source, target, it, pool) for it in sorted({1, cores})}


def _copy(
    source: NDArray[np.uint8], target: NDArray[np.uint8], threads: int, pool: ThreadPoolExecutor
) -> Sample:
    edges = np.linspace(0, source.nbytes, threads + 1, dtype=np.int64).tolist()
    parts = [
        (int(target.ctypes.data) + start, int(source.ctypes.data) + start, end - start)
        for start, end in pairwise(edges)
    ]

    def move() -> float:
        began = time.perf_counter()
        if threads == 1:
            ctypes.memmove(*parts[0])
        else:
            wait([pool.submit(ctypes.memmove, *part) for part in parts])
        return time.perf_counter() - began

    return Sample(move)


def process_reads(pair: Pair, nbytes: int) -> Sample:
    """`process_vm_readv` of the peer's memory, in one call."""
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t
    target = memory(nbytes)
    there = _Span(pair.plain_address, nbytes)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)

    def move() -> float:
        here = _Span(int(target.ctypes.data), nbytes)  # and so the memory stays
        began = time.perf_counter()
        count = read(pair.pid, ctypes.byref(here), one, ctypes.byref(there), one, none)
        took = time.perf_counter() - began
        if count != nbytes:
            reason = os.strerror(ctypes.get_errno()) if count < 0 else f"{count} bytes came"
            raise LLMException(f"process_vm_readv of {nbytes} bytes: {reason}")
        return took

    return Sample(move)


@contextmanager
def socket_reads(pair: Pair, sizes: tuple[int, ...]) -> Iterator[list[Sample]]:
    """A request and its reply of that many bytes, over one connection of the loopback."""
    target = memoryview(bytearray(memory(max(sizes))))
    with socket.create_connection(("127.0.0.1", pair.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield [Sample(_ask(connection, target[:nbytes])) for nbytes in sizes]


def _ask(connection: socket.socket, target: memoryview) -> Callable[[], float]:
    def move() -> float:
        began = time.perf_counter()
        connection.sendall(len(target).to_bytes(COUNT_NBYTES))
        came = 0
        while came < len(target):
            count = connection.recv_into(target[came:])
            if not count:
                raise LLMException("the other process has ended the connection")
            came += count
        return time.perf_counter() - began

    return move
