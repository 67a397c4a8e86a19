"""Read the model from its GGUF file: its shape, its weights, its tokenizer's tables."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
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


SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
"""Formats of `struct`."""
ALIGNMENT = 32
"""The alignment of the first tensor in the file, unless general.alignment is another."""


class Cursor:
    """Reads one value after another from a GGUF file of version 2 or 3."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self.position = content, 0

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        read = struct.Struct(f"<{count}{code}")
        self.position += read.size
        return read.unpack_from(self._content, self.position - read.size)

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def text(self) -> str:
        start = self.position + 8
        self.position = start + self.number("Q")
        return self._content[start : self.position].decode()

    def value(self, kind: int) -> Any:
        """Return a number, a string, or a list of them."""
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind != GGUFValueType.ARRAY:
            return self.number(SCALARS[GGUFValueType(kind)])
        kind, count = self.number("I"), self.number("Q")
        if kind in SCALARS:
            return list(self.numbers(SCALARS[GGUFValueType(kind)], count))
        return [self.value(kind) for _ in range(count)]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in its file: the bytes of each row, and their meaning."""

    kind: GGMLQuantizationType
    rows: NDArray[np.uint8]


class ModelFile:
    """A GGUF file, opened: metadata by key, tensors by name, dequantised when asked for.

    gguf's own reader makes an array of each token of the vocabulary, which takes seconds.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = Cursor(content)
        magic, version = cursor.numbers("I", 2)
        if magic != int.from_bytes(b"GGUF", "little") or version not in (2, 3):
            raise SetupError(f"{path.name} is not a GGUF file of version 2 or 3")
        tensor_count, key_count = cursor.numbers("Q", 2)
        self._metadata = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(key_count)}
        architecture = self.metadata("general.architecture")
        if architecture != "llama":
            raise SetupError(f"{path.name} is of architecture {architecture!r}, not 'llama'")

        infos = [
            (
                cursor.text(),
                cursor.numbers("Q", cursor.number("I")),
                GGMLQuantizationType(cursor.number("I")),
                cursor.number("Q"),
            )
            for _ in range(tensor_count)
        ]
        alignment = self._metadata.get("general.alignment", ALIGNMENT)
        first = -(-cursor.position // alignment) * alignment
        self._tensors = {}
        for name, shape, kind, offset in infos:  # the innermost axis is the first of `shape`
            elements, nbytes = GGML_QUANT_SIZES[kind]
            stored = (*shape[:0:-1], shape[0] // elements * nbytes)
            rows = np.frombuffer(content, np.uint8, math.prod(stored), first + offset)
            self._tensors[name] = StoredTensor(kind, rows.reshape(stored))

    def metadata(self, key: str) -> Any:
        """Return the value under `key`, as a plain Python value (number, string or list)."""
        return self._metadata[key]

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
        """Return the float32 weight of that name; of several names, their rows in one matrix.

        A matrix has the shape (outputs, inputs), so that stacked rows are several outputs in one
        product.
        """
        stored = [self._tensors[name] for name in names]
        if len({tensor.kind for tensor in stored}) == 1:  # stack what is small: the stored bytes
            rows = np.concatenate([tensor.rows for tensor in stored])
            return dequantize(rows, stored[0].kind)
        return np.concatenate([dequantize(tensor.rows, tensor.kind) for tensor in stored])
