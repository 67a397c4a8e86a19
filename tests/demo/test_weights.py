"""Tests that the example reads files of gguf as gguf's own reader does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from examples.disaggregated.requirements import SetupError
from examples.disaggregated.weights import ModelFile
from tests.demo import tiny_gguf

VALUES: dict[str, Any] = {
    "uint8": 200,
    "int8": -100,
    "uint16": 60_000,
    "int16": -30_000,
    "uint32": 4_000_000_000,
    "int32": -2_000_000_000,
    "float32": 0.5,
    "bool": True,
    "string": "größer",
    "uint64": 2**63 + 1,
    "int64": -(2**62),
    "float64": 0.1,
    "array": ["a", "", "ßß"],
}
"""Values by the last part of the name of the GGUFWriter method that writes them."""
KINDS = [
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_1,
]


def written(path: Path, architecture: str = "llama", alignment: int | None = None) -> Path:
    writer = GGUFWriter(path, architecture)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for name, value in VALUES.items():
        getattr(writer, f"add_{name}")(f"test.{name}", value)
    writer.add_array("test.numbers", [3, 1, 2])
    random = np.random.default_rng(1)
    for kind in KINDS:
        weight = random.standard_normal((5, 64)).astype(np.float32)
        writer.add_tensor(kind.name, quantize(weight, kind), raw_dtype=kind)
    writer.add_tensor("vector", random.standard_normal(7).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_read_alike(path: Path) -> None:
    found, expected = ModelFile(path), GGUFReader(path)
    for key, field in expected.fields.items():
        if not key.startswith("GGUF."):  # fields that the file has without a key
            assert found.metadata(key) == field.contents()
    for tensor in expected.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        assert found.tensor(tensor.name).tobytes() == weight.tobytes()
        assert found.tensor(tensor.name).shape == weight.shape


@pytest.mark.parametrize("alignment", [None, 128])
def test_every_kind_of_value_and_tensor_is_read(tmp_path: Path, alignment: int | None) -> None:
    path = written(tmp_path / "odd.gguf", alignment=alignment)
    assert ModelFile(path).metadata("test.string") == "größer"
    assert ModelFile(path).metadata("test.array") == ["a", "", "ßß"]
    assert_read_alike(path)


def test_the_tiny_model_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path)
    assert_read_alike(path)


def test_rows_of_several_tensors_are_one_matrix(tmp_path: Path) -> None:
    file = ModelFile(written(tmp_path / "odd.gguf"))
    both = file.tensor("F32", "Q8_0")
    assert both.shape == (10, 64)
    assert both.tobytes() == file.tensor("F32").tobytes() + file.tensor("Q8_0").tobytes()


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    for content in (b"GGUX" + (3).to_bytes(4, "little"), b"GGUF" + (4).to_bytes(4, "little")):
        other.write_bytes(content)
        with pytest.raises(SetupError, match=r"other\.gguf is not a GGUF file of version 2 or 3"):
            ModelFile(other)
    with pytest.raises(SetupError, match="is of architecture 'gpt2', not 'llama'"):
        ModelFile(written(tmp_path / "gpt2.gguf", "gpt2"))
