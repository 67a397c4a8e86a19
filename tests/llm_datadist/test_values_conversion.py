"""Official values converted to the engine's: each field is kept, and invalid values are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.links import IpInfo
from kvplan.llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMException,
    Placement,
)
from kvplan.llm_datadist.conversion import cache_of, cluster_of, desc_of, key_of
from kvplan.llm_datadist.data_type import (
    calc_tensor_size,
    dtype_to_np_dtype,
    get_python_dtype_from_wrapper_dtype,
    np_dtype_to_dtype,
)
from kvplan.llm_datadist.v2 import llm_utils
from tests.support.refusals import refused

UINT64 = st.integers(0, 2**64 - 1)
WITH_WIDTH = [item for item in DataType if item is not DataType.DT_STRING]


@given(UINT64, UINT64, UINT64, UINT64)
def test_a_key_keeps_its_ids(cluster_id: int, req_id: int, model_id: int, prefix_id: int) -> None:
    ids = (cluster_id, req_id, model_id, prefix_id)
    assert key_of(CacheKey(*ids)) == kvplan.CacheKey(*ids)
    assert key_of(BlocksCacheKey(cluster_id, model_id)) == kvplan.BlocksCacheKey(
        cluster_id, model_id
    )


@given(UINT64, st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1))
def test_a_key_by_id_keeps_its_ids(cluster_id: int, cache_id: int, batch_index: int) -> None:
    ids = (cluster_id, cache_id, batch_index)
    assert key_of(CacheKeyByIdAndIndex(*ids)) == kvplan.CacheKeyByIdAndIndex(*ids)


@pytest.mark.parametrize("ids", [(-1,), (2**64,), (None,), (1, -1)])
def test_a_blocks_key_without_ids_is_refused_when_it_is_used(ids: Any) -> None:
    with pytest.raises(TypeError, match=r"cluster_id|model_id"):
        key_of(BlocksCacheKey(*ids))


@pytest.mark.parametrize("data_type", WITH_WIDTH)
def test_a_description_keeps_its_fields(data_type: DataType) -> None:
    official = CacheDesc(3, [4, 5], data_type, Placement.HOST, 0, 1, "ND")
    ours = desc_of(official)
    assert ours == kvplan.CacheDesc(
        3, (4, 5), kvplan.DataType(data_type.value), Placement.HOST, 0, 1, "opaque ND"
    )
    assert ours.data_type.name == data_type.name
    assert ours.tensor_nbytes == official.size
    assert official.size == 20 * dtype_to_np_dtype[data_type]().itemsize


def test_the_first_dimension_counts_rows_in_any_format() -> None:
    assert desc_of(CacheDesc(1, [4, 5], DataType.DT_INT8, batch_dim_index=1)).batch_size == 4


@pytest.mark.parametrize(
    "official",
    [
        CacheDesc(0, [4], DataType.DT_INT8),
        CacheDesc(1, [0], DataType.DT_INT8),
        CacheDesc(1, [-1], DataType.DT_INT8),
        CacheDesc(1, [1] * 33, DataType.DT_INT8),
        CacheDesc(1, [4], DataType.DT_STRING),
        CacheDesc(1, [2**40, 2**40], DataType.DT_INT8),
    ],
    ids=str,
)
def test_an_empty_description_is_invalid_when_it_is_used(official: CacheDesc) -> None:
    with refused(kvplan.LLMStatusCode.LLM_PARAM_INVALID):
        desc_of(official)


@pytest.mark.parametrize("field", ["data_type", "placement"])
def test_a_description_without_a_type_is_refused_when_it_is_used(field: str) -> None:
    given: dict[str, Any] = {"data_type": DataType.DT_INT8, field: None}
    with pytest.raises(TypeError, match=field):
        desc_of(CacheDesc(1, [4], **given))


def test_a_cache_without_an_id_has_its_addresses() -> None:
    desc = CacheDesc(2, [4], DataType.DT_INT8, Placement.HOST)
    ours = cache_of(Cache.create_cpu_cache(desc, [4096, 8192]))
    assert ours == kvplan.Cache(desc_of(desc), -1, (4096, 8192))
    with pytest.raises(ValueError, match="tensor_addrs"):
        cache_of(Cache.create_cpu_cache(desc, [4096, 0]))


def test_a_cache_with_an_id_is_named_by_it() -> None:
    desc = CacheDesc(2, [4], DataType.DT_INT8)
    assert cache_of(Cache(7, desc, [4096, 8192], None, True, False)).cache_id == 7


def test_a_cluster_keeps_its_addresses() -> None:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = 2**64 - 1
    cluster.append_local_ip_info("127.0.0.1", 1)
    cluster.append_remote_ip_info("10.20.30.40", 5)
    ours = cluster_of(cluster)
    assert (ours.remote_cluster_id, ours.remote) == (2**64 - 1, (IpInfo("10.20.30.40", 5),))


@pytest.mark.parametrize("ip", [-1, 2**32, None])
def test_an_integer_that_is_not_an_address_is_invalid(ip: Any) -> None:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = 1
    cluster.append_remote_ip_info(ip, 5)
    with pytest.raises(LLMException, match=r"ip=.* is out of range"):
        cluster_of(cluster)


def test_a_cluster_without_id_is_refused() -> None:
    with pytest.raises(TypeError, match="remote_cluster_id=None"):
        cluster_of(LLMClusterInfo())


@pytest.mark.parametrize("data_type", DataType)
def test_a_data_type_is_found_by_its_number_and_its_numpy_type(data_type: DataType) -> None:
    import numpy as np

    assert get_python_dtype_from_wrapper_dtype(data_type.value) is data_type
    np_dtype = np.dtype(dtype_to_np_dtype[data_type])
    expected = DataType.DT_FLOAT16 if data_type is DataType.DT_BF16 else data_type
    assert np_dtype_to_dtype[np_dtype] is expected


def test_an_unknown_number_of_a_data_type_is_refused() -> None:
    with pytest.raises(ValueError, match="28"):
        get_python_dtype_from_wrapper_dtype(28)


@pytest.mark.parametrize(
    ("shape", "data_type", "nbytes"),
    [
        ([2, 3], 1, 12),
        ([2], 13, 32),
        ([3], 29, 2),  # DT_INT4: 12 bits
        ([], 0, 4),
        ([0], 2, -1),
        ([-1], 2, -1),
        ([2**62, 2], 2, -1),
        ([2**63 - 1], 2, 2**63 - 1),
        ([2], 28, -1),
        ([2], 99, -1),
    ],
)
def test_the_size_of_a_tensor(shape: list[int], data_type: int, nbytes: int) -> None:
    assert calc_tensor_size(shape, data_type) == nbytes


def test_a_description_is_cloned_with_a_shape_of_its_own() -> None:
    desc = CacheDesc(2, [4, 8], DataType.DT_FLOAT16, Placement.HOST, 1, 0, "ND")
    other = llm_utils.clone_cache_desc(desc)
    assert repr(other) == repr(desc)
    other.update_dim(0, 5)
    assert desc.shape == [4, 8]


@pytest.mark.parametrize(
    ("src", "dst", "tensors"),
    [
        (range(1, 3), range(3), ([2, 3, 4, 5], [0, 1, 2, 3, 4, 5])),
        (None, range(1), ([], [0, 1])),
        (range(2, 2), None, ([], [])),
    ],
)
def test_layers_are_tensors(src: Any, dst: Any, tensors: Any) -> None:
    assert llm_utils.layer_range_to_tensor_indices(src, dst) == tensors
    assert llm_utils.layer_range_to_tensor_indices(src, dst, 1)[1] == list(dst or ())


@pytest.mark.parametrize(
    ("layers", "kind"),
    [([1], TypeError), (range(0, 4, 2), LLMException), (range(-1, 2), LLMException)],
)
def test_invalid_layers_are_refused(layers: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="dst_layer_range"):
        llm_utils.layer_range_to_tensor_indices(None, layers)


@pytest.mark.parametrize(("number", "invalid"), [(-1, True), (2**64 - 1, True), (0, False)])
def test_the_largest_number_is_an_invalid_id(number: int, invalid: bool) -> None:
    assert llm_utils.is_invalid_id(number) is invalid
    assert llm_utils.is_valid_id(number) is not invalid
