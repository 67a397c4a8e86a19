"""Descriptions of caches from their tensors, of any library."""

import sys

import numpy as np
import pytest

from kvplan import CacheDesc, CacheLayout, DataType, Placement, Shard
from tests.support.foreign import DLPackTensor, InterfaceOnly, TorchTensor, as_buffer
from tests.support.refusals import refused

NHD = "block token head dim"
SHAPE = (5, 4, 3, 8)
"""Axes: blocks, tokens, heads, elements of a head."""


def array(dtype=np.float32):
    return np.zeros(SHAPE, dtype)


def test_a_list_of_arrays_is_a_cache():
    desc = CacheDesc.from_tensors([array(np.float16) for _ in range(6)], NHD)
    assert desc == CacheDesc(
        6, SHAPE, DataType.DT_FLOAT16, Placement.HOST, kv_tensor_format="block token head dim"
    )
    assert (desc.batch_dim_index, desc.seq_len_dim_index) == (0, 1)


@pytest.mark.parametrize(
    "library", [lambda value: value, InterfaceOnly, as_buffer, DLPackTensor, TorchTensor]
)
def test_every_library_gives_the_same_description(library):
    whole = CacheDesc.from_tensors([library(array())], NHD)
    assert whole == CacheDesc(
        1, (5, 4, 3, 8), DataType.DT_FLOAT, Placement.HOST, kv_tensor_format=NHD
    )


@pytest.mark.parametrize("library", [lambda value: value, InterfaceOnly, DLPackTensor, TorchTensor])
def test_a_permuted_view_is_described_as_it_lies_in_memory(library):
    stored = np.zeros((5, 3, 4, 8), np.float32)  # heads outside of tokens
    desc = CacheDesc.from_tensors([library(stored.transpose(0, 2, 1, 3))], NHD)
    assert desc.shape == (5, 3, 4, 8)
    assert str(desc.layout) == "block head token dim"
    assert desc == CacheDesc.from_tensors([library(stored)], "HND")
    assert (desc.batch_dim_index, desc.seq_len_dim_index) == (0, 2)


def test_keys_and_values_outside_of_blocks():
    stored = np.zeros((2, 5, 4, 3, 8), np.float16)
    desc = CacheDesc.from_tensors([stored.swapaxes(0, 1)], "block kv token head dim")
    assert desc.shape == (2, 5, 4, 3, 8)
    assert str(desc.layout) == "kv block token head dim"
    assert desc.batch_size == 5


@pytest.mark.parametrize("axes", [np.s_[:, None], np.s_[:, :, None]])
@pytest.mark.parametrize("layout", [NHD, None])
def test_an_axis_that_numpy_adds_stays_in_its_place(axes, layout):
    added = np.zeros((5, 4, 8), np.float32)[axes]
    assert 0 in added.strides
    desc = CacheDesc.from_tensors([added], layout)
    assert (desc.shape, desc.kv_tensor_format) == (added.shape, layout)


def test_strides_of_a_dimension_of_length_1_are_ignored():
    odd = np.lib.stride_tricks.as_strided(array()[:, :, :1].copy(), (5, 4, 1, 8), (128, 32, 4, 4))
    assert str(CacheDesc.from_tensors([odd], NHD).layout) == NHD
    both = [odd, np.zeros((5, 4, 1, 8), np.float32)]
    assert CacheDesc.from_tensors(both, NHD).num_tensors == 2


@pytest.mark.parametrize(
    ("tensor", "data_type"),
    [
        (array(np.float64), "DT_DOUBLE"),
        (array(np.int8), "DT_INT8"),
        (array(bool), "DT_BOOL"),
        (TorchTensor(array(np.uint16), "bfloat16"), "DT_BF16"),
        (TorchTensor(array(np.uint8), "float8_e4m3fn"), "DT_FLOAT8_E4M3FN"),
        (TorchTensor(array(np.uint8), "float8_e5m2"), "DT_FLOAT8_E5M2"),
        (TorchTensor(array(np.uint8)), "DT_UINT8"),
        (DLPackTensor(array(np.uint16), code=4), "DT_BF16"),
        (DLPackTensor(array(np.uint8), code=10), "DT_FLOAT8_E4M3FN"),
        (DLPackTensor(array(np.uint8), code=12), "DT_FLOAT8_E5M2"),
        (DLPackTensor(array(np.int32)), "DT_INT32"),
    ],
)
def test_data_types_of_tensors(tensor, data_type):
    assert CacheDesc.from_tensors([tensor], NHD).data_type.name == data_type


@pytest.mark.parametrize(
    ("dtype", "data_type"),
    [
        (np.uint16, DataType.DT_BF16),
        (np.uint8, DataType.DT_FLOAT8_E4M3FN),
        (np.int8, DataType.DT_QINT8),
        ("V2", DataType.DT_FLOAT16),
    ],
)
def test_a_type_that_numpy_lacks_can_be_given(dtype, data_type):
    assert CacheDesc.from_tensors([array(dtype)], NHD, data_type=data_type).data_type is data_type


@pytest.mark.parametrize("data_type", [DataType.DT_BF16, DataType.DT_FLOAT, DataType.DT_INT4])
def test_a_type_that_contradicts_the_tensors_is_refused(data_type):
    why = rf"data_type={data_type.name} does not fit tensors\[0\], which is float16"
    with refused("LLM_PARAM_INVALID", why):
        CacheDesc.from_tensors([array(np.float16)], NHD, data_type=data_type)


@pytest.mark.parametrize(
    "tensor",
    [
        array("V2"),
        array(">f2"),
        TorchTensor(array(np.uint8), "float8_e4m3fnuz"),
        DLPackTensor(array(np.uint8), code=9),
    ],
)
def test_a_type_without_a_number_is_refused(tensor):
    with refused(
        "LLM_PARAM_INVALID", r"tensors\[0\] is .*, which is not a DataType; give data_type"
    ):
        CacheDesc.from_tensors([tensor], NHD)


def test_memory_of_a_device_is_described_without_being_touched():
    keys = TorchTensor(array(np.float16), device="npu:3")
    assert CacheDesc.from_tensors([keys, keys], NHD).placement is Placement.DEVICE
    with refused("LLM_PARAM_INVALID", r"tensors\[1\] is in host memory, and .* device npu:3"):
        CacheDesc.from_tensors([keys, array(np.float16)], NHD)
    host = CacheDesc.from_tensors([array()], NHD, placement=Placement.DEVICE)
    assert host.placement is Placement.DEVICE


def test_a_shard_is_kept():
    shard = Shard(range(2, 4), range(3, 6), 8, 6)
    desc = CacheDesc.from_tensors([array() for _ in range(4)], CacheLayout(NHD), shard=shard)
    assert desc.shard == shard
    with refused("LLM_PARAM_INVALID", "the axis head of .* has 3"):
        CacheDesc.from_tensors([array()], NHD, shard=Shard(heads=range(2), num_heads=6))


class TestGaps:
    """Gaps between rows are described; the error for other gaps names the axis and the remedy."""

    def test_a_view_of_keys_has_a_row_stride(self):
        both = np.zeros((5, 2, 4, 3, 8), np.float16)
        apart = CacheDesc.from_tensors([both[:, 0], both[:, 1]], NHD)
        assert (apart.row_nbytes, apart.row_stride) == (192, 384)
        assert CacheDesc.from_tensors([both], "block kv token head dim").num_tensors == 1

    def test_a_view_of_one_layer_has_a_row_stride(self):
        blocks = np.zeros((5, 7, 2, 4, 3, 8), np.float16)
        layout = "block kv token head dim"
        apart = CacheDesc.from_tensors([blocks[:, index] for index in range(7)], layout)
        assert (apart.row_nbytes, apart.row_stride) == (384, 2688)
        halves = np.lib.stride_tricks.as_strided(
            np.zeros(1000, np.float16), (5, 2, 4, 3, 8), (400, 200, 48, 16, 2)
        )
        with refused("LLM_PARAM_INVALID", "keys and values lie 200 bytes apart and have 192: give"):
            CacheDesc.from_tensors([halves], layout)

    def test_a_view_of_some_heads_is_refused(self):
        heads = np.zeros((5, 4, 5, 8), np.float16)[:, :, :3]
        with refused("LLM_PARAM_INVALID", "tokens lie 80 bytes apart and have 48: give the tensor"):
            CacheDesc.from_tensors([heads], NHD)

    @pytest.mark.parametrize("odd", range(3))
    def test_a_gap_of_any_tensor_is_refused(self, odd):
        """All tensors have rows of equal size at equal distances; one has gaps inside its rows."""
        pages = np.zeros((3, 5, 4, 6, 8), np.float16)
        tensors = [page.reshape(5, 8, 3, 8)[:, :4] for page in pages]
        tensors[odd] = pages[odd, :, :, :3]
        with refused(
            "LLM_PARAM_INVALID", rf"tensors\[{odd}\] is .*: its tokens lie 96 bytes apart"
        ):
            CacheDesc.from_tensors(tensors, NHD)

    def test_a_view_of_every_other_element_is_refused(self):
        with refused("LLM_PARAM_INVALID", "its elements lie 8 bytes apart and have 4"):
            CacheDesc.from_tensors([np.zeros((5, 4, 3, 16), np.float32)[..., ::2]], NHD)

    @pytest.mark.parametrize(
        ("given", "what"),
        [
            (np.broadcast_to(np.zeros((4, 3, 8), np.float32), SHAPE), "all the same memory; give"),
            (
                np.lib.stride_tricks.sliding_window_view(
                    np.zeros((8, 3, 8), np.float32), 4, 0
                ).transpose(0, 3, 1, 2),
                "they share memory; give",
            ),
            (array()[::-1], "its blocks run backwards; give"),
        ],
    )
    def test_shared_or_reversed_memory_is_refused(self, given, what):
        with refused("LLM_PARAM_INVALID", what):
            CacheDesc.from_tensors([given], NHD)

    def test_elements_inside_of_records(self):
        records = np.zeros(SHAPE, [("key", np.float16), ("flag", np.uint8)])
        with refused("LLM_PARAM_INVALID", "strides .* in bytes, and elements of 2"):
            CacheDesc.from_tensors([records["key"]], NHD)


class TestUnlikeTensors:
    def test_another_shape_is_refused(self):
        with refused(
            "LLM_PARAM_INVALID",
            r"tensors\[2\] is float32 of shape \(5, 4, 3, 9\), and tensors\[0\] is float32 of "
            r"shape \(5, 4, 3, 8\): tensors of one cache must be alike; describe the others",
        ):
            CacheDesc.from_tensors([array(), array(), np.zeros((5, 4, 3, 9), np.float32)], NHD)

    def test_another_type_is_refused(self):
        with refused("LLM_PARAM_INVALID", r"tensors\[1\] is int16 .* tensors\[0\] is float16"):
            CacheDesc.from_tensors([array(np.float16), array(np.int16)], NHD)

    def test_another_order_in_memory_is_refused(self):
        turned = np.zeros((5, 3, 4, 8), np.float32).transpose(0, 2, 1, 3)
        with refused("LLM_PARAM_INVALID", r"tensors\[1\] .* order of their dimensions"):
            CacheDesc.from_tensors([array(), turned], NHD)


@pytest.mark.parametrize(
    ("tensors", "layout", "message"),
    [
        ([], NHD, "tensors is empty"),
        ([array()], "block token dim", "names 3 axes; .* of 4 dimensions"),
        ([array()], "blocks token head dim", "'blocks' is not an axis"),
        ([array()[:0]], NHD, "is empty"),
        ([bytearray(64)], NHD, "names 4 axes; .* of 1 dimensions"),
        ([array().transpose(0, 2, 1, 3)], None, "which needs a layout"),
    ],
)
def test_tensors_that_do_not_make_a_cache_are_refused(tensors, layout, message):
    with refused("LLM_PARAM_INVALID", message):
        CacheDesc.from_tensors(tensors, layout)


@pytest.mark.parametrize("tensors", [array(), b"abc", None, TorchTensor(array())])
def test_a_single_tensor_instead_of_a_list_is_refused(tensors):
    with pytest.raises(TypeError, match="tensors must be a list of tensors"):
        CacheDesc.from_tensors(tensors, NHD)


@pytest.mark.parametrize("wrong", [None, 7, "text", np.zeros(SHAPE, object)])
def test_a_value_that_is_not_a_tensor_is_refused(wrong):
    with pytest.raises(TypeError, match=r"tensors\[1\]"):
        CacheDesc.from_tensors([array(), wrong], NHD)


def test_rows_without_a_layout_are_opaque():
    desc = CacheDesc.from_tensors([array()], None)
    assert (desc.layout, desc.shape) == (None, SHAPE)


def test_torch_is_not_imported():
    CacheDesc.from_tensors([TorchTensor(array())], NHD)
    assert "torch" not in sys.modules
