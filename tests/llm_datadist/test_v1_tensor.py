"""Tensor and TensorDesc: what an array becomes, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvplan.llm_datadist import DataType
from kvplan.llm_datadist.v1 import Tensor, TensorDesc

TYPES = {
    np.float32: "FLOAT",
    np.float16: "FLOAT16",
    np.float64: "DOUBLE",
    np.int8: "INT8",
    np.int16: "INT16",
    np.int32: "INT32",
    np.int64: "INT64",
    np.uint8: "UINT8",
    np.uint16: "UINT16",
    np.uint32: "UINT32",
    np.uint64: "UINT64",
    np.bool_: "BOOL",
}


@pytest.mark.parametrize("dtype", TYPES, ids=lambda it: it.__name__)
def test_an_array_keeps_its_type_shape_and_values(dtype: type) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    data_type = DataType[f"DT_{TYPES[dtype]}"]
    for tensor in (Tensor(array), Tensor(array, TensorDesc(data_type, (2, 3)))):
        assert tensor.numpy().dtype == dtype
        assert (tensor.numpy() == array).all()
        assert tensor.numpy().shape == (2, 3)
        assert f"dtype={data_type}, shape=[2, 3]" in str(tensor)


def test_a_tensor_has_memory_of_its_own() -> None:
    array = np.zeros(3, np.int32)
    tensor = Tensor(array)
    array[:] = 7
    assert tensor.numpy().tolist() == [0, 0, 0]
    tensor.numpy()[0] = 1
    assert tensor.numpy().tolist() == [1, 0, 0]
    tensor.numpy(copy=True)[1] = 2
    other = Tensor(tensor)
    other.numpy()[2] = 3
    assert tensor.numpy(True).tolist() == [1, 0, 0]
    assert other.numpy().tolist() == [1, 0, 3]


def test_bfloat16_comes_as_the_bits_of_float16_and_is_seen_as_float32() -> None:
    bits = np.array([[0x3F80, 0xC040], [0x0000, 0x7F80]], np.uint16)
    tensor = Tensor(bits.view(np.float16), TensorDesc(DataType.DT_BF16, [2, 2]))
    assert tensor.numpy().dtype == np.float32
    assert tensor.numpy().tolist() == [[1.0, -3.0], [0.0, float("inf")]]


@pytest.mark.parametrize("array", [np.array([["ab", "c"]]), np.array([[b"ab", b"c"]])])
def test_text_is_copied_or_not_had(array: np.ndarray[Any, Any]) -> None:
    tensor = Tensor(array)
    assert tensor.numpy(True).tolist() == array.tolist()
    assert tensor.numpy(True).dtype == array.dtype
    assert str(TensorDesc(DataType.DT_STRING, [1, 2])) in str(tensor)
    with pytest.raises(RuntimeError, match="copy=False"):
        tensor.numpy()


def test_a_desc_holds_what_it_was_given() -> None:
    desc = TensorDesc(DataType.DT_FLOAT, (1, 2))
    assert (desc.dtype, desc.shape) == (DataType.DT_FLOAT, [1, 2])
    assert str(desc) == "TensorDesc(dtype=DataType.DT_FLOAT, shape=[1, 2])"


@pytest.mark.parametrize(
    ("array", "desc", "why"),
    [
        (np.zeros((2, 3), np.int32), TensorDesc(DataType.DT_INT32, [3, 2]), r"\[2, 3\].*\[3, 2\]"),
        (np.zeros(2, np.int32), TensorDesc(DataType.DT_FLOAT, [2]), "int32.*DT_FLOAT"),
        (np.zeros(2, np.uint16), TensorDesc(DataType.DT_BF16, [2]), "uint16.*DT_BF16"),
        (np.zeros(2, np.complex64), None, "complex64"),
        (np.zeros((2, 2))[:, ::2], None, "C-contiguous"),
    ],
)
def test_an_array_that_does_not_fit_is_refused(
    array: np.ndarray[Any, Any], desc: TensorDesc | None, why: str
) -> None:
    with pytest.raises(RuntimeError, match=why):
        Tensor(array, desc)


def test_arguments_of_another_type_are_refused() -> None:
    desc = TensorDesc(DataType.DT_FLOAT, [1])
    calls = [
        lambda: Tensor([1]),  # type: ignore[arg-type]
        lambda: Tensor(None),  # type: ignore[arg-type]
        lambda: Tensor(5, desc),  # type: ignore[arg-type]
        lambda: Tensor(np.zeros(1), [1]),  # type: ignore[arg-type]
        lambda: Tensor(np.zeros(1)).numpy(1),  # type: ignore[arg-type]
        lambda: TensorDesc(0, [1]),  # type: ignore[arg-type]
        lambda: TensorDesc(DataType.DT_FLOAT, 1),  # type: ignore[arg-type]
        lambda: TensorDesc(DataType.DT_FLOAT, ["1"]),  # type: ignore[list-item]
    ]
    for call in calls:
        with pytest.raises(TypeError):
            call()
