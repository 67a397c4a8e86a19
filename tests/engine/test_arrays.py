"""Arrays over a cache: its bytes, its shape, and its memory as long as they live."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import CacheDesc, DataType, LLMException
from kvplan.engine.memory import read_tensors, tensor_arrays, write_tensors
from kvplan.execution.memory import HostMemory
from kvplan.tensors.form import numpy_dtype
from tests.support.refusals import refused

from .caches import SLOTS, free_nbytes
from .conftest import POOL


def test_arrays_view_the_memory(registry):
    desc = CacheDesc(2, (3, 5), DataType.DT_FLOAT16)
    given = [np.zeros(desc.shape, np.float16) for _ in range(2)]
    entry = registry.register(desc, given, paged=False)
    arrays = tensor_arrays(desc, entry.memory)
    arrays[1][2, 4] = 1.5
    assert given[1][2, 4] == 1.5
    assert [(a.shape, a.dtype) for a in arrays] == [((3, 5), np.dtype(np.float16))] * 2


@pytest.mark.parametrize("order", "<>")
def test_numbers_are_written_in_any_byte_order(registry, order):
    entry = registry.allocate(desc := CacheDesc(1, (3, 2), DataType.DT_FLOAT), paged=False)
    numbers = np.arange(6).reshape(3, 2)
    write_tensors(desc, entry.memory, [numbers.astype(f"{order}f4")])
    assert (tensor_arrays(desc, entry.memory)[0] == numbers).all()


def test_tensors_of_the_cache_itself_are_read_before_one_is_written(registry):
    entry = registry.allocate(desc := CacheDesc(3, (2, 4), DataType.DT_INT8), paged=False)
    arrays = tensor_arrays(desc, entry.memory)
    for number, array in enumerate(arrays):
        array[:] = [[number], [10 + number]]
    write_tensors(desc, entry.memory, [arrays[2], arrays[0], arrays[1][::-1]])
    assert [array[:, 0].tolist() for array in arrays] == [[2, 12], [0, 10], [11, 1]]


def test_arrays_keep_the_memory(registry):
    arrays = tensor_arrays(SLOTS, registry.allocate(SLOTS, paged=False).memory)
    view = arrays[1][2:].reshape(-1)
    view[:] = 7
    del arrays
    registry.deallocate(1)
    others = [registry.allocate(SLOTS, paged=False) for _ in range(3)]
    for entry in others:
        for array in tensor_arrays(SLOTS, entry.memory):
            array[:] = 1
    assert (view == 7).all()
    before = free_nbytes(registry)
    del view
    assert free_nbytes(registry) > before
    assert free_nbytes(registry) < POOL


def test_read_only_memory_gives_read_only_arrays():
    memory = HostMemory.from_arrays([bytes(8)])
    desc = CacheDesc(1, (1, 8), DataType.DT_INT8)
    with pytest.raises(ValueError, match="read-only"):
        tensor_arrays(desc, memory)[0][:] = 1


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("DT_FLOAT", "float32"),
        ("DT_DOUBLE", "float64"),
        ("DT_BOOL", "bool"),
        ("DT_COMPLEX64", "complex64"),
        ("DT_COMPLEX128", "complex128"),
        ("DT_QINT8", "int8"),
        ("DT_BF16", "uint16"),
        ("DT_FLOAT8_E4M3FN", "uint8"),
        ("DT_COMPLEX32", "uint32"),
        ("DT_INT4", "uint8"),
        ("DT_FLOAT6_E3M2", "uint8"),
    ],
)
def test_arrays_have_the_type_of_the_cache(name, twin):
    assert numpy_dtype(DataType[name]) == np.dtype(twin)


def test_every_type_with_a_width_has_arrays():
    for data_type in DataType:
        try:
            desc = CacheDesc(1, (2, 3, 8), data_type)
        except LLMException:
            continue
        memory = HostMemory.from_arrays([bytearray(desc.nbytes)])
        (array,) = tensor_arrays(desc, memory)
        assert array.nbytes == desc.nbytes
        assert len(array) == 2


def test_a_row_of_packed_elements_is_flat():
    desc = CacheDesc(1, (1, 2, 3, 8), DataType.DT_INT4, batch_dim_index=1)
    (array,) = tensor_arrays(desc, HostMemory.from_arrays([bytearray(desc.nbytes)]))
    assert array.shape == (1, 2, 12)


def test_a_cache_that_is_unregistered_meanwhile_is_neither_read_nor_written(registry):
    """The call has found the cache before another thread unregisters it."""
    given = [np.zeros(SLOTS.shape, numpy_dtype(SLOTS.data_type)) for _ in range(SLOTS.num_tensors)]
    entry = registry.register(SLOTS, given, paged=False)
    registry.unregister(1)
    with refused("LLM_KV_CACHE_NOT_EXIST", "this engine has unregistered cache 1 meanwhile"):
        write_tensors(SLOTS, entry.memory, [item + 1 for item in given])
    with refused("LLM_KV_CACHE_NOT_EXIST", "this engine has unregistered cache 1 meanwhile"):
        read_tensors(SLOTS, entry.memory)
    assert not any(array.any() for array in given)
