"""Layer-wise push: how much of a transfer is left when the model has computed its last layer."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.engine_peer import MODEL, MODEL_BLOCK_SIZE, MODEL_BLOCKS, MODEL_LAYERS, model_key
from benchmarks.engines import linked_engine
from benchmarks.table import Row, Run, Topic
from examples.disaggregated.model import Layer, Llama
from examples.disaggregated.paged_cache import PagedCache, blocks_for
from examples.disaggregated.weights import LlamaConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan import LayerTask, LlmDataDist
    from kvplan.types import Cache

TOPIC = Topic()
TOKENS = 476
"""Of the demo's prompt, in one forward pass: the transfer begins and ends with it."""
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
    """The demo's model with random weights: as much to compute in each layer, nothing to download.

    Its vocabulary is small; the product with it comes after the last layer, and is not measured.
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
    """A prompt that is computed into a paged cache, and pushed; seconds of what was measured."""

    datadist: LlmDataDist
    cache: Cache
    model: Llama
    tensors: PagedCache
    here: NDArray[np.intp]
    there: NDArray[np.intp]
    ids: NDArray[np.intp]
    computing: list[float] = field(default_factory=list)
    computing_and_pushing: list[float] = field(default_factory=list)
    in_ready: list[float] = field(default_factory=list)

    @staticmethod
    def of(run: Run) -> Prefill:
        datadist = linked_engine(run)
        cache = datadist.allocate_blocks_cache(MODEL)
        rng = np.random.default_rng(1)
        blocks = blocks_for(TOKENS, MODEL_BLOCK_SIZE)
        here, there = (rng.permutation(MODEL_BLOCKS)[:blocks] for _ in range(2))
        ids = rng.integers(0, VOCABULARY, TOKENS)
        tensors = PagedCache(datadist.arrays(cache))
        return Prefill(datadist, cache, random_model(), tensors, here, there, ids)

    def push_after(self) -> float:
        """Compute everything, then push everything: seconds of the push."""
        start = time.perf_counter()
        self.model.forward(self.ids, 0, self.tensors, self.here)
        computed = time.perf_counter()
        self.datadist.push_blocks(self.cache, model_key(1), self.here, self.there)
        self.computing.append(computed - start)
        return time.perf_counter() - computed

    def push_meanwhile(self) -> float:
        """Push each layer when it is computed: seconds from the last layer to the last byte."""
        task: LayerTask = self.datadist.push_layers(
            self.cache, model_key(1), src_blocks=self.here, dst_blocks=self.there
        )
        calls = []
        last = 0.0

        def written(layer: int) -> None:
            nonlocal last
            last = time.perf_counter()
            task.ready(layer)
            if layer == MODEL_LAYERS - 1:
                task.wait(10_000)
            calls.append(time.perf_counter() - last)

        start = time.perf_counter()
        self.model.forward(self.ids, 0, self.tensors, self.here, written)
        self.computing_and_pushing.append(time.perf_counter() - start)
        self.in_ready.append(sum(calls[:-1]))
        return calls[-1]

    def check_pushed(self) -> None:
        """Pull what was pushed, and compare every byte; then push zeros over it.

        Raises:
            AssertionError: something else lies there.
        """
        unused = np.setdiff1d(np.arange(MODEL_BLOCKS), self.here)[: len(self.here)]
        self.datadist.pull_blocks(model_key(1), self.cache, self.there, unused)
        for tensor in self.tensors.tensors:
            assert tensor[self.here].any()
            np.testing.assert_array_equal(tensor[unused], tensor[self.here])
            tensor[unused] = 0
        self.datadist.push_blocks(self.cache, model_key(1), unused, self.there)


@TOPIC.row("layerwise_visible_fraction")
def layerwise_visible(run: Run, name: str) -> Row:
    """What a push costs that goes on while the model computes, beside the same push afterwards."""
    prefill = Prefill.of(run)
    visible, blocking = run.medians(prefill.push_meanwhile, prefill.push_after, rounds=9)
    prefill.datadist.deallocate_cache(prefill.cache)
    print(prefill.in_ready, prefill.computing, prefill.computing_and_pushing)
    note = "x"
    return Row(name, 1e3 * visible, "ms", 1e3 * blocking, "at most", 0.15, note)
