"""Version 1 of the original (`llm_datadist_v1`): its own names, and those of version 2."""

from kvplan.llm_datadist.configs import LLMClusterInfo, LLMConfig, LlmConfig, LLMRole
from kvplan.llm_datadist.data_type import DataType
from kvplan.llm_datadist.status import LLMException, LLMStatusCode, Status
from kvplan.llm_datadist.v1.kv_cache_manager import KvCacheManager
from kvplan.llm_datadist.v1.tensor import Tensor, TensorDesc
from kvplan.llm_datadist.v2.llm_datadist import LLMDataDist
from kvplan.llm_datadist.v2.llm_types import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    KvCache,
    LayerSynchronizer,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

__all__ = [
    "BlocksCacheKey",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheTask",
    "DataType",
    "KvCache",
    "KvCacheManager",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMRole",
    "LLMStatusCode",
    "LayerSynchronizer",
    "LlmConfig",
    "MemInfo",
    "Memtype",
    "Placement",
    "RegisterMemStatus",
    "Status",
    "Tensor",
    "TensorDesc",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
]
