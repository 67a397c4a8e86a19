"""Read the model from its GGUF file: its shape, its weights, its tokenizer's tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from .requirements import SetupError


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers that fix the model's shape."""

    layers: int
    embedding: int
    heads: int
    kv_heads: int
    head_size: int
    context_length: int
    rope_base: float
    norm_epsilon: float

    @property
    def group(self) -> int:
        """Query heads that share one key/value head (grouped-query attention)."""
        return self.heads // self.kv_heads


class ModelFile:
    """A GGUF file, opened: metadata by key, tensors by name, dequantised when asked for."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.metadata("general.architecture")
        if architecture != "llama":
            raise SetupError(f"{path.name} is of architecture {architecture!r}, not 'llama'")

    def metadata(self, key: str) -> Any:
        """The value under `key`, as a plain Python value (number, string or list)."""
        return self._reader.fields[key].contents()

    @cached_property
    def config(self) -> LlamaConfig:
        heads = self.metadata("llama.attention.head_count")
        embedding = self.metadata("llama.embedding_length")
        return LlamaConfig(
            layers=self.metadata("llama.block_count"),
            embedding=embedding,
            heads=heads,
            kv_heads=self.metadata("llama.attention.head_count_kv"),
            head_size=embedding // heads,
            context_length=self.metadata("llama.context_length"),
            rope_base=self.metadata("llama.rope.freq_base"),
            norm_epsilon=self.metadata("llama.attention.layer_norm_rms_epsilon"),
        )

    def tensor(self, *names: str) -> NDArray[np.float32]:
        """The float32 weight of that name; of several names, their rows in one matrix.

        A matrix has the shape (outputs, inputs), so that stacked rows are several outputs in one
        product.
        """
        stored = [self._tensors[name] for name in names]
        parts = [dequantize(tensor.data, tensor.tensor_type) for tensor in stored]
        return np.concatenate(parts).astype(np.float32, copy=False)
