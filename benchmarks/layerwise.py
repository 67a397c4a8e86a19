"""Layer-wise push: the rest of a transfer after the model has computed its last layer."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.engine_peer import MODEL, MODEL_BLOCK_SIZE, MODEL_BLOCKS, MODEL_LAYERS, model_key
from benchmarks.engines import linked_engine
from benchmarks.table import Row, Run, Topic
from examples.disaggregated.generation import CHUNK
from examples.disaggregated.model import Layer, Llama
from examples.disaggregated.paged_cache import PagedCache
from examples.disaggregated.weights import LlamaConfig
from kvplan import KvCacheExtParam, Rows, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvplan import LlmDataDist
    from kvplan.types import Cache

TOPIC = Topic()
TOKENS = 1024
"""Tokens of the prompt. The last chunk is computed, as in the demo, while the whole is pushed."""
BLOCKS = TOKENS // MODEL_BLOCK_SIZE
HIDDEN, VOCABULARY = 1536, 256
CONFIG = LlamaConfig(
    layers=MODEL_LAYERS,
    embedding=576,
    heads=9,
    kv_heads=3,
    head_size=64,
    context_length=MODEL_BLOCKS * MODEL_BLOCK_SIZE,
    rope_base=1e5,
    norm_epsilon=1e-5,
)


def random_model() -> Llama:
    """Return the demo's model with random weights: the same work in each layer, but no download.

    Its vocabulary is small: the output projection comes after the last layer and is not measured.
    """
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)

    wide = (CONFIG.heads + 2 * CONFIG.kv_heads) * CONFIG.head_size
    layers = [
        Layer(
            attention_norm=np.ones(CONFIG.embedding, np.float32),
            qkv=matrix(wide, CONFIG.embedding),
            attention_output=matrix(CONFIG.embedding, CONFIG.embedding),
            mlp_norm=np.ones(CONFIG.embedding, np.float32),
            gate_up=matrix(2 * HIDDEN, CONFIG.embedding),
            down=matrix(CONFIG.embedding, HIDDEN),
        )
        for _ in range(CONFIG.layers)
    ]
    embedding = matrix(VOCABULARY, CONFIG.embedding)
    return Llama(CONFIG, embedding, layers, np.ones(CONFIG.embedding, np.float32))


@dataclass
class Prefill:
    """A prefill that computes the last chunk of a prompt and pushes the whole prompt.

    Attributes:
        computing: seconds of each forward pass without a push.
        in_ready: seconds of the calls of ready() before the last layer, for each push.
    """

    datadist: LlmDataDist
    cache: Cache
    model: Llama
    tensors: PagedCache
    here: NDArray[np.intp]
    there: NDArray[np.intp]
    ids: NDArray[np.intp]
    computing: list[float] = field(default_factory=list)
    in_ready: list[float] = field(default_factory=list)

    @staticmethod
    def of(run: Run) -> Prefill:
        """Make a prefill with random token ids, scattered blocks and random content."""
        datadist = linked_engine(run)
        cache = datadist.allocate_blocks_cache(MODEL)
        rng = np.random.default_rng(1)
        tensors = datadist.arrays(cache)
        for tensor in tensors:
            tensor[:] = rng.standard_normal(tensor.shape, np.float32)
        here, there = (rng.permutation(MODEL_BLOCKS)[:BLOCKS] for _ in range(2))
        ids = rng.integers(0, VOCABULARY, TOKENS)
        return Prefill(datadist, cache, random_model(), PagedCache(tensors), here, there, ids)

    def push_after(self) -> float:
        """Compute, then push; return the seconds of the push."""
        start = time.perf_counter()
        self._forward(lambda layer: None)
        computed = time.perf_counter()
        self.datadist.push_blocks(self.cache, model_key(1), self.here, self.there)
        done = time.perf_counter()
        self.computing.append(computed - start)
        self._check_pushed()
        return done - computed

    def push_meanwhile(self) -> float:
        """Push each layer once written; return the seconds from the last layer to the last byte."""
        task = self.datadist.layered(
            Transfer(
                Rows(self.cache, self.here),
                Rows(model_key(1), self.there),
                layers=KvCacheExtParam(tensor_num_per_layer=2),
            )
        )
        calls = []

        def written(layer: int) -> None:
            start = time.perf_counter()
            task.ready(layer)
            if layer == MODEL_LAYERS - 1:
                task.wait(timeout_ms=10_000)
            calls.append(time.perf_counter() - start)

        self._forward(written)
        *before, last = calls
        self.in_ready.append(sum(before))
        self._check_pushed()
        return last

    def _forward(self, written: Callable[[int], None]) -> None:
        start = TOKENS - CHUNK
        self.model.forward(self.ids[start:], start, self.tensors, self.here, written)

    def _check_pushed(self) -> None:
        """Pull the pushed blocks, compare every byte, and overwrite them by another push.

        Raises:
            AssertionError: a byte differs.
        """
        unused = np.setdiff1d(np.arange(MODEL_BLOCKS), self.here)[:BLOCKS]
        self.datadist.pull_blocks(model_key(1), self.cache, self.there, unused)
        for tensor in self.tensors.tensors:
            np.testing.assert_array_equal(tensor[unused], tensor[self.here])
            tensor[unused] += 1
        self.datadist.push_blocks(self.cache, model_key(1), unused, self.there)


@TOPIC.row("layerwise_visible_fraction")
def layerwise_visible(run: Run, name: str) -> Row:
    """From ready() of the last layer to the last byte, beside the same push after the compute."""
    prefill = Prefill.of(run)
    visible, blocking = run.medians(prefill.push_meanwhile, prefill.push_after, rounds=9)
    prefill.datadist.deallocate_cache(prefill.cache)
    in_ready, computing = map(statistics.median, (prefill.in_ready, prefill.computing))
    note = (
        f"{TOKENS:,} tokens, {MODEL_LAYERS} layers, {computing:.2f} s of compute on another core; "
        "from the last ready() to the last byte; limit: the push after the compute; "
        f"ready() of the layers before: {1e3 * in_ready:.2f} ms in all"
    )
    # If compute and copies share a core, no copy can be hidden.
    target = 0.10 if len(os.sched_getaffinity(0)) > 1 else None
    return Row(name, 1e3 * visible, "ms", 1e3 * blocking, "at most", target, note)
