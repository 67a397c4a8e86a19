"""Workers of an engine with context parallelism, placed and filled as vLLM does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan.vllm.options import ConnectorOptions
from kvplan.vllm.scheduler import ConnectorScheduler
from kvplan.vllm.worker import ConnectorWorker, LayerGroup, Model, place_of
from tests.vllm.worker import CpuTensor, VllmWorker

LAYERS, BLOCKS, DIM = 2, 12, 2


class Sizes(NamedTuple):
    """The parallelism of an engine, in vLLM's words; `heads` 0 stands for MLA."""

    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    interleave: int = 1
    block: int = 8  # tokens at one rank
    heads: int = 0

    def workers(self) -> list[tuple[int, int]]:
        """Return the ranks of tensor and of prefill context parallelism of each worker."""
        return [(tp, pcp) for pcp in range(self.pcp) for tp in range(self.tp)]

    def slot(self, tp: int, pcp: int, blocks: Sequence[int], token: int) -> tuple[int, int] | None:
        """Return block and position where a worker keeps a token, as vLLM's slot mapping does."""
        virtual, offset = divmod(token, self.block * self.dcp)
        if offset // self.interleave % self.dcp != (tp * self.pcp + pcp) % self.dcp:
            return None
        rounds = offset // (self.dcp * self.interleave)
        return blocks[virtual], rounds * self.interleave + offset % self.interleave

    def expected(self, tp: int, pcp: int, blocks: Sequence[int], tokens: range) -> NDArray[Any]:
        """Return a worker's cache (layer, block, head, token, content) with these tokens only."""
        mine = [0]
        if self.heads:
            each = max(1, self.heads // self.tp)
            mine = [tp * self.heads // self.tp + number for number in range(each)]
        array = np.zeros((LAYERS, BLOCKS, len(mine), self.block, DIM), np.float32)
        for token in tokens:
            if (slot := self.slot(tp, pcp, blocks, token)) is not None:
                for layer in range(LAYERS):
                    for at, head in enumerate(mine):
                        array[layer, slot[0], at, slot[1]] = 1 + token + 100 * head + 1000 * layer
        return array


class Workers:
    """All workers of an engine, and its scheduler."""

    request = VllmWorker.request

    def __init__(self, name: str, sizes: Sizes, **options: Any) -> None:
        self.sizes, heads = sizes, max(1, sizes.heads)
        produces = name == "prefill"
        self.scheduler = ConnectorScheduler(name)
        self.workers: list[ConnectorWorker] = []
        self.arrays: list[NDArray[Any]] = []
        addresses = {}
        for number, (tp, pcp) in enumerate(sizes.workers()):
            place = place_of(
                (tp, sizes.tp), (pcp, sizes.pcp), (sizes.dcp, sizes.interleave), num_heads=heads
            )
            names = tuple(f"model.layers.{layer}.attn" for layer in range(LAYERS))
            group = LayerGroup(names, sizes.block * sizes.dcp)
            model = Model("tiny", heads, place, number, BLOCKS, (group,), produces, not produces)
            worker = ConnectorWorker(self.scheduler.instance, model, ConnectorOptions.of(options))
            array = np.zeros_like(sizes.expected(tp, pcp, [0], range(0)))
            layers = array if sizes.heads else array[:, :, 0]
            self.workers.append(worker)
            self.arrays.append(array)
            worker.register(dict(zip(names, map(CpuTensor, layers), strict=True)))
            if (address := worker.address) is not None:  # by the key that vLLM gives it
                rank = tp + (pcp * sizes.tp if sizes.dcp > 1 else 0)
                assert (0, rank) not in addresses
                addresses[0, rank] = address
        self.scheduler.set_workers(addresses)

    def finish(self, name: str, prompt: list[int], blocks: list[int]) -> dict[str, Any]:
        """Let a request finish, and return the parameters that travel with it."""
        for (tp, pcp), array in zip(self.sizes.workers(), self.arrays, strict=True):
            array[:] = self.sizes.expected(tp, pcp, blocks, range(len(prompt)))
        request = self.request(name, prompt, {"do_remote_decode": True})  # type: ignore[misc]
        self.scheduler.arrived(request)
        _, params = self.scheduler.finished(request, (blocks,))
        assert params is not None
        self.step()
        return params

    def fetch(self, request: Any, blocks: list[int], computed: int) -> None:
        """Let a request arrive with some local tokens, and give it blocks."""
        self.scheduler.arrived(request)
        missing = self.scheduler.missing_tokens(request, computed)
        self.scheduler.allocated(request, (blocks,), missing)
        self.step()

    def step(self) -> None:
        step = self.scheduler.take_step()
        for worker in self.workers:
            worker.prepare(step)
            worker.begin(step)

    def results(self) -> list[tuple[set[str], set[str], set[int]]]:
        """Wait for results, and return each worker's: sent, received, failed blocks."""
        reports = []
        for worker in self.workers:
            while not ((found := worker.results()).sent or found.received):
                assert worker.exchange.wait(60_000)
            reports.append((found.sent, found.received, found.failed_blocks))
        return reports

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
