"""Objects with impossible metadata of tensors: refused by name, and never read out of bounds."""

import ctypes

import numpy as np
import pytest

from kvplan import CacheDesc
from tests.support.foreign import DLPackTensor, InterfaceOnly, TorchTensor
from tests.support.refusals import refused

ARRAY = np.zeros((4, 8), np.float16)


class ChangedDLPack(DLPackTensor):
    """A DLPack tensor with other fields in its DLTensor."""

    def __init__(self, **fields):
        super().__init__(ARRAY)
        self.fields = fields

    def change(self, exported):
        for name, value in self.fields.items():
            setattr(exported, name, value)


class ChangedTorch(TorchTensor):
    """A torch tensor whose methods return given values, or raise given errors."""

    def __init__(self, **results):
        super().__init__(ARRAY)
        self.results = results
        self.shape = results.get("shape", self.shape)

    def _result(self, name, truth):
        results = self.results.get(name, truth)
        if isinstance(results, Exception):
            raise results
        return results

    def data_ptr(self):
        return self._result("data_ptr", super().data_ptr())

    def stride(self):
        return self._result("stride", super().stride())

    def element_size(self):
        return self._result("element_size", super().element_size())


NO_SHAPE = ctypes.POINTER(ctypes.c_int64)()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ndim": -1}, "has -1 dimensions by DLPack"),
        ({"ndim": 2**31 - 1}, "has 2147483647 dimensions by DLPack"),
        ({"shape": NO_SHAPE}, "has 2 dimensions and no shape by DLPack"),
        ({"byte_offset": 2**64 - 1}, "byte_offset=18446744073709551615, beyond"),
        ({"lanes": 0}, "is empty"),
        ({"bits": 255}, "which is not a DataType"),
    ],
)
def test_an_impossible_capsule_is_refused(fields, message):
    with refused("LLM_PARAM_INVALID", rf"tensors\[0\] .*{message}"):
        CacheDesc.from_tensors([ChangedDLPack(**fields)], None)


def test_a_consumed_capsule_is_refused():
    capsule = ARRAY.__dlpack__()

    class Once:
        def __dlpack__(self, **_):
            return capsule

    CacheDesc.from_tensors([Once()], None)
    CacheDesc.from_tensors([Once()], None)  # checks the capsule without consuming it
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    rename(capsule, b"used_dltensor")  # the mark of a consumer, which also frees the tensor
    try:
        with refused("LLM_PARAM_INVALID", "which is not a DLPack capsule"):
            CacheDesc.from_tensors([Once()], None)
    finally:
        rename(capsule, b"dltensor")


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"stride": (8,)}, "which is not valid"),
        ({"data_ptr": -5}, "which is not valid"),
        ({"data_ptr": 2**64}, "which is not valid"),
        ({"element_size": -2}, "which is not valid"),
        ({"data_ptr": None}, "does not export its memory"),
        ({"stride": (8.5, 1)}, "does not export its memory"),
        ({"shape": ("a", 8)}, "does not export its memory"),
        ({"stride": ValueError("no strides")}, "does not export its memory: no strides"),
        ({"stride": RuntimeError("it is sparse")}, "does not export its memory: it is sparse"),
        ({"element_size": 4}, "which is not a DataType"),
    ],
)
def test_an_impossible_torch_tensor_is_refused(results, message):
    with refused("LLM_PARAM_INVALID", rf"tensors\[0\].*{message}"):
        CacheDesc.from_tensors([ChangedTorch(**results)], None)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (-1,)},
        {"shape": (2**62, 8)},
        {"data": None},
        {"data": (0, False)},
        {"typestr": None},
    ],
    ids=repr,
)
def test_an_interface_that_numpy_refuses_is_refused_by_name(change):
    given = InterfaceOnly(ARRAY)
    changed = {**given.__array_interface__, **change}
    given.__array_interface__ = {
        item: value for item, value in changed.items() if value is not None
    }
    with refused("LLM_PARAM_INVALID", r"tensors\[0\]: .*does not export its memory"):
        CacheDesc.from_tensors([given], None)


def test_memory_that_was_released_is_refused_by_name():
    given = memoryview(bytearray(8))
    given.release()
    with refused("LLM_PARAM_INVALID", r"tensors\[0\]: .*released"):
        CacheDesc.from_tensors([given], None)
