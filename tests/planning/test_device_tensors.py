"""Forms of tensors on devices by each protocol; their memory is never read."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvplan import CacheDesc, DataType, Placement
from kvplan.tensors.description import check_present
from kvplan.tensors.dlpack import TensorDevice
from kvplan.tensors.form import read_form
from tests.support.foreign import CudaArray, GpuTensor, TorchTensor, exported_by_numpy
from tests.support.refusals import refused

NHD = "block token head dim"
ARRAY = np.zeros((5, 4, 3, 8), np.float16)
ON_GPU = 0x7F_0000_0000  # never read


@pytest.mark.parametrize(
    "tensor",
    [
        GpuTensor(ARRAY, ON_GPU),
        CudaArray(ARRAY, ON_GPU),
        CudaArray(ARRAY, ON_GPU, version=2),
        TorchTensor(ARRAY, None, "cuda:0", ON_GPU),
    ],
)
def test_every_protocol_gives_the_same_form(tensor: object) -> None:
    form = read_form("it", tensor)
    assert (form.address, form.nbytes, form.read_only) == (ON_GPU, ARRAY.nbytes, False)
    assert form.data_type is DataType.DT_FLOAT16
    assert form.device is not None
    assert form.device.kind == "cuda"
    assert form.device.number in (0, None)
    desc = CacheDesc.from_tensors([tensor], NHD)
    assert (desc.shape, desc.placement) == (ARRAY.shape, Placement.DEVICE)


def test_strides_in_bytes_are_strides_of_elements() -> None:
    heads_first = ARRAY.transpose(0, 2, 1, 3)
    form = read_form("it", CudaArray(heads_first, ON_GPU))
    assert form.strides == tuple(stride // 2 for stride in heads_first.strides)
    assert form.memory_shape == ARRAY.shape


def test_bfloat16_is_two_bytes_without_a_name() -> None:
    """The interface lacks this type: libraries export it as raw bytes."""
    raw = CudaArray(np.zeros(ARRAY.shape, "V2"), ON_GPU)
    desc = CacheDesc.from_tensors([raw], NHD, data_type=DataType.DT_BF16)
    assert desc.data_type is DataType.DT_BF16
    named = GpuTensor(np.zeros(ARRAY.shape, np.uint16), ON_GPU, code=4)
    assert CacheDesc.from_tensors([named], NHD).data_type is DataType.DT_BF16


def test_a_read_only_tensor_has_a_read_only_form() -> None:
    assert read_form("it", GpuTensor(ARRAY, ON_GPU, read_only=True)).read_only
    assert read_form("it", CudaArray(ARRAY, data=(ON_GPU, True))).read_only


class TestSynchronization:
    """Planning reads no memory, so it waits for no stream: producers with streams get -1."""

    @pytest.mark.parametrize("device_type", [2, 10, 13])
    def test_devices_with_streams_get_minus_one(self, device_type: int) -> None:
        tensor = GpuTensor(ARRAY, ON_GPU, device=(device_type, 0))
        read_form("it", tensor)
        assert tensor.streams == [-1]

    @pytest.mark.parametrize("device_type", [1, 3, 11, 12, 14])
    def test_other_devices_get_no_stream(self, device_type: int) -> None:
        tensor = GpuTensor(ARRAY, device=(device_type, 0))
        read_form("it", tensor)
        assert tensor.streams == [None]

    def test_an_older_library_is_asked_without_a_version(self) -> None:
        class Older(GpuTensor):
            def __dlpack__(self, *, stream: int | None = None) -> object:  # type: ignore[override]
                return super().__dlpack__(stream=stream)

        tensor = Older(ARRAY, ON_GPU)
        assert read_form("it", tensor).address == ON_GPU
        assert tensor.streams == [-1]

    def test_jax_takes_each_number_for_a_stream(self) -> None:
        jax_array = type("ArrayImpl", (GpuTensor,), {"__module__": "jaxlib._jax"})
        tensor = jax_array(ARRAY, ON_GPU)
        read_form("it", tensor)
        assert tensor.streams == [None]


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ((2, 5), TensorDevice("cuda", 5, "device cuda:5")),
        ((10, 1), TensorDevice("rocm", 1, "device rocm:1")),
        ((13, 0), TensorDevice("cuda managed", None, "managed memory of CUDA")),
        ((12, 3), TensorDevice("", 3, "device 3 of an extension (DLPack 12)")),
        ((14, 0), TensorDevice("DLPack 14", 0, "DLPack device 14")),
        ((1, 0), None),
        ((3, 0), None),
    ],
)
def test_devices_of_dlpack(device: tuple[int, int], expected: TensorDevice | None) -> None:
    assert read_form("it", GpuTensor(ARRAY, device=device)).device == expected


def test_tensors_of_two_devices_are_refused() -> None:
    first, second = (GpuTensor(ARRAY, ON_GPU, device=(2, number)) for number in range(2))
    with refused("LLM_PARAM_INVALID", r"\[1\] is on device cuda:1, and .*\[0\] on device cuda:0"):
        CacheDesc.from_tensors([first, second], NHD)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 4}, "speaks version 4 of the CUDA array interface; kvplan reads 2 and 3"),
        ({"mask": "an array"}, "has a mask"),
        ({"strides": (8, 2)}, "which is not valid"),
        ({"strides": (192, 48, 16, 3)}, "strides .* in bytes, and elements of 2"),
        ({"data": (-1, False)}, "which is not valid"),
        ({"data": ON_GPU}, f"says data={ON_GPU} in its CUDA array interface"),
        ({"data": (0, False)}, "has no memory"),
        ({"shape": (-1, 4, 3, 8)}, "which is not valid"),
        ({"shape": (0, 4, 3, 8)}, "is empty"),
        ({"shape": (0, 4, 3, 8), "data": (None, False)}, "is empty"),  # as numba has it
        ({"shape": 5}, "says shape=5 in its CUDA array interface, which cannot be read"),
        ({"typestr": "no type"}, "says typestr='no type' in its CUDA array interface"),
        ({"version": None}, "says version=None in its CUDA array interface"),
    ],
    ids=repr,
)
def test_an_impossible_interface_is_refused(changes: dict[str, object], message: str) -> None:
    with refused("LLM_PARAM_INVALID", f"^it.*{message}"):
        check_present(read_form("it", CudaArray(ARRAY, **changes)))


@pytest.mark.parametrize("missing", ["version", "typestr", "data", "shape"])
def test_an_interface_without_a_field_is_refused(missing: str) -> None:
    given = CudaArray(ARRAY)
    del given.__cuda_array_interface__[missing]
    with refused("LLM_PARAM_INVALID", f"^it: CudaArray says no {missing} in its CUDA array int"):
        read_form("it", given)


@pytest.mark.parametrize("error", [RuntimeError, KeyError, OSError, IndexError])
def test_an_error_of_the_library_names_the_tensor(error: type[Exception]) -> None:
    class Failing:
        @property
        def __cuda_array_interface__(self) -> dict[str, object]:
            raise error("it lies")

    class FailingDLPack:
        def __dlpack__(self, **_: object) -> object:
            raise error("it lies")

    for given in (Failing(), FailingDLPack()):
        with refused("LLM_PARAM_INVALID", "^it: Failing.* does not export its memory: .*it lies"):
            read_form("it", given)


def test_a_negative_length_by_dlpack_is_refused() -> None:
    capsule, _, exported = exported_by_numpy(ARRAY, None)
    exported.device_type, exported.shape[0] = 2, -4
    given = SimpleNamespace(__dlpack__=lambda **_: capsule)
    with refused("LLM_PARAM_INVALID", r"it has shape \(-4, .* by DLPack; lengths are in \[0, "):
        read_form("it", given)


def test_references_to_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="references to Python objects"):
        read_form("it", CudaArray(ARRAY, typestr="|O"))
