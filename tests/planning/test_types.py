"""Descriptions of caches, keys and statuses: their values, and the values that they refuse."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCacheExtParam,
    LLMException,
    LlmRole,
    LLMStatusCode,
    Placement,
    RemoteCache,
    Rows,
    Transfer,
)
from tests.planning.transfers import DATA_TYPES
from tests.support.refusals import refused

INT8 = DataType.DT_INT8


def desc(num_tensors: Any = 2, shape: Any = (4, 8), data_type: Any = INT8, **kw: Any) -> CacheDesc:
    return CacheDesc(num_tensors, shape, data_type, **kw)


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (1, "UINT1"),
        (2, "INT2 UINT2"),
        (4, "INT4 FLOAT4_E2M1 FLOAT4_E1M2"),
        (6, "FLOAT6_E3M2 FLOAT6_E2M3"),
        (8, "INT8 UINT8 BOOL HIFLOAT8 FLOAT8_E5M2 FLOAT8_E4M3FN FLOAT8_E8M0"),
        (16, "FLOAT16 BF16 INT16 UINT16"),
        (32, "FLOAT INT32 UINT32 COMPLEX32"),
        (64, "DOUBLE INT64 UINT64 COMPLEX64"),
        (128, "COMPLEX128"),
    ],
)
def test_each_data_type_has_its_width(bits: int, names: str) -> None:
    assert {DataType[f"DT_{name}"].bits for name in names.split()} == {bits}


def test_data_types_have_the_numbers_of_the_reference() -> None:
    numbers = [data_type.value for data_type in DataType]
    assert numbers == [*range(5), *range(6, 42)]
    some = {"FLOAT": 0, "FLOAT16": 1, "BF16": 27, "INT4": 29, "FLOAT8_E4M3FN": 36}
    assert {name: DataType[f"DT_{name}"].value for name in some} == some


@pytest.mark.parametrize("data_type", sorted(set(DataType) - set(DATA_TYPES)))
def test_a_type_without_width_describes_no_cache(data_type: DataType) -> None:
    with pytest.raises(LLMException, match=f"data_type={data_type.name} has no fixed width"):
        desc(data_type=data_type)


@given(st.sampled_from(DATA_TYPES), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_sizes_follow_from_shape_and_type(
    data_type: DataType, shape: list[int], data: st.DataObject
) -> None:
    num_tensors = data.draw(st.integers(1, 9))
    bits = data_type.bits
    for length in shape[1:]:
        bits *= length
    if bits % 8:
        with pytest.raises(LLMException, match=f"row of {bits} bits is not whole bytes"):
            CacheDesc(num_tensors, tuple(shape), data_type)
        return
    made = CacheDesc(num_tensors, tuple(shape), data_type)
    assert (made.batch_size, made.stride) == (shape[0], bits // 8)
    assert made.tensor_nbytes == shape[0] * bits // 8
    assert made.nbytes == num_tensors * made.tensor_nbytes
    # Leading dimensions of 1 change only the index.
    moved = CacheDesc(num_tensors, (1, 1, *shape), data_type, batch_dim_index=2)
    assert (moved.batch_size, moved.stride) == (made.batch_size, made.stride)


WRONG_VALUE: list[tuple[dict[str, Any], list[str]]] = [
    ({"num_tensors": 0}, ["num_tensors=0", "[1, 2**32)"]),
    ({"shape": ()}, ["shape=()", "[1, 32]"]),
    ({"shape": (1,) * 33}, ["33 dimensions", "[1, 32]"]),
    ({"shape": (4, 0)}, ["shape[1]=0", "[1, 2**63)"]),
    ({"shape": (-1, 4)}, ["shape[0]=-1", "[1, 2**63)"]),
    ({"shape": (2**62, 8)}, [f"{2**65} bytes a tensor", f"[1, {2**63 - 1}]"]),
    ({"shape": (2**63 - 1,) * 32}, ["bytes a tensor", "out of range"]),
    ({"batch_dim_index": 2}, ["batch_dim_index=2", "[0, 2)"]),
    ({"batch_dim_index": -1}, ["batch_dim_index=-1", "[0, 2)"]),
    ({"batch_dim_index": 1}, ["batch_dim_index=1", "contiguous", "must be 1"]),
    ({"seq_len_dim_index": 2}, ["seq_len_dim_index=2", "-1 or in range [0, 2)"]),
    ({"seq_len_dim_index": -2}, ["seq_len_dim_index=-2", "-1 or in range [0, 2)"]),
    ({"shape": (4, 3), "data_type": DataType.DT_INT4}, ["row of 12 bits", "whole bytes"]),
    ({"shape": (8,), "data_type": DataType.DT_UINT1}, ["row of 1 bits", "whole bytes"]),
]


@pytest.mark.parametrize(("change", "parts"), WRONG_VALUE)
def test_a_description_refuses_wrong_values(change: dict[str, Any], parts: list[str]) -> None:
    with refused(LLMStatusCode.LLM_PARAM_INVALID) as raised:
        desc(**change)
    for part in parts:
        assert part in str(raised.value)


KEY_1 = CacheKey(1, 2)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: desc(num_tensors=-1), ["num_tensors=-1", f"[0, {2**32 - 1}]"]),
        (lambda: desc(num_tensors=2**32), [f"num_tensors={2**32}", f"[0, {2**32 - 1}]"]),
        (lambda: desc(shape=(2**63, 1)), [f"shape[0]={2**63}"]),
        (lambda: CacheKey(-1), ["cluster_id=-1", f"[0, {2**64 - 1}]"]),
        (lambda: CacheKey(1, 2**64), [f"req_id={2**64}"]),
        (lambda: CacheKey(1, 2, -1), ["model_id=-1"]),
        (lambda: CacheKey(1, 2, 3, 2**64), [f"prefix_id={2**64}"]),
        (lambda: BlocksCacheKey(2**70), [f"cluster_id={2**70}"]),
        (lambda: BlocksCacheKey(1, -1), ["model_id=-1"]),
        (lambda: CacheIndex(1, 2**63), [f"cache_id={2**63}", f"{2**63 - 1}]"]),
        (lambda: CacheIndex(1, 1, -1), ["batch_index=-1", f"[0, {2**32 - 1}]"]),
        (lambda: CacheIndex(1, 1, 2**32), [f"batch_index={2**32}"]),
        (lambda: Cache(desc(), -2), ["cache_id=-2", "[-1, "]),
        (lambda: Cache(desc(), 1, (0, 8)), ["tensor_addrs[0]=0", f"[1, {2**64 - 1}]"]),
        (lambda: Cache(desc(), 1, (8, 2**64)), [f"tensor_addrs[1]={2**64}"]),
    ],
)
def test_a_number_outside_its_field_is_a_value_error(make: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError, match="out of range") as raised:
        make()
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: desc(num_tensors="2"), "num_tensors='2'"),
        (lambda: desc(num_tensors=True), "num_tensors=True"),
        (lambda: desc(num_tensors=2.0), "num_tensors=2.0"),
        (lambda: desc(shape=8), "shape=8"),
        (lambda: desc(shape="48"), "shape='48'"),
        (lambda: desc(shape=(4, "8")), "shape[1]='8'"),
        (lambda: desc(shape=(4, True)), "shape[1]=True"),
        (lambda: desc(shape=[4, 8.0]), "shape[1]=8.0"),
        (lambda: desc(data_type=2), "data_type=2"),
        (lambda: desc(data_type="DT_INT8"), "data_type='DT_INT8'"),
        (lambda: desc(placement=1), "placement=1"),
        (lambda: desc(batch_dim_index=0.0), "batch_dim_index=0.0"),
        (lambda: desc(seq_len_dim_index=None), "seq_len_dim_index=None"),
        (lambda: desc(kv_tensor_format=["ND"]), "kv_tensor_format=['ND']"),
        (lambda: CacheKey("1"), "cluster_id='1'"),
        (lambda: CacheKey(1, None), "req_id=None"),
        (lambda: BlocksCacheKey(None), "cluster_id=None"),
        (lambda: CacheIndex(1, None), "cache_id=None"),
        (lambda: CacheIndex(1, 1, True), "batch_index=True"),
        (lambda: Cache("desc"), "cache_desc='desc'"),
        (lambda: Cache(desc(), "1"), "cache_id='1'"),
        (lambda: Cache(desc(), 1, 8), "tensor_addrs=8"),
        (lambda: Cache(desc(), 1, ("8", "16")), "tensor_addrs[0]='8'"),
        (lambda: RemoteCache(1, desc()), "key=1"),
        (lambda: RemoteCache(KEY_1, "desc"), "cache_desc='desc'"),
    ],
)
def test_a_wrong_type_is_a_type_error(make: Any, part: str) -> None:
    with pytest.raises(TypeError) as raised:
        make()
    assert part in str(raised.value)


def test_each_tensor_has_one_address() -> None:
    with refused(LLMStatusCode.LLM_PARAM_INVALID, r"1 addresses; num_tensors=2"):
        Cache(desc(), 1, (8,))
    assert Cache(desc(), 1, [8, 16]).tensor_addrs == (8, 16)  # type: ignore[arg-type]


VALUES = [
    desc(),
    CacheKey(1, 2, 3, 4),
    BlocksCacheKey(1, 2),
    CacheIndex(1, 2, 3),
    Cache(desc(), 1, (8, 16)),
    RemoteCache(BlocksCacheKey(1), desc()),
    KvCacheExtParam(range(2), (0, 1), 2),
    LlmRole.MIX,
    Placement.HOST,
    INT8,
    LLMStatusCode.LLM_TIMEOUT,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_are_frozen_hashable_and_copied_equal(value: Any) -> None:
    for other in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert other == value
        assert hash(other) == hash(value)
    if dataclasses.is_dataclass(value):
        assert dataclasses.replace(value) == value  # type: ignore[type-var]
        for field in dataclasses.fields(value):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, None)
        with pytest.raises((AttributeError, TypeError)):
            value.added = 1


def test_a_list_for_a_shape_is_the_same_description() -> None:
    shape = [4, 8]
    made = desc(shape=shape)
    shape[0] = 99
    assert made == desc()
    assert hash(made) == hash(desc())


def test_the_two_names_of_an_index_are_equal() -> None:
    """A slot with a name of the C++ interface is found by its name of the Python interface."""
    assert {CacheIndex(1, 2): "slot"}[CacheKeyByIdAndIndex(1, 2, 0)] == "slot"


def test_defaults_are_those_of_the_reference() -> None:
    assert CacheKey(1) == CacheKey(1, 2**64 - 1, 0, 2**64 - 1)
    assert (BlocksCacheKey(1).model_id, CacheIndex(1, 2).batch_index) == (0, 0)
    assert KvCacheExtParam().tensor_num_per_layer is None
    desc_of_two = CacheDesc(4, (8, 4), DataType.DT_INT8)
    assert (
        kvplan.plan(
            Transfer(Rows(desc_of_two), Rows(desc_of_two)), local="dst"
        ).part.tensors_per_layer
        == 2
    )
    assert (desc().placement, desc().seq_len_dim_index) == (Placement.DEVICE, -1)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (CacheKey(1), "CacheKey(cluster_id=1, model_id=0)"),
        (CacheKey(1, 7, 2), "CacheKey(cluster_id=1, req_id=7, model_id=2)"),
        (CacheKey(1, prefix_id=5), "CacheKey(cluster_id=1, model_id=0, prefix_id=5)"),
        (CacheKey(1, 7, 0, 5), "CacheKey(cluster_id=1, req_id=7, model_id=0, prefix_id=5)"),
        (CacheKey(2**64 - 1, 7), f"CacheKey(cluster_id={2**64 - 1}, req_id=7, model_id=0)"),
    ],
)
def test_a_key_prints_the_ids_that_it_has(key: CacheKey, text: str) -> None:
    assert repr(key) == text
    assert eval(repr(key)) == key


@pytest.mark.parametrize("value", [LlmRole.PROMPT, Placement.HOST, INT8, LLMStatusCode.LLM_FAILED])
def test_enums_print_their_class_and_name(value: Any) -> None:
    assert str(value) == f"{value}" == f"{type(value).__name__}.{value.name}"


def test_status_codes_have_the_values_of_the_reference() -> None:
    codes = {code.name: code.value for code in LLMStatusCode}
    assert len(codes) == 30
    assert codes.pop("LLM_CANCELLED") < 0  # ours; the others are uint32, and this one:
    assert codes["LLM_SUCCESS"] == 0
    assert codes["LLM_FAILED"] == 4294967295
    assert codes["LLM_PARAM_INVALID"] == 1343270917
    assert codes["LLM_KV_CACHE_NOT_EXIST"] == 1343270914
    assert codes["LLM_TIMEOUT"] == 1343270938
    assert codes["LLM_EXIST_LINK"] == 1343270936
    assert codes["LLM_DEVICE_MEM_ERROR"] == 507053
    assert codes["LLM_SUSPECT_REMOTE_ERROR"] == 507057
    assert codes["LLM_UNKNOWN_ERROR"] == -1


def test_an_exception_is_never_a_success() -> None:
    """The default code of the reference is LLM_SUCCESS."""
    error = LLMException("broken")
    assert error.status_code is LLMStatusCode.LLM_FAILED
    assert str(error) == "broken (LLM_FAILED)"
    assert isinstance(error, RuntimeError)


def test_an_exception_keeps_its_code_through_pickle() -> None:
    error = LLMException(
        "late", status_code=LLMStatusCode.LLM_TIMEOUT, unconfirmed=((0, 2), (5, 6))
    )
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "late (LLM_TIMEOUT)"
    assert (again.status_code, again.unconfirmed) == (error.status_code, error.unconfirmed)


def test_every_exported_name_is_there() -> None:
    for name in kvplan.__all__:
        if name.startswith("plan_") or name[0].isupper():
            assert name in dir(kvplan)


@pytest.mark.parametrize("text", ["N" * 257, "\ud800"])
def test_a_format_that_every_peer_would_refuse_is_refused(text: str) -> None:
    with pytest.raises(LLMException, match="kv_tensor_format"):
        desc(kv_tensor_format=text)
    assert desc(kv_tensor_format=f"opaque {'N' * 249}").kv_tensor_format


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("NDH", ["kv_tensor_format='NDH' is not a layout", "the nearest are NHD and HND"]),
        ("nhd", ["the nearest are NHD"]),
        ("777", ["is not a layout", "known are NHD, HND; name the axes"]),
        ("LBHCN", ["the nearest are LBNHC and LBHNC"]),
        ("ND", ["is not a layout", "'block token head dim'", "'opaque '"]),
        ("opaque", ["is not a layout", "'opaque '"]),
        ("", ["exactly one of block and slot"]),
        ("block tokens head dim", ["'tokens' is not an axis", "did you mean token?"]),
        ("token head dim", ["exactly one of block and slot"]),
        ("block token head", ["names 3 axes; the shape has 4"]),
        ("block head token dim state", ["either token or state"]),
    ],
)
def test_a_wrong_layout_is_refused_with_the_nearest_one(text: str, parts: list[str]) -> None:
    with refused("LLM_PARAM_INVALID") as raised:
        desc(shape=(8, 16, 2, 4), kv_tensor_format=text)
    for part in ("kv_tensor_format", *parts):
        assert part in str(raised.value)


def test_a_name_that_contradicts_its_indices_is_refused() -> None:
    with refused("LLM_PARAM_INVALID", "batch_dim_index=1 must be 0 with kv_tensor_format='NHD'"):
        desc(shape=(1, 8, 16, 4), kv_tensor_format="NHD", batch_dim_index=1)
