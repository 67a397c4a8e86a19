"""The comparison of moved bytes with their source, after a transfer."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvnative._backend import KVN_OK
from kvnative._extents import first_different
from kvnative._lower import Descriptors
from kvnative._report import Report
from kvplan.execution.memory import HostMemory, TensorMemory
from kvplan.execution.task import status_code_of
from kvplan.planning.plan import Plan
from kvplan.status import LLMException, unsupported

SCRATCH_NBYTES: Final = 4 << 20
"""Bytes of host memory that one verification reads into."""

_SAMPLE: Final = re.compile("sample:1/([1-9][0-9]{0,5})")

_Column = NDArray[np.uint64]


def verify_every(option: str) -> int:
    """Return the interval of compared descriptors that an option gives; 0: none."""
    if option in ("off", "all"):
        return int(option == "all")
    if (found := _SAMPLE.fullmatch(option)) is None:
        raise ValueError(option)
    return int(found[1])


def check_verifiable(src: TensorMemory, dst: TensorMemory) -> None:
    """Refuse memory that cannot be compared here: LLM_FEATURE_NOT_ENABLED."""
    if src.on_device or dst.on_device:
        raise unsupported(
            "verify: memory of a device cannot be compared; only host caches can be verified"
        )


def verify(
    plan: Plan,
    descriptors: Descriptors,
    src: TensorMemory,
    dst: TensorMemory,
    scratch: HostMemory,
    read: Callable[[Descriptors, float | None], Report],
    every: int,
    timeout_ms: float | None,
) -> None:
    """Compare every `every`-th descriptor of an executed plan, from a random one on.

    The side in another process, otherwise dst, is read again into `scratch`, a part at a time.
    """
    deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
    chosen = np.arange(random.randrange(every), descriptors.count, every)
    remote, local = descriptors.src, descriptors.dst
    if src.in_process:
        remote, local = local, remote
    base = scratch.addresses[0]
    for index, at, nbytes in _batches(chosen, descriptors.nbytes):
        here = base + np.concatenate(([0], np.cumsum(nbytes)[:-1])).astype(np.uint64)
        left = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
        report = read(Descriptors.from_columns(here, remote[index] + at, nbytes), left)
        for memory in (src, dst):  # must still be the memory that was moved
            memory.check()
        if report.status != KVN_OK:
            raise LLMException(
                f"verify: {report.message}", status_code=status_code_of(report.status)
            )
        found = first_different(here, local[index] + at, nbytes)
        if found >= 0:
            # The peer may have reused its mapped memory meanwhile.
            for memory in (src, dst):
                memory.check()
            raise LLMException(
                f"verify: {plan.origin(int(index[found]))} is not the same on both sides: it was "
                "moved wrongly, or written again meanwhile; do not use dst",
            )


def _batches(chosen: NDArray[np.int64], nbytes: _Column) -> Iterator[tuple[_Column, ...]]:
    """Yield descriptors in pieces that fit: index, first byte and length of each piece."""
    pieces: list[tuple[int, int, int]] = []
    room = SCRATCH_NBYTES
    for index in chosen.tolist():
        first, left = 0, int(nbytes[index])
        while left:
            part = min(left, room)
            pieces.append((index, first, part))
            first, left, room = first + part, left - part, room - part
            if not room:
                yield _columns(pieces)
                pieces, room = [], SCRATCH_NBYTES
    if pieces:
        yield _columns(pieces)


def _columns(pieces: list[tuple[int, int, int]]) -> tuple[_Column, ...]:
    return tuple(np.array(column, dtype=np.uint64) for column in zip(*pieces, strict=True))
