"""Stand-ins for the modules of vLLM that `kvplan.vllm.connector` imports, if vLLM is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NAMES = {
    "torch": ["Tensor"],
    "vllm": [],
    "vllm.config": ["VllmConfig"],
    "vllm.distributed": [
        "get_pcp_group",
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
    "vllm.model_executor": [],
    "vllm.model_executor.layers": [],
    "vllm.model_executor.layers.mamba": [],
    "vllm.model_executor.layers.mamba.mamba_utils": ["is_conv_state_dim_first"],
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
        "MLAAttentionSpec",
        "MambaSpec",
        "SlidingWindowSpec",
    ],
    "vllm.v1.metrics": [],
    "vllm.v1.metrics.cache_hit_source": ["CacheHitSource"],
    "vllm.v1.outputs": ["KVConnectorOutput"],
    "vllm.v1.request": ["Request"],
}


INTERFACE = """
bind_connector_metadata(connector_metadata)
build_connector_meta(scheduler_output)
build_kv_connector_stats(data)
build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
get_block_ids_with_load_errors()
get_handshake_metadata()
get_kv_connector_stats()
get_loaded_kv_cache_group_ids(request)
get_num_new_matched_tokens(request, num_computed_tokens)
get_transfer_results(finished_req_ids)
on_new_request(request)
register_kv_caches(kv_caches)
request_finished(request, block_ids)
request_finished_all_groups(request, block_ids)
save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
set_xfer_handshake_metadata_pp_aware(metadata)
shutdown()
start_load_kv(forward_context, **kwargs)
supports_sleep_mode(kv_transfer_config)
update_connector_output(connector_output)
update_state_after_alloc(request, blocks, num_external_tokens)
wait_for_layer_load(layer_name)
wait_for_save()
"""
"""The methods of vLLM 0.33's KVConnectorBase_V1 and SupportsHMA that the connector has."""

SET_UP = Path(__file__).parents[2] / "build/vllm/env/bin/python"
PYTHON = Path(sys.executable) if find_spec("vllm") is not None else SET_UP
"""A Python with vLLM, if it exists: this one, or that of `make vllm-setup`."""
NEEDS_VLLM = pytest.mark.skipif(
    not PYTHON.exists(), reason="vLLM is not installed here: make vllm-setup"
)
NEXT = Path(__file__).parents[2] / "build/vllm/next"
"""The Python of vLLM 0.33 (`make vllm-next`), which uses the kernels of 0.32."""
VERSIONS = [
    pytest.param({}, id="0.32"),
    pytest.param(
        {"PYTHONPATH": str(NEXT), "VLLM_TARGET_DEVICE": "cpu"},
        id="0.33",
        marks=pytest.mark.skipif(not NEXT.exists(), reason="vLLM 0.33 is not here: make vllm-next"),
    ),
]
"""Variables of the environment with which `PYTHON` imports each version."""


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
