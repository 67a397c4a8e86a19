"""Stand-ins for the modules of vLLM that `kvplan.vllm.connector` imports, where vLLM is not."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

NAMES = {
    "torch": ["Tensor"],
    "vllm": [],
    "vllm.config": ["VllmConfig"],
    "vllm.distributed": [
        "get_pp_group",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size",
    ],
    "vllm.distributed.kv_transfer": [],
    "vllm.distributed.kv_transfer.kv_connector": [],
    "vllm.distributed.kv_transfer.kv_connector.v1": [],
    "vllm.distributed.kv_transfer.kv_connector.v1.base": [
        "KVConnectorBase_V1",
        "KVConnectorHandshakeMetadata",
        "KVConnectorMetadata",
        "KVConnectorRole",
        "KVConnectorTransferResults",
        "SupportsHMA",
    ],
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": [
        "KVConnectorPromMetrics",
        "KVConnectorStats",
        "PromMetric",
        "PromMetricT",
    ],
    "vllm.distributed.utils": ["get_pp_indices"],
    "vllm.platforms": ["current_platform"],
    "vllm.v1": [],
    "vllm.v1.core": [],
    "vllm.v1.core.kv_cache_manager": ["KVCacheBlocks"],
    "vllm.v1.core.kv_cache_utils": ["generate_block_hash_extra_keys"],
    "vllm.v1.core.sched": [],
    "vllm.v1.core.sched.output": ["SchedulerOutput"],
    "vllm.v1.kv_cache_interface": [
        "FullAttentionSpec",
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "SlidingWindowSpec",
    ],
    "vllm.v1.metrics": [],
    "vllm.v1.metrics.cache_hit_source": ["CacheHitSource"],
    "vllm.v1.outputs": ["KVConnectorOutput"],
    "vllm.v1.request": ["Request"],
}


def install() -> dict[str, Any]:
    """Put the stand-ins where imports find them; each name is a class of its own."""
    made: dict[str, Any] = {}
    for module, names in NAMES.items():
        sys.modules[module] = found = ModuleType(module)
        found.__path__ = []  # type: ignore[attr-defined]
        for name in names:
            made[name] = type(name, (), {"P2P": "p2p"} if name == "CacheHitSource" else {})
            setattr(found, name, made[name])
    return made
