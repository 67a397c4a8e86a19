"""The values of the interface, by the path that programs import them from."""

from __future__ import annotations

from enum import Enum

from kvplan.links import RegisterMemStatus
from kvplan.llm_datadist.fields import Field
from kvplan.llm_datadist.utils.utils import check_isinstance
from kvplan.llm_datadist.v2.cache_keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from kvplan.llm_datadist.v2.cache_task import CacheTask
from kvplan.llm_datadist.v2.caches import Cache, CacheDesc, KvCache
from kvplan.llm_datadist.v2.transfer_configs import (
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
    check_layer_range,
)
from kvplan.types import Placement

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

int_to_mem_status_dict = {it.value: it for it in RegisterMemStatus}


class PushType(Enum):
    """How a destination is named to the original's C++ part."""

    NO_CACHE_KEY = 0
    BLOCKS_CACHE_KEY = 1
    CACHE_KEY_BY_ID = 2


class Memtype(Enum):
    """Where memory is."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class MemInfo:
    """A range of memory.

    Args:
        mem_type: where it is.
        addr: where it begins.
        size: its bytes.

    Raises:
        TypeError: an argument of another type.
    """

    mem_type = Field[Memtype]("Where it is.")
    addr = Field[int]("Where it begins.")
    size = Field[int]("Its bytes.")

    def __init__(self, mem_type: Memtype, addr: int, size: int) -> None:
        check_isinstance("mem_type", mem_type, Memtype)
        check_isinstance("addr", addr, int)
        check_isinstance("size", size, int)
        self._mem_type = mem_type
        self._addr = addr
        self._size = size

    def __repr__(self) -> str:
        return f"MemInfo(mem_type={self.mem_type}, addr={self.addr}, size={self.size})"
