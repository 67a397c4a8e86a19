"""Caches of this process, and their descriptions."""

from __future__ import annotations

from typing import Any, Protocol

from kvplan.llm_datadist.data_type import DataType, calc_tensor_size
from kvplan.llm_datadist.utils import log
from kvplan.llm_datadist.utils.utils import (
    Field,
    check_int32,
    check_int64,
    check_isinstance,
    check_list_int64,
    check_uint32,
)
from kvplan.status import LLMException, invalid
from kvplan.types import Cache as EngineCache
from kvplan.types import Placement


class CacheDesc:
    """The shape of a cache: `num_tensors` tensors of equal `shape` and `data_type`.

    Args:
        num_tensors: number of tensors.
        shape: shape of each tensor; the object is kept.
        data_type: type of an element.
        placement: host or device memory.
        batch_dim_index: the dimension that counts slots or blocks. The engine uses the first.
        seq_len_dim_index: the dimension of the sequence; -1: none.
        kv_tensor_format: name of the layout; None: none.

    Raises:
        TypeError, ValueError: an argument of the wrong type or width.
        LLMException: LLM_PARAM_INVALID: a dimension index out of range.
    """

    num_tensors = Field[int]("Number of tensors.")
    shape = Field[list[int] | tuple[int, ...]]("Shape of each tensor.")
    data_type = Field[DataType]("Type of an element.")
    placement = Field[Placement]("Host or device memory.")
    batch_dim = Field[int]("The dimension that counts slots or blocks.")
    batch_size = Field[int]("Number of slots or blocks.")
    seq_len_dim_index = Field[int]("The dimension of the sequence; -1: none.")
    kv_tensor_format = Field[str | None]("Name of the layout; None: none.")

    def __init__(
        self,
        num_tensors: int,
        shape: tuple[int, ...] | list[int],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        check_uint32("num_tensors", num_tensors)
        check_isinstance("shape", shape, [tuple, list], int, allow_none=False)
        check_isinstance("data_type", data_type, DataType)
        check_isinstance("placement", placement, Placement)
        check_isinstance("batch_dim_index", batch_dim_index, int, allow_none=False)
        check_int32("seq_len_dim_index", seq_len_dim_index)
        check_isinstance("kv_tensor_format", kv_tensor_format, str)
        dims = len(shape)
        if not 0 <= batch_dim_index < dims:
            raise invalid(f"batch_dim_index={batch_dim_index} is out of range [0, {dims})")
        if not -1 <= seq_len_dim_index < dims:
            raise invalid(
                f"seq_len_dim_index={seq_len_dim_index} must be -1 or in range [0, {dims})"
            )
        check_list_int64("shape", shape)
        self._num_tensors = num_tensors
        self._shape = shape
        self._data_type = data_type
        self._placement = placement
        self._batch_dim = batch_dim_index
        self._batch_size = shape[batch_dim_index]
        self._seq_len_dim_index = seq_len_dim_index
        self._kv_tensor_format = kv_tensor_format
        self._size = -1

    @property
    def size(self) -> int:
        """Bytes of one tensor.

        Raises:
            LLMException: LLM_PARAM_INVALID: a dimension below 1, or a size beyond int64.
        """
        if self._size < 0:
            self._size = calc_tensor_size(self.shape, self.data_type.value)
            if self._size < 0:
                raise invalid(
                    f"shape={self.shape} of {self.data_type} has no size: each dimension must be "
                    ">= 1, and all together below 2**63 bytes"
                )
        return self._size

    def update_dim(self, dim_index: int, dim_value: int) -> None:
        """Change a dimension of a shape that is a list; `batch_size` does not change.

        Raises:
            TypeError: the shape is a tuple.
            IndexError: dim_index is out of range.
        """
        self._shape[dim_index] = dim_value  # type: ignore[index]
        self._size = -1

    def __repr__(self) -> str:
        return (
            f"CacheDesc(num_tensors={self.num_tensors}, shape={self.shape}, "
            f"data_type={self.data_type}, placement={self.placement}, "
            f"batch_dim_index={self.batch_dim}, seq_len_dim_index={self.seq_len_dim_index},"
            f"kv_tensor_format={self.kv_tensor_format})"
        )


class Cache:
    """A cache of this process, made by a `CacheManager`.

    Args:
        cache_id: its id; -1: none.
        cache_desc: its description.
        tensor_addrs: an address for each tensor.
        cache_manager: the manager that made it; None: none.
        is_registered: True if the caller owns its memory.
        is_blocks_cache: True if it is paged.

    Raises:
        TypeError, ValueError: cache_id is not an int64.
    """

    cache_id = Field[int]("Its id; -1: none.")
    cache_desc = Field[CacheDesc]("Its description.")
    tensor_addrs = Field[list[int]]("An address for each tensor; empty after deallocation.")
    is_blocks_cache = Field[bool]("True if it is paged.")

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        tensor_addrs: list[int],
        cache_manager: Any,
        is_registered: bool,
        is_blocks_cache: bool,
    ) -> None:
        check_int64("cache_id", cache_id)
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._engine_cache: EngineCache | None = None  # as its manager made it
        self._tensor_addrs = tensor_addrs
        self._cache_manager = cache_manager
        self._is_blocks_cache = is_blocks_cache
        self._valid = True

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int]) -> Cache:
        """Return a paged cache without an id over the caller's memory, for `swap_blocks`.

        Args:
            cache_desc: its description, of Placement.HOST.
            addrs: an address for each tensor.

        Raises:
            TypeError: an argument of the wrong type.
            LLMException: LLM_PARAM_INVALID: another placement, or a wrong number of addresses.
        """
        check_isinstance("cache_desc", cache_desc, CacheDesc, allow_none=False)
        check_isinstance("addrs", addrs, list, int, allow_none=False)
        _check_host(cache_desc)
        _check_count("addrs", addrs, cache_desc)
        return cls(-1, cache_desc, addrs, None, False, True)

    def __repr__(self) -> str:
        return (
            f"Cache(cache_id = {self.cache_id}, device_tensor_addrs = {len(self.tensor_addrs)}, "
            f"is_blocks_cache = {self.is_blocks_cache})"
        )


class KvCacheOwner(Protocol):
    """The owner of a `KvCache`."""

    def is_initialized(self) -> bool:
        """Return True if the owner can deallocate caches."""

    def deallocate_cache(self, cache: KvCache) -> None:
        """Deallocate a cache."""


class KvCache:
    """A cache of version 1. Its manager deallocates the cache with its last reference.

    Args:
        cache_id: its id; -1: none.
        cache_desc: its description.
        per_device_tensor_addrs: for each device an address for each tensor.
        kv_cache_manager: the manager that made it; None: none.

    Raises:
        TypeError, ValueError: cache_id is not an int64.
    """

    cache_id = Field[int]("Its id; -1: none.")
    cache_desc = Field[CacheDesc]("Its description.")
    per_device_tensor_addrs = Field[list[list[int]]]("For each device an address for each tensor.")

    _valid = False

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        per_device_tensor_addrs: list[list[int]],
        kv_cache_manager: KvCacheOwner | None,
    ) -> None:
        check_int64("cache_id", cache_id)
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._per_device_tensor_addrs = per_device_tensor_addrs
        self._kv_cache_manager = kv_cache_manager
        self._valid = True

    def __del__(self) -> None:
        if not self._valid:
            return
        manager = self._kv_cache_manager
        if manager is not None and manager.is_initialized():
            try:
                manager.deallocate_cache(self)
            except LLMException as error:
                log.error("could not deallocate %s: %s", self, error)

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int] | list[list[int]]) -> KvCache:
        """Return a cache without an id over the caller's memory; no method of kvplan takes it.

        Args:
            cache_desc: its description, of Placement.HOST.
            addrs: an address for each tensor, or such a list for each device.

        Raises:
            TypeError: an argument of the wrong type.
            LLMException: LLM_PARAM_INVALID: another placement, or a wrong number of addresses.
        """
        check_isinstance("cache_desc", cache_desc, CacheDesc, allow_none=False)
        _check_host(cache_desc)
        check_isinstance("addrs", addrs, list, allow_none=False)
        if not addrs:
            raise invalid("addrs is empty; give an address for each tensor")
        for position, each in enumerate(addrs):
            check_isinstance(f"addrs[{position}]", each, [list, int], allow_none=False)
            if isinstance(each, list):
                check_isinstance(f"addrs[{position}]", each, list, int)
                _check_count(f"addrs[{position}]", each, cache_desc)
        of_devices = [each for each in addrs if isinstance(each, list)]
        if not of_devices:
            of_devices = [[each for each in addrs if isinstance(each, int)]]
            _check_count("addrs", addrs, cache_desc)
        elif len(of_devices) != len(addrs):
            raise invalid("addrs should be consistent: either addresses, or lists of addresses")
        return cls(-1, cache_desc, of_devices, None)

    def __repr__(self) -> str:
        devices = len(self.per_device_tensor_addrs)
        return f"KvCache(cache_id = {self.cache_id}, num_devices = {devices})"


def _check_host(cache_desc: CacheDesc) -> None:
    if cache_desc.placement != Placement.HOST:
        raise invalid(f"placement={cache_desc.placement} must be {Placement.HOST}")


def _check_count(name: str, addrs: list[Any], cache_desc: CacheDesc) -> None:
    if len(addrs) != cache_desc.num_tensors:
        raise invalid(
            f"{name} has {len(addrs)} addresses; num_tensors={cache_desc.num_tensors} are needed"
        )
