"""The values of the interface, in the module from which programs import them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Protocol

from kvplan.links import RegisterMemStatus
from kvplan.llm_datadist.utils.utils import (
    Checked,
    Field,
    check_int64,
    check_isinstance,
    check_list_uint64,
    check_uint32,
    check_uint64,
    checked_by,
)
from kvplan.llm_datadist.v2.caches import Cache, CacheDesc, KvCache
from kvplan.status import LLMStatusCode, invalid
from kvplan.types import NO_ID, Placement

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheTask",
    "KvCache",
    "LayerSynchronizer",
    "MemInfo",
    "Memtype",
    "Placement",
    "PushType",
    "RegisterMemStatus",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "check_layer_range",
    "int_to_mem_status_dict",
]

_CLUSTER_IDS = ("cluster_id", "prompt_cluster_id")

int_to_mem_status_dict = {status.value: status for status in RegisterMemStatus}


class PushType(Enum):
    """The kind of a destination, for the C++ part of the original."""

    NO_CACHE_KEY = 0
    BLOCKS_CACHE_KEY = 1
    CACHE_KEY_BY_ID = 2


class Memtype(Enum):
    """The kind of memory."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class MemInfo:
    """A range of memory.

    Args:
        mem_type: kind of memory.
        addr: address of its first byte.
        size: number of bytes.

    Raises:
        TypeError: an argument of the wrong type.
    """

    mem_type = Field[Memtype]("Kind of memory.")
    addr = Field[int]("Address of its first byte.")
    size = Field[int]("Number of bytes.")

    def __init__(self, mem_type: Memtype, addr: int, size: int) -> None:
        check_isinstance("mem_type", mem_type, Memtype)
        check_isinstance("addr", addr, int)
        check_isinstance("size", size, int)
        self._mem_type = mem_type
        self._addr = addr
        self._size = size

    def __repr__(self) -> str:
        return f"MemInfo(mem_type={self.mem_type}, addr={self.addr}, size={self.size})"


class CacheKey:
    """The key of a slot: the request or the prefix whose KV it holds.

    Args:
        cluster_id: id of the peer, also as prompt_cluster_id; ignored when a cache is made.
        req_id: id of the request; 2**64-1: none.
        model_id: distinguishes models of one request. Default 0.
        prefix_id: id of the prefix; 2**64-1, the default: none.

    Raises:
        TypeError, ValueError: an id that is not a uint64.
        LLMException: LLM_PARAM_INVALID: too many or too few arguments, or an unknown one.
    """

    cluster_id = Field[int]("Id of the peer.")
    prompt_cluster_id = Field[int]("The same as cluster_id.")
    req_id = Field[int]("The request.")
    model_id = Field[int]("The model.")
    prefix_id = Field[int]("The prefix.")

    def __init__(self, *args: int, **kwargs: int) -> None:
        given = _given(("cluster_id", "req_id", "model_id", "prefix_id"), args, kwargs)
        if "req_id" not in given:
            raise invalid("req_id is required")
        _check_names(given, ("req_id", "model_id", "prefix_id"))
        self._cluster_id = self._prompt_cluster_id = given[_cluster_id_name(given)]
        self._req_id = given["req_id"]
        self._model_id = given.get("model_id", 0)
        self._prefix_id = given.get("prefix_id", NO_ID)
        for name in ("cluster_id", "req_id", "model_id", "prefix_id"):
            check_uint64(name, getattr(self, name))

    def __repr__(self) -> str:
        return (
            f"CacheKey(cluster_id={self.cluster_id}, req_id={self.req_id}, "
            f"prefix_id={self.prefix_id}, model_id={self.model_id})"
        )


class BlocksCacheKey:
    """The key of a paged cache.

    Args:
        cluster_id: id of the peer, also as prompt_cluster_id; ignored when a cache is made.
        model_id: distinguishes caches of one cluster. Default 0.

    Raises:
        TypeError: an id that is not an int.
        LLMException: LLM_PARAM_INVALID: too many or too few arguments, or an unknown one.
    """

    cluster_id = Field[int]("Id of the peer.")
    prompt_cluster_id = Field[int]("The same as cluster_id.")
    model_id = Field[int]("The model.")

    def __init__(self, *args: int, **kwargs: int) -> None:
        given = _given(("cluster_id", "model_id"), args, kwargs)
        _check_names(given, ("model_id",))
        self._name = _cluster_id_name(given)
        self._cluster_id = self._prompt_cluster_id = given[self._name]
        self._model_id = given.get("model_id", 0)
        check_isinstance("cluster_id", self._cluster_id, int)
        check_isinstance("model_id", self._model_id, int)

    def __repr__(self) -> str:
        return f"BlocksCacheKey({self._name}={self.cluster_id}, model_id={self.model_id})"


class CacheKeyByIdAndIndex:
    """The key of a slot: the id of its cache and its index.

    Args:
        cluster_id: id of the peer.
        cache_id: id of the cache at the peer.
        batch_index: index of the slot.

    Raises:
        TypeError, ValueError: cluster_id is not a uint64, cache_id not an int64, or batch_index
            not a uint32.
    """

    cluster_id = Field[int]("Id of the peer.")
    cache_id = Field[int]("Id of the cache at the peer.")
    batch_index = Field[int]("Index of the slot.")

    def __init__(self, cluster_id: int, cache_id: int, batch_index: int = 0) -> None:
        check_uint64("cluster_id", cluster_id)
        check_int64("cache_id", cache_id)
        check_uint32("batch_index", batch_index)
        self._cluster_id = cluster_id
        self._cache_id = cache_id
        self._batch_index = batch_index

    def __repr__(self) -> str:
        return (
            f"CacheKeyByIdAndIndex(cluster_id={self.cluster_id}, cache_id={self.cache_id}, "
            f"batch_index={self.batch_index})"
        )


def _given(names: Sequence[str], args: Sequence[int], kwargs: Mapping[str, int]) -> dict[str, int]:
    """Return the arguments by name; positional arguments override keywords."""
    if len(args) + len(kwargs) > len(names):
        raise invalid(
            f"{len(args) + len(kwargs)} arguments; at most {len(names)} are allowed: {names}"
        )
    given = {**kwargs, **dict(zip(names, args, strict=False))}
    if not any(name in given for name in _CLUSTER_IDS):
        raise invalid("prompt_cluster_id or cluster_id is required")
    return given


def _check_names(given: Mapping[str, int], names: Sequence[str]) -> None:
    for name in given:
        if name not in (*_CLUSTER_IDS, *names):
            raise invalid(f"Unsupported argument {name}; allowed are {(*_CLUSTER_IDS, *names)}")


def _cluster_id_name(given: Mapping[str, int]) -> str:
    return next(name for name in _CLUSTER_IDS if name in given)


DestinationKey = BlocksCacheKey | CacheKeyByIdAndIndex


class LayerSynchronizer(ABC):
    """A base class whose subclasses wait for the layers of a cache."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Wait until a layer holds its final values.

        Args:
            layer_index: index of the layer.
            timeout_in_millis: milliseconds; None: forever.

        Returns:
            True if the layer holds its final values.
        """


def check_layer_range(name: str, layer_range: range | None, allow_none: bool = True) -> None:
    """Check a range of layers.

    Raises:
        TypeError: the wrong type.
        LLMException: LLM_PARAM_INVALID: a step other than 1, an empty range, or a negative layer.
    """
    check_isinstance(name, layer_range, range, allow_none=allow_none)
    if layer_range is not None and (
        layer_range.step != 1 or not 0 <= layer_range.start < layer_range.stop
    ):
        raise invalid(
            f"{name}={layer_range} must be range(first, end), of step 1, with 0 <= first < end"
        )


def _checked_layers(name: str, layer_range: range | None) -> range | None:
    check_layer_range(name, layer_range)
    return layer_range


def _checked_addrs(name: str, addrs: list[int] | tuple[int, ...]) -> list[int] | tuple[int, ...]:
    check_isinstance(name, addrs, [list, tuple], int, allow_none=False)
    check_list_uint64(name, addrs)
    return addrs


def _checked_key(name: str, key: DestinationKey) -> DestinationKey:
    return check_isinstance(name, key, [BlocksCacheKey, CacheKeyByIdAndIndex])


class TransferConfig:
    """A destination named by its addresses.

    Args:
        dst_cluster_id: id of the peer.
        dst_addrs: an address at the peer for each tensor of `src_layer_range`, two for each layer.
        src_layer_range: local layers; None: all.
        src_batch_index: local slot.

    Raises:
        TypeError, ValueError: an argument of the wrong type or width.
        LLMException: LLM_PARAM_INVALID: a step other than 1, an empty range, or a negative layer.

    Attributes:
        dst_layer_range: None; `dst_addrs` takes its place.
    """

    dst_cluster_id = Checked[int](checked_by(check_uint64), "Id of the peer.")
    dst_addrs = Checked[list[int] | tuple[int, ...]](_checked_addrs, "An address for each tensor.")
    src_layer_range = Checked[range | None](_checked_layers, "Local layers; None: all.")
    src_batch_index = Checked[int](checked_by(check_uint32), "Local slot.")

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: list[int] | tuple[int, ...],
        src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index
        self.dst_layer_range: range | None = None

    def __repr__(self) -> str:
        return (
            f"TransferConfig(dst_cluster_id={self.dst_cluster_id}, dst_addrs={self.dst_addrs}, "
            f"src_layer_range={self.src_layer_range}, src_batch_index={self.src_batch_index})"
        )


class TransferWithCacheKeyConfig:
    """A destination named by the key of its cache.

    Args:
        cache_key: key of the remote cache.
        src_layer_range: local layers; required.
        dst_layer_range: remote layers, as many as local ones; required.
        src_batch_index: local slot; 0 with a BlocksCacheKey.

    Raises:
        TypeError, ValueError: an argument of the wrong type or width.
        LLMException: LLM_PARAM_INVALID: a step other than 1, an empty range, a negative layer,
            ranges of unequal length, or a slot with a BlocksCacheKey.

    Attributes:
        dst_cluster_id: cluster id of the cache_key that the constructor got.
    """

    cache_key = Checked[DestinationKey](_checked_key, "Key of the remote cache.")
    src_layer_range = Checked[range | None](_checked_layers, "Local layers.")
    dst_layer_range = Checked[range | None](_checked_layers, "Remote layers.")

    def __init__(
        self,
        cache_key: DestinationKey,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        check_isinstance(
            "cache_key", cache_key, [BlocksCacheKey, CacheKeyByIdAndIndex], allow_none=False
        )
        check_layer_range("src_layer_range", src_layer_range, allow_none=False)
        check_layer_range("dst_layer_range", dst_layer_range, allow_none=False)
        assert src_layer_range is not None
        assert dst_layer_range is not None
        if len(src_layer_range) != len(dst_layer_range):
            raise invalid(
                f"src_layer_range={src_layer_range} and dst_layer_range={dst_layer_range} must be "
                "of equal length"
            )
        self.cache_key = cache_key
        self.src_layer_range = src_layer_range
        self.dst_layer_range = dst_layer_range
        self.src_batch_index = src_batch_index
        self.dst_cluster_id: int = cache_key.cluster_id

    @property
    def src_batch_index(self) -> int:
        """Local slot."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, src_batch_index: int) -> None:
        check_uint32("src_batch_index", src_batch_index)
        if isinstance(self.cache_key, BlocksCacheKey) and src_batch_index != 0:
            raise invalid(f"src_batch_index={src_batch_index} must be 0 with {self.cache_key}")
        self._src_batch_index = src_batch_index

    def __repr__(self) -> str:
        return (
            f"TransferWithCacheKeyConfig(cache_key={self.cache_key}, "
            f"src_layer_range={self.src_layer_range}, dst_layer_range={self.dst_layer_range}, "
            f"src_batch_index={self.src_batch_index})"
        )


class AsyncTransfer(Protocol):
    """A background transfer to several destinations.

    Attributes:
        running_status: the status of a destination without an outcome.
    """

    running_status: LLMStatusCode

    def statuses(self, timeout_s: float | None) -> list[LLMStatusCode | None]:
        """Wait up to `timeout_s` seconds; return each status (None: no outcome yet)."""


class CacheTask:
    """The task that `transfer_cache_async` returns. Any thread may use or drop it.

    Args:
        transfer_async_task: the transfer.
    """

    def __init__(self, transfer_async_task: AsyncTransfer) -> None:
        self._transfer_async_task = transfer_async_task

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait for all destinations.

        Args:
            timeout_in_millis: milliseconds; None: forever.

        Returns:
            LLM_SUCCESS if every byte has arrived; LLM_TIMEOUT if a destination has no outcome yet
            or timed out; otherwise the status of the first failure.

        Raises:
            TypeError, ValueError: timeout_in_millis is not a uint32.
        """
        results = self.get_results(timeout_in_millis)
        running = self._transfer_async_task.running_status
        if running in results:
            return running
        failures = (status for status in results if status is not LLMStatusCode.LLM_SUCCESS)
        return next(failures, LLMStatusCode.LLM_SUCCESS)

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode]:
        """Wait for all destinations, and return the status of each, in the order of the configs.

        Args:
            timeout_in_millis: milliseconds; None: forever.

        Returns:
            LLM_SUCCESS if every byte has arrived; LLM_TIMEOUT without an outcome so far, or if
            the push was stopped after sync_kv_timeout.

        Raises:
            TypeError, ValueError: timeout_in_millis is not a uint32.
        """
        timeout_s = None
        if timeout_in_millis is not None:
            check_uint32("timeout_in_millis", timeout_in_millis)
            timeout_s = timeout_in_millis / 1000
        transfer = self._transfer_async_task
        statuses = transfer.statuses(timeout_s)
        return [transfer.running_status if status is None else status for status in statuses]
