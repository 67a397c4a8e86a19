"""A llama in NumPy: one forward pass over new tokens, the past being in a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .paged_cache import BlockTable, PagedCache
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

    @classmethod
    def from_file(cls, model_file: ModelFile, number: int) -> Layer:
        def weight(*names: str) -> Matrix:
            return model_file.tensor(*(f"blk.{number}.{name}.weight" for name in names))

        return cls(
            attention_norm=weight("attn_norm"),
            qkv=weight("attn_q", "attn_k", "attn_v"),
            attention_output=weight("attn_output"),
            mlp_norm=weight("ffn_norm"),
            gate_up=weight("ffn_gate", "ffn_up"),
            down=weight("ffn_down"),
        )


class Llama:
    """The model: token ids in, logits of the next token out."""

    def __init__(
        self, config: LlamaConfig, embedding: Matrix, layers: Sequence[Layer], norm: Matrix
    ) -> None:
        self.config = config
        self._embedding = embedding  # the output projection too: the two are tied
        self._layers = layers
        self._norm = norm
        self._rope_frequencies = config.rope_base ** (
            -np.arange(0, config.head_size, 2) / config.head_size
        )

    @classmethod
    def from_file(cls, model_file: ModelFile) -> Llama:
        return cls(
            model_file.config,
            embedding=model_file.tensor("token_embd.weight"),
            layers=[Layer.from_file(model_file, i) for i in range(model_file.config.layers)],
            norm=model_file.tensor("output_norm.weight"),
        )

    def forward(
        self,
        ids: Sequence[int],
        start: int,
        cache: PagedCache,
        block_table: BlockTable,
        written: Callable[[int], None] = lambda layer: None,
    ) -> Matrix:
        """Run `ids`, which stand at positions `start` and on; return the logits after the last.

        Reads keys and values of the positions before `start` from `cache`, and adds those of `ids`;
        calls `written` with each layer that has them, before it goes on.
        """
        config = self.config
        tokens, end = len(ids), start + len(ids)
        positions = np.arange(start, end)
        rotation = self._rotation(positions)
        # A token attends to its own position and those before it.
        mask = np.where(np.arange(end) > positions[:, None], -np.inf, 0).astype(np.float32)
        kv_width = config.kv_heads * config.head_size

        x = self._embedding[ids]
        for i, layer in enumerate(self._layers):
            qkv = self._normed(x, layer.attention_norm) @ layer.qkv.T
            parts = np.split(qkv, [config.embedding, config.embedding + kv_width], axis=-1)
            queries, keys, values = (p.reshape(tokens, -1, config.head_size) for p in parts)
            cache.write(2 * i, block_table, start, rotated(keys, rotation))
            cache.write(2 * i + 1, block_table, start, values)
            written(i)
            attended = self._attend(
                rotated(queries, rotation),
                cache.gather(2 * i, block_table, end),
                cache.gather(2 * i + 1, block_table, end),
                mask,
            )
            x = x + attended @ layer.attention_output.T
            gate, up = np.split(self._normed(x, layer.mlp_norm) @ layer.gate_up.T, 2, axis=-1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.T
        logits: Matrix = self._embedding @ self._normed(x[-1], self._norm)
        return logits

    def _attend(self, queries: Matrix, keys: Matrix, values: Matrix, mask: Matrix) -> Matrix:
        """Grouped-query attention.

        queries: (tokens, heads, head_size). keys, values: (length, kv_heads, head_size).
        mask: (tokens, length), added to the scores. Returns (tokens, heads * head_size).
        """
        config, tokens = self.config, len(queries)
        scale = np.float32(config.head_size**-0.5)
        # (kv_heads, group, tokens, head_size): the queries of a group meet the same keys.
        grouped = queries.reshape(tokens, config.kv_heads, config.group, -1).transpose(1, 2, 0, 3)
        scores = grouped @ keys.transpose(1, 2, 0)[:, None] * scale + mask
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = weights @ values.transpose(1, 0, 2)[:, None]
        attended: Matrix = mixed.transpose(2, 0, 1, 3).reshape(tokens, -1)
        return attended

    def _normed(self, x: Matrix, weight: Matrix) -> Matrix:
        """RMSNorm."""
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed: Matrix = x / np.sqrt(mean_square + np.float32(self.config.norm_epsilon)) * weight
        return normed

    def _rotation(self, positions: NDArray[Any]) -> NDArray[np.complex64]:
        """exp(i * angle) of each position and pair of features: (tokens, 1, head_size / 2)."""
        angles = positions[:, None, None] * self._rope_frequencies
        rotation: NDArray[np.complex64] = np.exp(1j * angles).astype(np.complex64)
        return rotation


def rotated(x: Matrix, rotation: NDArray[np.complex64]) -> Matrix:
    """Rotary embedding of `x` (tokens, heads, head_size).

    GGUF stores the rows of q and k so that neighbours (0, 1), (2, 3), ... turn together: each pair
    is a complex number, and turning it is one multiplication.
    """
    pairs = np.ascontiguousarray(x).view(np.complex64)
    return (pairs * rotation).view(np.float32)
