"""The names that snippets in a `Peer` can use: official names only."""

import gc
from typing import Any

import numpy as np

from kvplan import llm_datadist
from kvplan.llm_datadist import CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole
from tests.llm_datadist import contents

NAMES = (
    "BlocksCacheKey Cache CacheKey CacheKeyByIdAndIndex LLMClusterInfo LLMException LLMStatusCode "
    "LayerSynchronizer MemInfo Memtype Placement RegisterMemStatus TransferConfig "
    "TransferWithCacheKeyConfig"
)


def start(cluster_id, role, options):
    config = LLMConfig()
    config.listen_ip_info = "127.0.0.1:0"
    config.mem_pool_cfg = config.host_mem_pool_cfg = '{"memory_size": 8388608}'
    config.enable_cache_manager = True
    datadist = LLMDataDist(LLMRole[role], cluster_id)
    datadist.init(config.generate_options() | options)
    return datadist


def desc(num_tensors, rows, nbytes=32, **more):
    return CacheDesc(num_tensors, [rows, nbytes], DataType.DT_UINT8, **more)


def names() -> dict[str, Any]:
    """Return the names; one client follows another."""
    known: dict[str, Any] = {name: getattr(llm_datadist, name) for name in NAMES.split()}

    def forget() -> None:
        """Finalize the client, and delete all that a test has made."""
        if LLMDataDist.llm_engine_instance is not None:
            LLMDataDist.llm_engine_instance.finalize()
        for key in known.keys() - kept:
            del known[key]
        gc.collect()

    known |= {"np": np, "start": start, "desc": desc, "forget": forget, **vars(contents)}
    kept = {*known, "result", "__builtins__"}
    return known
