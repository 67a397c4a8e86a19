"""`python -m benchmarks.cost_model`: what transfers cost here, and how well that is foretold.

Sweeps sizes and counts between two engines, fits the costs to one half of the transfers, and
compares what they predict with the measured medians of the other half.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from benchmarks.filled_peer import Filled, Shape, check_blocks, started
from kvplan import (
    TRANSPORT_COSTS,
    ClusterInfo,
    CostLine,
    KvCacheExtParam,
    LlmDataDist,
    LlmRole,
    Rows,
    Transfer,
    TransportCost,
)
from kvplan.inspection.cost import COEFFICIENTS
from kvplan.inspection.units import nbytes_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan import Plan
    from kvplan.types import Cache

OWN, PEER = 0, 1
SHAPES: Final = (
    Shape(64, 2048, 4 << 10),
    Shape(64, 512, 32 << 10),
    Shape(64, 32, 256 << 10),
)
"""Of the caches: 512 MiB or 1 GiB each, far more than is transferred at once, so that little of it
is in a processor's cache."""
FITTED: Final = tuple(product((2, 16, 64), (1, 6, 16, 64, 256)))
HELD_OUT: Final = tuple(product((4, 32), (2, 12, 40, 128)))
"""Tensors, and blocks of each."""
WITHIN: Final = 0.30
SPEEDS: Final = (0.4, 2.5)
"""By how much the time that everything takes may differ from the one of kvplan's costs."""
PATIENCE_MS: Final = 120_000

OPTIONS: Final[dict[str, dict[str, str]]] = {
    "local": {},
    "local-registered": {},
    "tcp": {"kvplan.transport": "tcp"},
    "ucx": {"kvplan.transport": "ucx", "kvplan.ucx_settings": '{"UCX_TLS": "shm"}'},
}
"""Of both engines, by the name of the costs that are measured."""


class Size(NamedTuple):
    """Of a transfer: the shape of its cache, tensors, blocks of each."""

    shape: int
    tensors: int
    blocks: int


@dataclass
class Sample:
    """Transfers of one size in one direction; each has blocks of its own.

    Attributes:
        plan: of one of them; all cost the same.
        held_out: whether it is kept from the fit.
        move: makes one transfer, and returns its seconds.
        seconds: of each transfer.
    """

    plan: Plan
    held_out: bool
    move: Callable[[], float]
    seconds: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float:
        """The median."""
        return 1e3 * statistics.median(self.seconds)

    def error(self, cost: TransportCost) -> float:
        """How far `cost` is off: 0.1 if it predicts 1.1 times what was measured."""
        return self.plan.estimate(cost).ms / self.ms - 1


def sizes(quick: bool) -> Iterator[tuple[Size, bool]]:
    """All sizes, and whether each is held out."""
    for number, shape in enumerate(SHAPES):
        for grid in (FITTED, HELD_OUT):
            for tensors, blocks in grid:
                # Every second block, so that none are adjacent and merge.
                if blocks <= shape.blocks // 2 and not (quick and tensors * blocks > 300):
                    yield Size(number, tensors, blocks), grid is HELD_OUT


class Sweep:
    """All samples between an engine here and the one that it is linked with."""

    def __init__(self, own: LlmDataDist, peer: Filled, quick: bool) -> None:
        self._own, self._peer = own, peer
        self._random = np.random.default_rng(0)
        self._caches = [self._fetched(number) for number in range(len(SHAPES))]
        self.samples = [
            self._sample(size, held_out, is_push)
            for size, held_out in sizes(quick)
            for is_push in (False, True)
        ]

    def _fetched(self, number: int) -> Cache:
        """A cache with all that the peer's has: a push of it changes nothing there."""
        own, shape = self._own, SHAPES[number]
        cache = own.allocate_blocks_cache(shape.desc)
        blocks = np.arange(shape.blocks)
        own.pull_blocks(self._peer.key(number), cache, blocks, blocks, timeout_ms=PATIENCE_MS)
        check_blocks(own.arrays(cache), PEER, blocks, blocks)
        return cache

    def _sample(self, size: Size, held_out: bool, is_push: bool) -> Sample:
        own, key, cache = self._own, self._peer.key(size.shape), self._caches[size.shape]
        layers = range(size.tensors // 2)
        part = KvCacheExtParam(layers, layers)

        def blocks() -> NDArray[np.int64]:
            half = SHAPES[size.shape].blocks // 2
            return 2 * self._random.permutation(half)[: size.blocks]

        def move() -> float:
            some = blocks()
            began = time.perf_counter()
            if is_push:
                own.push_blocks(cache, key, some, some, part, timeout_ms=PATIENCE_MS)
            else:
                own.pull_blocks(key, cache, some, some, part, timeout_ms=PATIENCE_MS)
            return time.perf_counter() - began

        some = blocks()
        if is_push:
            return Sample(
                own.plan(Transfer(Rows(cache, some), Rows(key, some), layers=part)), held_out, move
            )
        return Sample(
            own.plan(Transfer(Rows(key, some), Rows(cache, some), layers=part)), held_out, move
        )

    def measure(self, rounds: int) -> None:
        """Each sample once a round, each time in another order: disturbance falls on all alike."""
        order = list(self.samples)
        shuffler = random.Random(0)
        for number in range(rounds + 1):
            shuffler.shuffle(order)
            for sample in order:
                seconds = sample.move()
                if number:  # the first round only warms up
                    sample.seconds.append(seconds)

    def check(self) -> None:
        """Assert that both engines still have the same bytes everywhere."""
        for number, (shape, cache) in enumerate(zip(SHAPES, self._caches, strict=True)):
            tensors, blocks = self._own.arrays(cache), np.arange(shape.blocks)
            check_blocks(tensors, PEER, blocks, blocks)
            for tensor in tensors:
                tensor[:] = 0
            key = self._peer.key(number)
            self._own.pull_blocks(key, cache, blocks, blocks, timeout_ms=PATIENCE_MS)
            check_blocks(tensors, PEER, blocks, blocks)


@contextmanager
def sweep(transport: str, quick: bool) -> Iterator[Sweep]:
    """Two engines, linked by `transport`."""
    options = OPTIONS[transport]
    peer = Filled(PEER, SHAPES, transport == "local-registered", options)
    with started([peer]) as [other], LlmDataDist(OWN, LlmRole.DECODER) as own:
        own.initialize(options)
        cluster = ClusterInfo(other.cluster_id, other.address)
        own.link_clusters([cluster], timeout_ms=30_000).raise_for_status()
        yield Sweep(own, peer, quick)


def line_text(line: CostLine) -> str:
    """As it stands in kvplan/inspection/cost.py."""
    given = [f"{name}={getattr(line, name):.4g}" for name in COEFFICIENTS if getattr(line, name)]
    if line.upto_nbytes is not None:
        given.append(f"upto_nbytes={line.upto_nbytes >> 10} << 10")
    return f"CostLine({', '.join(given)})"


HEADER = (
    f"{'operation':12} {'desc':>6} {'bytes':>10} {'measured ms':>12} {'fitted':>8} {'kvplan':>8}"
)


def report(transport: str, samples: list[Sample], every: bool) -> bool:
    """Print what was found; whether the shipped costs, if there are any, held.

    They are judged by their shape, with one factor for how fast the machine is just now: found by
    the sizes that are not held out, and within SPEEDS.
    """
    shipped = TRANSPORT_COSTS[transport]
    known = [(it.plan, it.ms) for it in samples if not it.held_out]
    kept = [it for it in samples if it.held_out]
    fitted = shipped.fit(known)
    print(f"\n{transport}: fitted to {len(known)} sizes, tried on {len(kept)} others")
    for line in fitted.lines:
        print(f"  {line_text(line)}")
    print(HEADER)
    for sample in samples if every else kept:
        plan = sample.plan
        ours = f"{sample.error(shipped):+8.0%}" if shipped.lines else ""
        print(
            f"{plan.operation:12} {plan.num_descriptors:6} {nbytes_text(plan.nbytes):>10} "
            f"{sample.ms:12.3f} {sample.error(fitted):+8.0%} {ours}"
        )
    held, factor = True, 1.0
    costs = [("fitted costs", fitted)]
    if shipped.lines:
        scaled = shipped.scale(known)
        factor = kept[0].plan.estimate(scaled).ms / kept[0].plan.estimate(shipped).ms
        costs += [("kvplan's costs", shipped), (f"kvplan's costs times {factor:.2f}", scaled)]
    for name, cost in costs:
        errors = [abs(it.error(cost)) for it in kept]
        within = sum(it <= WITHIN for it in errors)
        held = within == len(errors)
        print(
            f"{name}: {within} of {len(errors)} within {WITHIN:.0%}; "
            f"median error {statistics.median(errors):.0%}, largest {max(errors):.0%}"
        )
    return held and SPEEDS[0] <= factor <= SPEEDS[1]


def main() -> int:
    """1 where --check was asked and an estimate was more than 30 percent off after scaling."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model", description=__doc__)
    parser.add_argument("transport", nargs="*", default=["local", "local-registered"])
    parser.add_argument("--rounds", type=int, default=15, help="transfers of each size")
    parser.add_argument("--quick", action="store_true", help="small transfers only")
    parser.add_argument("--all", action="store_true", help="print the fitted sizes too")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if one is 30 %% off after scaling"
    )
    asked = parser.parse_args()
    unknown = sorted(set(asked.transport) - set(OPTIONS))
    if unknown:
        parser.error(f"transport {unknown[0]}: expected some of {', '.join(OPTIONS)}")
    held = True
    for transport in asked.transport:
        with sweep(transport, asked.quick) as measured:
            measured.measure(asked.rounds)
            measured.check()
        held &= report(transport, measured.samples, asked.all)
    return int(asked.check and not held)


if __name__ == "__main__":
    sys.exit(main())
