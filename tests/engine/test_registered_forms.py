"""Types and shapes of arrays, compared with the description of their registration."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import BlocksCacheKey, CacheDesc, DataType, LlmDataDist, LLMException, LlmRole
from kvplan.engine.memory import tensor_arrays
from tests.support.foreign import DLPackTensor, TorchTensor
from tests.support.refusals import refused

SHAPE = (5, 4, 3, 8)
NHD = "block token head dim"


def described(data_type=DataType.DT_FLOAT16, shape=SHAPE, layout=None):
    return CacheDesc(1, shape, data_type, kv_tensor_format=layout)


def registered(registry, desc, tensor):
    """Register a tensor, and return its registered address."""
    entry = registry.register(desc, [tensor], paged=True)
    return entry.cache.tensor_addrs[0]


@pytest.mark.parametrize(
    ("dtype", "data_type"),
    [
        (np.float16, "DT_FLOAT16"),
        (np.uint16, "DT_BF16"),
        (np.uint8, "DT_FLOAT8_E4M3FN"),
        (np.uint8, "DT_FLOAT8_E5M2"),
        (np.uint8, "DT_HIFLOAT8"),
        (np.uint32, "DT_COMPLEX32"),
        (np.int8, "DT_QINT8"),
        ("V2", "DT_FLOAT16"),
    ],
)
def test_a_type_that_fits_is_accepted(registry, dtype, data_type):
    array = np.zeros(SHAPE, dtype)
    assert registered(registry, described(DataType[data_type]), array) == array.ctypes.data


@pytest.mark.parametrize(
    ("dtype", "data_type"),
    [
        (np.int16, "DT_FLOAT16"),
        (np.uint16, "DT_FLOAT16"),
        (np.float16, "DT_BF16"),
        (np.int16, "DT_BF16"),
        (np.int8, "DT_FLOAT8_E4M3FN"),
        (np.float32, "DT_FLOAT16"),
        (">f2", "DT_FLOAT16"),
        ([("k", "u1"), ("v", "u1")], "DT_FLOAT16"),
    ],
)
def test_another_type_is_refused_and_both_are_shown(registry, dtype, data_type):
    array = np.zeros(SHAPE, dtype)
    with refused(
        "LLM_PARAM_INVALID",
        rf"tensors\[0\] is \S+ of shape \(5, 4, 3, 8\); cache_desc says {data_type} of shape "
        r"\(5, 4, 3, 8\); give a view of that type, or of its bytes",
    ):
        registered(registry, described(DataType[data_type]), array)


def test_types_of_other_libraries_count(registry):
    numbers = np.zeros(SHAPE, np.uint16)
    bf16 = described(DataType.DT_BF16)
    for tensor in (TorchTensor(numbers, "bfloat16"), DLPackTensor(numbers, code=4)):
        assert registered(registry, bf16, tensor) == numbers.ctypes.data
        with refused("LLM_PARAM_INVALID", "is bfloat16 .* cache_desc says DT_FLOAT16"):
            registered(registry, described(), tensor)
    for tensor, remedy in (
        (TorchTensor(numbers, "bfloat16", "cuda:0"), "cuda and llm.DeviceId=0"),
        (TorchTensor(numbers, "bfloat16", "npu:3"), "ascend and llm.DeviceId=3"),
        (DLPackTensor(numbers, code=4, device=2), "cuda and llm.DeviceId=0"),
    ):
        with refused(
            "LLM_PARAM_INVALID",
            "is on device .*; it must be in host memory, because the engine has no device: set "
            f"kvplan.accelerator={remedy}",
        ):
            registered(registry, bf16, tensor)
    with refused("LLM_PARAM_INVALID", r"is on DLPack device 8; it must be in host memory \("):
        registered(registry, bf16, DLPackTensor(numbers, code=4, device=8))


def test_a_tensor_without_memory_is_refused(registry):
    class Fake(TorchTensor):
        def data_ptr(self):
            return 0

    with refused("LLM_PARAM_INVALID", r"tensors\[0\] of shape \(5, 4, 3, 8\) has no memory"):
        registered(registry, described(), Fake(np.zeros(SHAPE, np.float16)))


@pytest.mark.parametrize("shape", [(5, 4, 24), (5, 4, 8, 3), (4, 5, 3, 8), (480,)])
def test_another_shape_is_refused(registry, shape):
    with refused("LLM_PARAM_INVALID", r"is float16 of shape .* says DT_FLOAT16 of shape \(5, 4, "):
        registered(registry, described(), np.zeros(shape, np.float16))


def test_dimensions_of_length_1_are_ignored(registry):
    latent = np.zeros((5, 4, 1, 24), np.float16)
    assert registered(registry, described(shape=(5, 4, 1, 24)), latent[:, :, 0])
    mla = described(shape=(5, 4, 24), layout="block token dim")
    assert registered(registry, mla, latent) == latent.ctypes.data


@pytest.mark.parametrize(
    "raw",
    [
        bytearray(960),
        memoryview(bytearray(960)),
        np.zeros(960, np.uint8),
        np.zeros(960, np.int8),
        np.zeros(960, "V1"),
        np.zeros(480, "V2"),
        TorchTensor(np.zeros(960, np.uint8)),
    ],
)
def test_a_row_of_bytes_has_any_type(registry, raw):
    assert registered(registry, described(), raw)
    with refused("LLM_PARAM_INVALID", "has 960 bytes; a tensor of the cache, .* has 1920"):
        registered(registry, described(DataType.DT_FLOAT), raw)


def test_bytes_with_gaps_are_refused(registry):
    with refused("LLM_PARAM_INVALID", "not C-contiguous"):
        registered(registry, described(), np.zeros(1920, np.uint8)[::2])


class TestPermutedViews:
    """A description is of the tensors' order in memory, not of a view."""

    def test_in_the_order_of_the_description(self, registry):
        view = np.zeros((5, 3, 4, 8), np.float16).transpose(0, 2, 1, 3)  # tokens first, as shown
        hnd = described(shape=(5, 3, 4, 8), layout="block head token dim")
        assert registered(registry, hnd, view) == view.ctypes.data
        assert CacheDesc.from_tensors([view], NHD).shape == hnd.shape

    def test_in_another_order(self, registry):
        view = np.zeros((5, 3, 4, 8), np.float16).transpose(0, 2, 1, 3)
        with refused(
            "LLM_PARAM_INVALID",
            r"is float16 of shape \(5, 4, 3, 8\) and strides \(96, 8, 32, 1\) .* says DT_FLOAT16 "
            r"of shape \(5, 4, 3, 8\) \(block token head dim\); in memory its dimensions are "
            r"\(5, 3, 4, 8\), which CacheDesc.from_tensors describes",
        ):
            registered(registry, described(layout=NHD), view)

    def test_with_a_dimension_of_length_1(self, registry):
        view = np.zeros((5, 1, 4, 8), np.float16).transpose(0, 2, 1, 3)
        hnd = described(shape=(5, 1, 4, 8), layout="block head token dim")
        assert registered(registry, hnd, view) == view.ctypes.data

    def test_with_gaps(self, registry):
        both = np.zeros((5, 2, 4, 3, 8), np.float16)
        with refused("LLM_PARAM_INVALID", "rows lie 384 bytes apart, which CacheDesc.from_tensors"):
            registered(registry, described(), both[:, 0])
        with refused("LLM_PARAM_INVALID", "do not lie together: .* 32 bytes apart and have 16"):
            registered(registry, described(), np.zeros((5, 4, 3, 16), np.float16)[..., :8])


def test_packed_elements_are_rows_of_bytes(registry):
    packed = CacheDesc(1, (5, 4, 8), DataType.DT_INT4)
    assert registered(registry, packed, np.zeros((5, 16), np.uint8))
    with refused("LLM_PARAM_INVALID", r"is uint8 of shape \(5, 4, 8\); .* DT_INT4 of shape"):
        registered(registry, packed, np.zeros((5, 4, 8), np.uint8))


def has_width(data_type):
    try:
        return data_type.bits > 0
    except LLMException:
        return False


@pytest.mark.parametrize("data_type", [*filter(has_width, DataType)])
def test_arrays_over_a_cache_can_be_registered_as_it(registry, data_type):
    desc = CacheDesc(2, (2, 3, 8), data_type)
    entry = registry.allocate(desc, paged=True)
    again = registry.register(desc, tensor_arrays(desc, entry.memory), paged=True)
    assert again.cache.tensor_addrs == entry.cache.tensor_addrs


def test_the_calls_of_an_engine_compare_too():
    with LlmDataDist(1, LlmRole.PROMPT) as datadist:
        datadist.initialize()
        wrong = [np.zeros(SHAPE, np.int16)]
        for call in (
            lambda: datadist.register_cache(described(), wrong),
            lambda: datadist.register_blocks_cache(described(), wrong, BlocksCacheKey(1)),
        ):
            with refused("LLM_PARAM_INVALID", "is int16 .* cache_desc says DT_FLOAT16"):
                call()
        tensors = [np.zeros((5, 3, 4, 8), np.float16).transpose(0, 2, 1, 3)]
        desc = CacheDesc.from_tensors(tensors, NHD)
        cache = datadist.register_blocks_cache(desc, tensors, BlocksCacheKey(1))
        datadist.arrays(cache)[0][4, 2, 3] = 7
        assert (tensors[0][4, 3, 2] == 7).all()


def test_tensors_that_share_memory_are_refused(registry):
    desc = CacheDesc(2, (8, 16), DataType.DT_INT8)
    array, longer = np.zeros((8, 16), np.int8), np.zeros((12, 16), np.int8)
    address = array.ctypes.data
    for tensors in ([array, array], [longer[4:], longer[:8]], [address, address]):
        with refused("LLM_PARAM_INVALID", r"tensors\[1\] at .* shares memory with tensors\[0\]"):
            registry.register(desc, tensors, paged=True)
    parts = np.zeros((16, 16), np.int8)
    assert registry.register(desc, [parts[8:], parts[:8]], paged=True)
