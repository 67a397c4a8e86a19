"""A recorded plan executed again, on fresh memory: by the reference, and by native code.

Memory is as large as the caches were, but only what the plan touches takes any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvplan.debug import locate
from kvplan.execution import HostMemory, execute
from kvplan.inspection.units import nbytes_text
from kvplan.planning import reference
from kvplan.planning.plan import PlacedPart as Part
from kvplan.planning.plan import Plan
from kvplan.status import LLMException

Tensors = list[NDArray[np.uint8]]
Execute = Callable[[Plan, HostMemory, HostMemory], None]

MAX_NBYTES: Final = 2 << 30
"""That a plan may move to be executed again: it takes four times as much."""

MAX_TENSORS: Final = 1 << 16
"""Of the caches: each takes memory of its own, however little of it is moved."""

_TILE_NBYTES: Final = 65_521  # a prime: no row's stride is a multiple of it
_TILE: Final = np.tile(np.random.default_rng(1).integers(1, 256, _TILE_NBYTES, dtype=np.uint8), 2)
_WHOLE: Final = 256 << 20  # caches up to this are compared byte for byte
_MARGIN: Final = 4096  # of larger ones this is compared around what is written


@dataclass(frozen=True)
class Replayed:
    """What came of a plan that was executed twice.

    Attributes:
        parted: where the two differ: layer, tensor, block; empty: nowhere.
        skipped: why it was not executed; empty: it was.
    """

    parted: str = ""
    skipped: str = ""

    def __str__(self) -> str:
        return self.parted or (f"skipped: {self.skipped}" if self.skipped else "the same")


def replay(plan: Plan | None, *, within: bool = False, native: Execute = execute) -> Replayed:
    """Execute a plan by the reference executor and by native code, and say where they part.

    The source is filled with bytes that depend on their place; the destination is zero.

    Args:
        plan: of a transfer; None: it had none.
        within: whether source and destination were one cache.
        native: what executes it the second time.
    """
    if plan is None:
        return Replayed(skipped="it failed before there was a plan")
    if plan.nbytes > MAX_NBYTES:
        return Replayed(
            skipped=f"it moves {nbytes_text(plan.nbytes)}, more than {nbytes_text(MAX_NBYTES)}"
        )
    parts = [*plan.placed()]
    tensors = sum(it.part.src.num_tensors + it.part.dst.num_tensors for it in parts)
    if tensors > MAX_TENSORS:
        return Replayed(skipped=f"its caches have {tensors:,} tensors, more than {MAX_TENSORS:,}")
    try:
        src, expected = _memory(parts, within=within)
        reference.execute(plan, src, expected)
        again, found = _memory(parts, within=within)
    except MemoryError:
        return Replayed(skipped="there is not enough memory for caches as large as these")
    try:
        native(plan, HostMemory.from_arrays(again), HostMemory.from_arrays(found))
    except LLMException as error:
        return Replayed(parted=f"native code fails, and the reference does not: {error}")
    if all(_same(*it) for it in zip(expected, found, _written(parts), strict=True)):
        return Replayed()
    return Replayed(parted=str(locate(expected, found, plan, source=None if within else src)))


def _memory(parts: list[Part], *, within: bool) -> tuple[Tensors, Tensors]:
    """Fresh tensors of both sides; of the source what is read is filled."""
    src, dst = [], []
    for it in parts:
        read = [
            np.zeros(it.part.src.tensor_nbytes, np.uint8) for _ in range(it.part.src.num_tensors)
        ]
        src += read
        written = it.part.dst
        dst += (
            read
            if within
            else [np.zeros(written.tensor_nbytes, np.uint8) for _ in range(written.num_tensors)]
        )
        for tensor, start, nbytes in _runs(it, "src"):
            at = (start + 7919 * tensor) % _TILE_NBYTES
            for done in range(0, nbytes, _TILE_NBYTES):
                left = min(_TILE_NBYTES, nbytes - done)
                read[tensor][start + done : start + done + left] = _TILE[at : at + left]
    return src, dst


def _runs(part: Part, name: str) -> Iterator[tuple[int, int, int]]:
    """What a plan reads or writes: tensor, first byte, number of bytes."""
    plan = part.part
    runs = plan.segments.expanded()
    offsets = getattr(runs, f"{name}_offsets").tolist()
    sizes = runs.nbytes.tolist()
    side = 0 if name == "src" else 1
    for index in range(plan.num_tensor_pairs):
        tensor, base = plan.pair(index)[side]
        for offset, nbytes in zip(offsets, sizes, strict=True):
            yield tensor, base + offset, nbytes


def _written(parts: list[Part]) -> list[list[tuple[int, int]]]:
    """What is written of each tensor of the destination: first byte, number of bytes."""
    written: list[list[tuple[int, int]]] = []
    for it in parts:
        of_plan: list[list[tuple[int, int]]] = [[] for _ in range(it.part.dst.num_tensors)]
        for tensor, start, nbytes in _runs(it, "dst"):
            of_plan[tensor].append((start, nbytes))
        written += of_plan
    return written


def _same(expected: NDArray[Any], found: NDArray[Any], written: list[tuple[int, int]]) -> bool:
    if len(expected) <= _WHOLE:
        return bool(np.array_equal(expected, found))
    return all(
        np.array_equal(expected[begin:end], found[begin:end])
        for start, nbytes in written
        for begin, end in [(max(0, start - _MARGIN), start + nbytes + _MARGIN)]
    )
