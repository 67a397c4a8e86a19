"""A llama in NumPy: one forward pass over new tokens, with the past taken from a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .paged_cache import Blocks, PagedCache
from .weights import LlamaConfig, ModelFile

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; a matrix is (outputs, inputs)."""

    attention_norm: Matrix
    qkv: Matrix  # queries, keys and values in one product
    attention_output: Matrix
    mlp_norm: Matrix
    gate_up: Matrix  # both inputs of SwiGLU in one product
    down: Matrix


class Llama:
    """The model: token ids in, logits of the next token out."""

    def __init__(self, config: LlamaConfig, embedding: Matrix, layers: list[Layer], norm: Matrix) -> None:
        self.config = config
        self._embedding = embedding  # also the output projection: the two are tied
        self._layers = layers
        self._norm = norm
        pairs = np.arange(0, config.head_size, 2) / config.head_size
        self._rope_frequency = config.rope_base**-pairs

    @classmethod
    def from_file(cls, model_file: ModelFile) -> Llama:
        def layer(i: int) -> Layer:
            return Layer(
                *(
                    model_file.tensor(*(f"blk.{i}.{name}.weight" for name in names))
                    for names in (
                        ("attn_norm",),
                        ("attn_q", "attn_k", "attn_v"),
                        ("attn_output",),
                        ("ffn_norm",),
                        ("ffn_gate", "ffn_up"),
                        ("ffn_down",),
                    )
                )
            )

        config = model_file.config
        return cls(
            config,
            embedding=model_file.tensor("token_embd.weight"),
            layers=[layer(i) for i in range(config.layers)],
            norm=model_file.tensor("output_norm.weight"),
        )

    def forward(self, ids: list[int], start: int, cache: PagedCache, block_table: Blocks) -> Matrix:
        """Run `ids`, which stand at positions `start` and up, and return the logits after the last one.

        Reads the keys and values of positions below `start` from `cache` and adds those of `ids` to it.
        """
        config = self.config
        tokens, end = len(ids), start + len(ids)
        positions = np.arange(start, end)
        rotation = self._rotation(positions)
        # Token t sees the tokens at or before its own position.
        hidden_future = np.where(np.arange(end) > positions[:, None], np.float32(-np.inf), np.float32(0))
        query_width = config.heads * config.head_size
        kv_width = config.kv_heads * config.head_size

        x = self._embedding[ids]
        for i, layer in enumerate(self._layers):
            qkv = self._normed(x, layer.attention_norm) @ layer.qkv.T
            queries, keys, values = np.split(qkv, [query_width, query_width + kv_width], axis=-1)
            heads = (tokens, -1, config.head_size)
            cache.write(2 * i, block_table, start, _rotated(keys.reshape(heads), rotation))
            cache.write(2 * i + 1, block_table, start, values.reshape(heads))
            attended = self._attend(
                _rotated(queries.reshape(heads), rotation),
                cache.gather(2 * i, block_table, end),
                cache.gather(2 * i + 1, block_table, end),
                hidden_future,
            )
            x = x + attended @ layer.attention_output.T
            gate, up = np.split(self._normed(x, layer.mlp_norm) @ layer.gate_up.T, 2, axis=-1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.T
        last: Matrix = self._embedding @ self._normed(x[-1], self._norm)
        return last

    def _attend(self, queries: Matrix, keys: Matrix, values: Matrix, mask: Matrix) -> Matrix:
        """Grouped-query attention: (tokens, heads, size) queries over (length, kv_heads, size) keys."""
        config, tokens = self.config, len(queries)
        # (kv_heads, group, tokens, size): the queries of a group meet the same keys.
        grouped = queries.reshape(tokens, config.kv_heads, config.group, -1).transpose(1, 2, 0, 3)
        scores = grouped @ keys.transpose(1, 2, 0)[:, None] / np.float32(np.sqrt(config.head_size)) + mask
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = weights @ values.transpose(1, 0, 2)[:, None]
        attended: Matrix = mixed.transpose(2, 0, 1, 3).reshape(tokens, -1)
        return attended

    def _normed(self, x: Matrix, weight: Matrix) -> Matrix:
        """RMSNorm."""
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.config.norm_epsilon))
        normed: Matrix = x / scale * weight
        return normed

    def _rotation(self, positions: NDArray[Any]) -> NDArray[np.complex64]:
        """exp(i * angle) of every (position, pair of features), with an axis for the heads between."""
        angles = positions[:, None, None] * self._rope_frequency
        return np.exp(1j * angles).astype(np.complex64)


def _rotated(x: Matrix, rotation: NDArray[np.complex64]) -> Matrix:
    """Rotary embedding. GGUF orders the rows of q and k so that neighbours (0, 1), (2, 3), ... rotate
    together; each pair is one complex number, and turning it is one multiplication."""
    turned = np.ascontiguousarray(x).view(np.complex64) * rotation
    return turned.view(np.float32)
