"""The engines of `tests.soak.requests`: both halves of vLLM's connector, and a pool of blocks.

They stand for the parts of vLLM that the connector depends on: blocks are allocated, computed,
freed, and allocated again to other requests. Free blocks hold `POISON`; a free block with any other
content was written to after it was freed.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.vllm.worker import HEADS, VllmWorker

TOKENS = 32  # per block
POISON = -7.0
LAYERS = (9, 10)
WIDTH = 2 * 32 * TOKENS  # numbers per head in a block

Params = dict[str, Any]


class Wrong(Exception):  # noqa: N818 - what it says of kvplan
    """A violation of what this round checks."""


def computed(layer: int, prompt: Sequence[int], at: int) -> NDArray[np.float32]:
    """Return a model's result for a block of a prompt.

    The result depends on all tokens up to the end of the block.
    """
    known = array("q", prompt[: (at + 1) * TOKENS]).tobytes()
    words = np.frombuffer(blake2b(known + bytes([layer])).digest(), np.uint32) >> 9
    return np.resize(words.astype(np.float32), (HEADS, 2, WIDTH // 2))


class Pooled:
    """An engine that allocates its blocks in random order."""

    def __init__(
        self, name: str, seed: int, blocks: int, *, produces: bool, **options: Any
    ) -> None:
        self.side = VllmWorker(
            name, produces=produces, blocks=blocks, dim=WIDTH // 2 // TOKENS, mode="push", **options
        )
        self.random = Random(seed)
        self.free = [*range(blocks)]
        for layer in LAYERS:
            self.side.packed(layer)[:] = POISON

    def take(self, prompt: Sequence[int]) -> list[int]:
        """Return blocks for a prompt, or an empty list if too few are free."""
        number = -(-len(prompt) // TOKENS)
        if number > len(self.free):
            return []
        self.random.shuffle(self.free)
        taken, self.free = self.free[:number], self.free[number:]
        for layer in LAYERS:
            if not np.all(self.side.packed(layer)[taken] == POISON):
                raise Wrong(f"a free block of {taken} was written to, in layer {layer}")
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        for layer in LAYERS:
            self.side.packed(layer)[[*blocks]] = POISON
        self.free += blocks

    def compute(self, prompt: Sequence[int], blocks: Sequence[int], at: Sequence[int]) -> None:
        """Compute the blocks at these positions of a prompt."""
        for layer in LAYERS:
            for place in at:
                self.side.packed(layer)[blocks[place]] = computed(layer, prompt, place)

    def check(self, name: str, prompt: Sequence[int], blocks: Sequence[int]) -> None:
        """Raise `Wrong` unless the blocks hold the result of the model for this prompt."""
        for layer in LAYERS:
            for at, block in enumerate(blocks):
                if not np.array_equal(self.side.packed(layer)[block], computed(layer, prompt, at)):
                    raise Wrong(f"{name}: block {at} of layer {layer} is of other tokens")

    def leases(self) -> int:
        assert self.side.worker._engine is not None
        return len(self.side.worker._engine.leases())


class Prefilling(Pooled):
    """A producer. Requests that it offers keep their blocks until the connector reports them."""

    def __init__(self, name: str, seed: int, blocks: int, **options: Any) -> None:
        super().__init__(name, seed, blocks, produces=True, **options)
        self.kept: dict[str, list[int]] = {}
        assert self.side.worker.address is not None
        self.address = self.side.worker.address.address

    def prefill(self, name: str, prompt: list[int]) -> Params | None:
        """Compute a prompt; return the consumer's parameters, or None without free blocks."""
        if not (blocks := self.take(prompt)):
            return None
        self.compute(prompt, blocks, range(len(blocks)))
        self.kept[name] = blocks
        return self.side.finish(name, prompt, blocks)

    def begin(self, name: str, prompt: list[int], transfer: str) -> bool:
        """Begin a prompt whose consumer may wait; return False without enough free blocks."""
        if not (blocks := self.take(prompt)):
            return False
        params = {"do_remote_decode": True, "kvplan": {"transfer": transfer}}
        request = self.side.request(name, prompt, params)
        request.num_computed_tokens = 0
        self.kept[name] = blocks
        self.side.scheduler.arrived(request)
        self.computing = request
        return True

    def chunk(self, layers: int = len(LAYERS)) -> bool:
        """Compute a chunk of the current prompt; return True after the last.

        `layers` limits it to the first layers.
        """
        request = self.computing
        blocks, prompt = self.kept[request.request_id], request.prompt_token_ids
        begin = request.num_computed_tokens
        end = min(len(prompt), begin + TOKENS * self.random.randint(1, 12))
        with self._step(request.request_id, end - begin, blocks):
            for layer in LAYERS[:layers]:
                for at in range(begin // TOKENS, -(-end // TOKENS)):
                    self.side.packed(layer)[blocks[at]] = computed(layer, prompt, at)
                self.side.worker.layer_ready(f"model.layers.{layer}.attn")
        request.num_computed_tokens = end
        return end == len(prompt)

    @contextmanager
    def _step(self, name: str, tokens: int, blocks: list[int]) -> Iterator[None]:
        self.side.scheduler.computing({name: tokens}, {name: blocks}.get)
        self.side.worker.prepare(self.side.scheduler.take_step())
        yield
        self.side.worker.computed()

    def preempt(self) -> None:
        """Take the blocks of the current prompt, which is then computed again in other blocks."""
        name, request = self.computing.request_id, self.computing
        self.side.scheduler.preempted([name])
        self.side.step()
        self.give_back(self.kept.pop(name))
        self.kept[name] = self.take(request.prompt_token_ids)
        request.num_computed_tokens = 0

    def end(self, status: str = "FINISHED_LENGTH_CAPPED") -> None:
        """End the current prompt."""
        name = self.computing.request_id
        self.computing.status = SimpleNamespace(name=status)
        held, _ = self.side.scheduler.finished(self.computing, (self.kept[name],))
        self.side.step()
        if not held:
            self.give_back(self.kept.pop(name))

    def poll(self) -> int:
        """Make an empty step; return the number of blocks that are held."""
        self.side.step()
        for name in self.side.worker.results().sent:
            self.give_back(self.kept.pop(name))
        return sum(map(len, self.kept.values()))


@dataclass
class Arrived:
    """A request of a consumer. Its first `hits` tokens are in the prefix cache."""

    request: Any
    hits: int
    blocks: list[int]
    is_aborted: bool = False


class Decoding(Pooled):
    """A consumer that computes what could not be fetched."""

    def __init__(self, name: str, seed: int, blocks: int, **options: Any) -> None:
        super().__init__(name, seed, blocks, produces=False, **options)
        self.queue: list[Arrived] = []
        self.loading: dict[str, Arrived] = {}
        self.ended: list[tuple[str, str, float]] = []

    def submit(self, name: str, prompt: list[int], params: Params, hits: int) -> None:
        request = self.side.request(name, prompt, params)
        self.side.scheduler.arrived(request)
        self.queue.append(Arrived(request, hits * TOKENS, []))

    def abort(self, name: str) -> None:
        """Abort a request. Blocks that are being fetched are kept until the fetch has ended."""
        for arrived in [*self.queue, *self.loading.values()]:
            if arrived.request.request_id == name:
                arrived.request.status = SimpleNamespace(name="FINISHED_ABORTED")
                self.side.scheduler.finished(arrived.request, (arrived.blocks,))
                arrived.is_aborted = True
        if name not in self.loading:
            self.ended.append((name, "aborted", time.monotonic()))
        self.queue = [arrived for arrived in self.queue if not arrived.is_aborted]

    def poll(self) -> list[tuple[str, str, float]]:
        """Make a step; return name, outcome and time of requests that ended since the last call."""
        while self.queue and (blocks := self.take(self.queue[0].request.prompt_token_ids)):
            self._allocate(self.queue.pop(0), blocks)
        self.side.step()
        results = self.side.worker.results()
        for name in results.received:
            arrived = self.loading.pop(name)
            how = self._conclude(arrived, results.failed_blocks & {*arrived.blocks})
            self.ended.append((name, how, time.monotonic()))
            self.give_back(arrived.blocks)
        self.side.scheduler.fetched(results.received)
        ended, self.ended = self.ended, []
        return ended

    def _allocate(self, arrived: Arrived, blocks: list[int]) -> None:
        arrived.blocks, prompt = blocks, arrived.request.prompt_token_ids
        self.compute(prompt, blocks, range(arrived.hits // TOKENS))
        missing = self.side.scheduler.missing_tokens(arrived.request, arrived.hits)
        self.side.scheduler.allocated(arrived.request, (blocks,), missing)
        name = arrived.request.request_id
        if missing:
            self.loading[name] = arrived
        else:  # the parameters are invalid, or no block is missing
            self.ended.append((name, "computed here", time.monotonic()))
            self.give_back(blocks)

    def _conclude(self, arrived: Arrived, failed: set[int]) -> str:
        """Compute exactly the failed blocks; then all blocks must have the right content."""
        name, prompt = arrived.request.request_id, arrived.request.prompt_token_ids
        if arrived.is_aborted:
            return "aborted"
        # Earlier blocks were pushed, or were in the prefix cache.
        first = len(arrived.blocks) - len(failed)
        if failed and (first < arrived.hits // TOKENS or failed != {*arrived.blocks[first:]}):
            raise Wrong(
                f"{name}: {sorted(failed)} of {arrived.blocks} failed; {arrived.hits} were here"
            )
        missing = [at for at, block in enumerate(arrived.blocks) if block in failed]
        self.compute(prompt, arrived.blocks, missing)
        self.check(name, prompt, arrived.blocks)
        return "recomputed" if failed else "fetched"


def names() -> dict[str, Any]:
    return {"Prefilling": Prefilling, "Decoding": Decoding}
