"""The Python interface of LLM-DataDist, over kvplan's engine.

This package has the names, arguments, outcomes and module paths of the official `llm_datadist`
(docs/reference/llm_datadist-differences.md lists the differences). Programs import this package,
call `install()`, or run unchanged under `python -m kvplan.run`. Logic of transfers does not belong
here.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvplan.llm_datadist.configs import LLMClusterInfo, LlmConfig, LLMRole
    from kvplan.llm_datadist.configs import LlmConfig as LLMConfig
    from kvplan.llm_datadist.data_type import DataType
    from kvplan.llm_datadist.installation import in_use as in_use
    from kvplan.llm_datadist.installation import install as install
    from kvplan.llm_datadist.installation import installed as installed
    from kvplan.llm_datadist.installation import uninstall as uninstall
    from kvplan.llm_datadist.status import LLMException, LLMStatusCode, Status
    from kvplan.llm_datadist.v2.llm_datadist import LLMDataDist
    from kvplan.llm_datadist.v2.llm_datadist import permit_several_engines as permit_several_engines
    from kvplan.llm_datadist.v2.llm_types import (
        BlocksCacheKey,
        Cache,
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

__all__ = [  # noqa: RUF022 the order of the official package
    "LLMClusterInfo",
    "LLMStatusCode",
    "LLMException",
    "LLMRole",
    "LlmConfig",
    "LLMConfig",
    "DataType",
    "Status",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "KvCache",
    "Cache",
    "BlocksCacheKey",
    "LLMDataDist",
    "Placement",
    "RegisterMemStatus",
    "LayerSynchronizer",
    "TransferConfig",
    "CacheTask",
    "TransferWithCacheKeyConfig",
    "Memtype",
    "MemInfo",
]

v2_list = __all__
"""The names of version 2, as in the official package."""

# Importing the official package sets this variable, and programs may read it.
os.environ.setdefault("AUTO_USE_UC_MEMORY", "0")

_ROOMS = {
    "configs": "LLMClusterInfo LLMRole LlmConfig LLMConfig",
    "data_type": "DataType",
    "installation": "in_use install installed uninstall",
    "status": "LLMException LLMStatusCode Status",
    "v2.llm_datadist": "LLMDataDist permit_several_engines",
    "v2.llm_types": "BlocksCacheKey Cache CacheDesc CacheKey CacheKeyByIdAndIndex CacheTask "
    "KvCache LayerSynchronizer MemInfo Memtype Placement RegisterMemStatus TransferConfig "
    "TransferWithCacheKeyConfig",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}
_MODULES = {*_ROOMS, "utils", "v2"}


def __getattr__(name: str) -> Any:
    # Lazy, because the launcher imports this package for every program.
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
