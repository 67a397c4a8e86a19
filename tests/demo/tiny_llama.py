"""A small llama with random weights, and a reference implementation of its attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from examples.disaggregated.model import Layer, Llama
from examples.disaggregated.paged_cache import PagedCache
from examples.disaggregated.weights import LlamaConfig

CONFIG = LlamaConfig(
    layers=3,
    embedding=24,
    heads=6,
    kv_heads=2,
    head_size=4,
    context_length=64,
    rope_base=100.0,
    norm_epsilon=1e-5,
)
VOCABULARY = 50
HIDDEN = 40
BLOCK_SIZE = 4


class TinyLlama:
    """The model and its weights, which the model does not expose."""

    def __init__(self, seed: int, vocabulary: int = VOCABULARY) -> None:
        rng = np.random.default_rng(seed)

        def matrix(*shape: int) -> NDArray[np.float32]:
            return rng.normal(0, 0.4, shape).astype(np.float32)

        config = CONFIG
        self.embedding, self.norm = matrix(vocabulary, config.embedding), matrix(config.embedding)
        self.layers = [
            Layer(
                attention_norm=1 + matrix(config.embedding),
                qkv=matrix(
                    (config.heads + 2 * config.kv_heads) * config.head_size, config.embedding
                ),
                attention_output=matrix(config.embedding, config.embedding),
                mlp_norm=1 + matrix(config.embedding),
                gate_up=matrix(2 * HIDDEN, config.embedding),
                down=matrix(config.embedding, HIDDEN),
            )
            for _ in range(config.layers)
        ]
        self.model = Llama(config, self.embedding, self.layers, self.norm)

    def dense_logits(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """Return the logits after the last id, computed in float64 without cache or head groups."""
        config = CONFIG
        x = self.embedding[list(ids)].astype(np.float64)
        for layer in self.layers:
            q, k, v = np.split(
                norm(x, layer.attention_norm) @ layer.qkv.T.astype(np.float64),
                [
                    config.heads * config.head_size,
                    (config.heads + config.kv_heads) * config.head_size,
                ],
                axis=-1,
            )
            heads = []
            for head in range(config.heads):
                shared = head // (config.heads // config.kv_heads)
                own, other = (
                    slice(h * config.head_size, (h + 1) * config.head_size) for h in (head, shared)
                )
                heads.append(attention(rotate(q[:, own]), rotate(k[:, other]), v[:, other]))
            x = x + np.concatenate(heads, axis=-1) @ layer.attention_output.T
            gate, up = np.split(norm(x, layer.mlp_norm) @ layer.gate_up.T, 2, axis=-1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.T
        return norm(x[-1:], self.norm)[0] @ self.embedding.T


def norm(x: NDArray[np.float64], weight: NDArray[np.float32]) -> NDArray[np.float64]:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + CONFIG.norm_epsilon) * weight


def rotate(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Apply rotary embedding by the rotation matrix of each pair of neighbours."""
    out = np.empty_like(x)
    for position in range(len(x)):
        for pair in range(0, CONFIG.head_size, 2):
            angle = position * CONFIG.rope_base ** (-pair / CONFIG.head_size)
            cos, sin = np.cos(angle), np.sin(angle)
            out[position, pair] = cos * x[position, pair] - sin * x[position, pair + 1]
            out[position, pair + 1] = sin * x[position, pair] + cos * x[position, pair + 1]
    return out


def attention(
    q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the attention of one head, computed one token at a time."""
    out = np.empty_like(q)
    for position in range(len(q)):
        scores = k[: position + 1] @ q[position] / np.sqrt(CONFIG.head_size)
        weights = np.exp(scores - scores.max())
        out[position] = weights / weights.sum() @ v[: position + 1]
    return out


def empty_cache(num_blocks: int, dtype: type = np.float32) -> PagedCache:
    """Return a cache of NaN, so that reads of unwritten elements are detected."""
    shape = (num_blocks, BLOCK_SIZE, CONFIG.kv_heads, CONFIG.head_size)
    return PagedCache([np.full(shape, np.nan, dtype) for _ in range(2 * CONFIG.layers)])
