"""Values: their fields, their texts, and the order of the rules that refuse arguments."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from kvplan.llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LayerSynchronizer,
    LLMConfig,
    LLMException,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

NONE = 2**64 - 1
INT8 = DataType.DT_INT8
BY_ID = CacheKeyByIdAndIndex(2, 1)
LAYER = range(1)


def host(num_tensors: int = 2, **more: Any) -> CacheDesc:
    return CacheDesc(num_tensors, [4, 8], INT8, Placement.HOST, **more)


PRINTED = {
    "CacheDesc(num_tensors=2, shape=[4, 8], data_type=DataType.DT_INT8, placement=Placement.HOST, "
    "batch_dim_index=0, seq_len_dim_index=1,kv_tensor_format=ND)": host(
        seq_len_dim_index=1, kv_tensor_format="ND"
    ),
    f"CacheKey(cluster_id=1, req_id=2, prefix_id={NONE}, model_id=0)": CacheKey(1, 2),
    "CacheKey(cluster_id=1, req_id=2, prefix_id=4, model_id=3)": CacheKey(
        prompt_cluster_id=1, req_id=2, model_id=3, prefix_id=4
    ),
    "BlocksCacheKey(cluster_id=1, model_id=2)": BlocksCacheKey(1, 2),
    "BlocksCacheKey(prompt_cluster_id=1, model_id=0)": BlocksCacheKey(prompt_cluster_id=1),
    "CacheKeyByIdAndIndex(cluster_id=1, cache_id=2, batch_index=3)": CacheKeyByIdAndIndex(1, 2, 3),
    "Cache(cache_id = -1, device_tensor_addrs = 2, is_blocks_cache = True)": Cache.create_cpu_cache(
        host(), [4096, 8192]
    ),
    "KvCache(cache_id = -1, num_devices = 1)": KvCache.create_cpu_cache(host(), [4096, 8192]),
    "MemInfo(mem_type=Memtype.MEM_TYPE_HOST, addr=4096, size=8)": MemInfo(
        Memtype.MEM_TYPE_HOST, 4096, 8
    ),
    "TransferConfig(dst_cluster_id=1, dst_addrs=[2], src_layer_range=None, src_batch_index=0)": (
        TransferConfig(1, [2])
    ),
    "TransferWithCacheKeyConfig(cache_key=CacheKeyByIdAndIndex(cluster_id=2, cache_id=1, "
    "batch_index=0), src_layer_range=range(0, 2), dst_layer_range=range(3, 5), "
    "src_batch_index=6)": TransferWithCacheKeyConfig(BY_ID, range(2), range(3, 5), 6),
}


@pytest.mark.parametrize("text", PRINTED)
def test_a_value_prints_as_the_official_one(text: str) -> None:
    value = PRINTED[text]
    assert (repr(value), str(value)) == (text, text)


@pytest.mark.parametrize("text", PRINTED)
def test_a_value_is_copied_and_pickled(text: str) -> None:
    value = PRINTED[text]
    for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert other is not value
        assert repr(other) == text


@pytest.mark.parametrize("text", PRINTED)
def test_a_value_is_equal_to_itself_only(text: str) -> None:
    value = PRINTED[text]
    assert value != copy.copy(value)
    assert {value: 1}[value] == 1


@pytest.mark.parametrize("name", ["cluster_id", "req_id", "model_id", "prefix_id"])
def test_read_only_attributes_are_not_settable(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(CacheKey(1, 2), name, 3)


def test_a_description_keeps_its_shape() -> None:
    given = [4, 8]
    assert CacheDesc(1, given, INT8).shape is given
    assert CacheDesc(1, (4, 8), INT8).shape == (4, 8)


def test_a_changed_dimension_changes_the_size() -> None:
    desc = CacheDesc(1, [4, 8], DataType.DT_FLOAT16)
    assert (desc.batch_size, desc.size) == (4, 64)
    desc.update_dim(0, 5)
    assert (desc.shape, desc.size) == ([5, 8], 80)
    with pytest.raises(IndexError):
        desc.update_dim(2, 1)
    with pytest.raises(TypeError):
        CacheDesc(1, (4, 8), INT8).update_dim(0, 5)


def test_the_dimension_of_slots_is_the_argument() -> None:
    desc = CacheDesc(1, [1, 8, 2], INT8, batch_dim_index=1)
    assert (desc.batch_dim, desc.batch_size) == (1, 8)


FIRST_TO_REFUSE = {
    "num_tensors=-1": (ValueError, lambda: CacheDesc(-1, "x", None)),  # type: ignore[arg-type]
    "shape='x'": (TypeError, lambda: CacheDesc(1, "x", 5)),  # type: ignore[arg-type]
    "data_type=5": (TypeError, lambda: CacheDesc(1, [1], 5, 6)),  # type: ignore[arg-type]
    "placement=6": (TypeError, lambda: CacheDesc(1, [1], INT8, 6, 7)),  # type: ignore[arg-type]
    "seq_len_dim_index=1.5": (
        TypeError,
        lambda: CacheDesc(1, [1], INT8, Placement.HOST, 7, 1.5),  # type: ignore[arg-type]
    ),
    "batch_dim_index=7": (LLMException, lambda: CacheDesc(1, [2**63], INT8, Placement.HOST, 7, 9)),
    "seq_len_dim_index=9": (LLMException, lambda: CacheDesc(1, [2**63], INT8, seq_len_dim_index=9)),
    "shape=9223372036854775808": (ValueError, lambda: CacheDesc(1, [2**63], INT8)),
    "5 arguments": (LLMException, lambda: CacheKey(1, 2, 3, 4, 5)),
    "cluster_id is required": (LLMException, lambda: CacheKey(foo=1)),
    "req_id is required": (LLMException, lambda: CacheKey(1, foo=1)),
    "Unsupported argument foo": (LLMException, lambda: BlocksCacheKey(1, foo=-1)),
    "cluster_id=-1": (ValueError, lambda: CacheKey(-1, -2)),
    "req_id=-2": (ValueError, lambda: CacheKey(1, -2, -3)),
    "cache_id='a'": (TypeError, lambda: CacheKeyByIdAndIndex(1, "a", -1)),  # type: ignore[arg-type]
    "dst_cluster_id=-1": (ValueError, lambda: TransferConfig(-1, [])),
    "dst_addrs holds 'a'": (TypeError, lambda: TransferConfig(1, [-1, "a"])),  # type: ignore[list-item]
    "cache_key=None": (
        TypeError,
        lambda: TransferWithCacheKeyConfig(None, LAYER),  # type: ignore[arg-type]
    ),
    "dst_layer_range=None": (TypeError, lambda: TransferWithCacheKeyConfig(BY_ID, LAYER)),
    "of equal length": (
        LLMException,
        lambda: TransferWithCacheKeyConfig(BY_ID, LAYER, range(2), -1),
    ),
    "src_batch_index=-1": (
        ValueError,
        lambda: TransferWithCacheKeyConfig(BlocksCacheKey(1), LAYER, LAYER, -1),
    ),
}


@pytest.mark.parametrize("message", FIRST_TO_REFUSE)
def test_the_first_broken_rule_refuses(message: str) -> None:
    kind, call = FIRST_TO_REFUSE[message]
    with pytest.raises(kind, match=re.escape(message)) as raised:
        call()
    if isinstance(raised.value, LLMException):
        assert raised.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize(
    "make",
    [
        lambda: CacheKey(True, 1),
        lambda: BlocksCacheKey(True),
        lambda: CacheKeyByIdAndIndex(1, 1, False),
        lambda: CacheDesc(True, [1], INT8),
        lambda: CacheDesc(1, [True], INT8),
        lambda: TransferConfig(1, [True]),
        lambda: MemInfo(Memtype.MEM_TYPE_DEVICE, True, 1),
        lambda: setattr(LLMConfig(), "device_id", [0, True]),
    ],
)
def test_a_bool_is_not_an_int(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="supports"):
        make()


@pytest.mark.parametrize(
    ("name", "good", "bad", "kind"),
    [
        ("dst_cluster_id", 2**64 - 1, 2**64, ValueError),
        ("dst_addrs", (5, 6), [2**64], ValueError),
        ("src_layer_range", range(2, 5), range(1, 1), LLMException),
        ("src_layer_range", None, [1], TypeError),
        ("src_batch_index", 7, "7", TypeError),
    ],
)
def test_a_destination_is_changed_by_the_rules_of_its_constructor(
    name: str, good: object, bad: object, kind: type[Exception]
) -> None:
    config = TransferConfig(1, [2])
    setattr(config, name, good)
    with pytest.raises(kind):
        setattr(config, name, bad)
    assert getattr(config, name) is good


def test_a_keyed_destination_is_changed_by_looser_rules_than_its_constructors() -> None:
    config = TransferWithCacheKeyConfig(BY_ID, LAYER, LAYER)
    config.src_layer_range = config.dst_layer_range = None
    config.src_batch_index = 3
    config.cache_key = BlocksCacheKey(9)
    assert config.dst_cluster_id == 2  # of the key in the constructor
    with pytest.raises(LLMException, match="src_batch_index=1 must be 0"):
        config.src_batch_index = 1
    assert config.src_batch_index == 3


@pytest.mark.parametrize("addrs", [[[1, 2], [3, 4]], [[1, 2]], [1, 2]])
def test_a_cache_of_version_1_has_addresses_for_each_device(addrs: list[Any]) -> None:
    per_device = KvCache.create_cpu_cache(host(), addrs).per_device_tensor_addrs
    assert per_device == (addrs if isinstance(addrs[0], list) else [addrs])


@pytest.mark.parametrize(
    ("addrs", "message"),
    [
        ([], "addrs is empty"),
        ([1], "addrs has 1 addresses"),
        ([[1]], "addrs[0] has 1 addresses"),
        ([[1, 2], 3], "should be consistent"),
    ],
)
def test_a_cache_of_version_1_needs_an_address_for_each_tensor(
    addrs: list[Any], message: str
) -> None:
    with pytest.raises(LLMException, match=re.escape(message)):
        KvCache.create_cpu_cache(host(), addrs)


class Owner:
    def __init__(self, refusal: LLMException | None = None) -> None:
        self.initialized = True
        self.refusal = refusal
        self.taken_back: list[int] = []

    def is_initialized(self) -> bool:
        return self.initialized

    def deallocate_cache(self, cache: KvCache) -> None:
        self.taken_back.append(cache.cache_id)
        if self.refusal is not None:
            raise self.refusal


def test_a_dropped_cache_of_version_1_is_deallocated() -> None:
    owner = Owner()
    KvCache(3, host(), [[1, 2]], owner)
    deallocated = KvCache(4, host(), [[1, 2]], owner)
    deallocated._valid = False
    del deallocated
    owner.initialized = False
    KvCache(5, host(), [[1, 2]], owner)
    KvCache(6, host(), [[1, 2]], None)
    gc.collect()
    assert owner.taken_back == [3]


def test_a_failure_to_deallocate_a_dropped_cache_is_logged(
    capfd: pytest.CaptureFixture[str],
) -> None:
    KvCache(3, host(), [[1, 2]], Owner(LLMException("the engine is gone")))
    gc.collect()
    assert "could not deallocate KvCache(cache_id = 3, num_devices = 1): the engine is gone" in (
        capfd.readouterr().out
    )


def test_a_cache_whose_constructor_failed_is_dropped_silently() -> None:
    with pytest.raises(ValueError, match="cache_id"):
        KvCache(2**63, host(), [[1, 2]], Owner())
    gc.collect()  # an error in __del__ would fail this test


def test_a_synchronizer_must_synchronize() -> None:
    with pytest.raises(TypeError, match="abstract"):
        LayerSynchronizer()  # type: ignore[abstract]


@pytest.mark.parametrize("arguments", [(), ("a",), ("a", 1)])
def test_an_exception_keeps_its_arguments_and_status(arguments: tuple[object, ...]) -> None:
    raised = LLMException(*arguments, status_code=LLMStatusCode.LLM_TIMEOUT)
    for each in (raised, copy.copy(raised), pickle.loads(pickle.dumps(raised))):
        assert each.args == arguments
        assert each.status_code is LLMStatusCode.LLM_TIMEOUT
        assert str(each).endswith("(LLM_TIMEOUT)")
    with pytest.raises(AttributeError):
        raised.status_code = LLMStatusCode.LLM_SUCCESS  # type: ignore[misc]


def test_an_exception_with_an_unknown_number() -> None:
    raised = LLMException("a", status_code=100)  # type: ignore[arg-type]
    assert (raised.status_code, str(raised)) == (100, "a (100)")


def test_a_generated_property_has_a_docstring_and_types() -> None:
    prop = vars(TransferConfig)["src_layer_range"]
    assert inspect.getdoc(prop) == inspect.getdoc(prop.fget) == "Local layers; None: all."
    assert inspect.signature(prop.fget).return_annotation == range | None
