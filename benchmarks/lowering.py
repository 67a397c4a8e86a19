"""Lowering: a million descriptors in a single thread, beside NumPy's broadcasting."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.table import Row, Run, Topic, timed
from kvnative._lower import Descriptors, lower

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOPIC = Topic()
PAIRS, SEGMENTS = 122, 8192  # 61 layers x 2 tensors
COUNT = PAIRS * SEGMENTS
BLOCK_NBYTES = 32 << 10
BUDGET_NS = 3
ROUNDS = 41


@dataclass(frozen=True)
class Recipe:
    """The arguments of lower(), and the same columns by NumPy."""

    src_offsets: NDArray[np.uint64]
    dst_offsets: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    src_bases: NDArray[np.uint64]
    dst_bases: NDArray[np.uint64]

    def lower(self, out: Descriptors | None = None) -> Descriptors:
        return lower(
            self.src_offsets, self.dst_offsets, self.nbytes, self.src_bases, self.dst_bases, out
        )

    def broadcast(self, out: NDArray[np.uint64]) -> None:
        """Write columns dst, src and nbytes into `out` of shape (3, PAIRS, SEGMENTS)."""
        np.add(self.dst_bases[:, None], self.dst_offsets, out=out[0])
        np.add(self.src_bases[:, None], self.src_offsets, out=out[1])
        out[2] = self.nbytes

    def broadcast_fresh(self) -> NDArray[np.uint64]:
        # Not np.empty: malloc would return the pages of the last array.
        memory = mmap.mmap(-1, 3 * COUNT * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        out = np.frombuffer(memory, dtype=np.uint64).reshape(3, PAIRS, SEGMENTS)
        self.broadcast(out)
        return out


def recipe() -> Recipe:
    """Return a recipe with random distinct blocks and scattered tensors."""
    rng = np.random.default_rng(0)
    src, dst = (rng.permutation(2 * SEGMENTS)[:SEGMENTS].astype(np.uint64) for _ in range(2))
    nbytes = np.full(SEGMENTS, BLOCK_NBYTES, dtype=np.uint64)
    bases = rng.integers(0, 2**46, size=(2, PAIRS), dtype=np.uint64)
    return Recipe(src * nbytes, dst * nbytes, nbytes, bases[0], bases[1])


def ns_per_descriptor(seconds: float) -> float:
    return 1e9 * seconds / COUNT


@TOPIC.row("lower_ns_per_descriptor")
def lower_reused(run: Run, name: str) -> Row:
    """Lowering into a reused buffer."""
    work, out = recipe(), Descriptors()
    columns = work.broadcast_fresh()
    ours, numpys = run.medians(
        timed(lambda: work.lower(out=out)), timed(lambda: work.broadcast(columns)), rounds=ROUNDS
    )
    if not np.array_equal(out.dst, columns[0].ravel()):
        raise AssertionError("lowering and NumPy disagree")
    note = f"reused buffer; limit: the budget; NumPy {ns_per_descriptor(numpys):.2f} ns"
    return Row(name, ns_per_descriptor(ours), "ns", BUDGET_NS, note=note)


@TOPIC.row("lower_fresh_ns_per_descriptor")
def lower_fresh(run: Run, name: str) -> Row:
    """Lowering into new memory of the system, including the time to free it."""
    work = recipe()
    ours, numpys = run.medians(timed(work.lower), timed(work.broadcast_fresh), rounds=ROUNDS)
    note = "new memory each time; limit: NumPy in new memory"
    return Row(name, ns_per_descriptor(ours), "ns", ns_per_descriptor(numpys), note=note)


@TOPIC.row("lower_repeats_ns_per_descriptor")
def lower_repeats(run: Run, name: str) -> Row:
    """Lowering of runs of heads and tokens (NHD <-> HND) into a reused buffer."""
    tokens, heads, blocks = 16, 8, SEGMENTS // (16 * 8)
    rng = np.random.default_rng(0)
    block = BLOCK_NBYTES
    src, dst = (rng.permutation(2 * blocks)[:blocks].astype(np.uint64) * block for _ in range(2))
    run_nbytes = block // (tokens * heads)
    src_bases, dst_bases = rng.integers(0, 2**46, size=(2, PAIRS), dtype=np.uint64)
    repeats = (
        (np.full(blocks, heads, np.uint64), run_nbytes, tokens * run_nbytes),
        (np.full(blocks, tokens, np.uint64), heads * run_nbytes, run_nbytes),
    )
    nbytes = np.full(blocks, run_nbytes, np.uint64)
    out = Descriptors()
    (ours,) = run.medians(
        timed(lambda: lower(src, dst, nbytes, src_bases, dst_bases, out, repeats)), rounds=ROUNDS
    )
    if len(out) != COUNT or int(out.dst[1] - out.dst[0]) != run_nbytes:
        raise AssertionError("the repeats were not lowered")
    note = f"{blocks} blocks of {heads} x {tokens} runs, reused buffer; limit: the budget"
    return Row(name, ns_per_descriptor(ours), "ns", BUDGET_NS, note=note)
