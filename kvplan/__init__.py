"""kvplan: plan, read, test and execute transfers of an LLM's KV cache.

Planning needs only NumPy and msgspec. The first use of `submit`, `execute` or `HostMemory` loads
the native part; that of `LlmDataDist` or `ClusterInfo` also loads the sockets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Imported first, not deep in our own imports: at the edge of a 16 KiB chunk of CPython 3.11's
# stack, each call maps and unmaps a chunk, and NumPy's import takes a fifth longer.
import numpy as _numpy  # noqa: F401, ICN001

from kvplan.layout import CacheLayout, Interleaved, Shard
from kvplan.planning import Coalesce, Part, Plan, load_plan
from kvplan.planning.planner import plan
from kvplan.planning.transfer import PeerTensors, Planned, Rows, Transfer
from kvplan.status import LLMException, LLMStatusCode
from kvplan.types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCacheExtParam,
    LlmRole,
    Placement,
    RemoteCache,
)

if TYPE_CHECKING:
    from kvplan.engine.datadist import LlmDataDist
    from kvplan.engine.layer_event import LayerEvent
    from kvplan.engine.notifications import Notification, Notifications
    from kvplan.engine.operation import RunOptions, SubmitOptions, TransferOptions
    from kvplan.engine.options import Options
    from kvplan.engine.pools import PoolConfig
    from kvplan.engine.queues import Completions
    from kvplan.engine.ranges import AddressRanges
    from kvplan.engine.runner import PlanEvent
    from kvplan.execution import (
        ComputeEvent,
        ComputeStream,
        GatherError,
        GatherTask,
        HostMemory,
        LayerGatherTask,
        LayerProgress,
        LayerTask,
        Transfers,
        TransferTask,
        execute,
        submit,
    )
    from kvplan.lease import BlockLease, LeaseEnd
    from kvplan.links import (
        ClusterInfo,
        IpInfo,
        LinkResult,
        LinkResults,
        LinkState,
        LinkStatus,
        RegisterMemStatus,
    )
    from kvplan.planning import reference

__version__ = "0.1.0"

__all__ = [
    "AddressRanges",
    "BlockLease",
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheIndex",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheLayout",
    "ClusterInfo",
    "Coalesce",
    "Completions",
    "ComputeEvent",
    "ComputeStream",
    "DataType",
    "GatherError",
    "GatherTask",
    "HostMemory",
    "Interleaved",
    "IpInfo",
    "KvCacheExtParam",
    "LLMException",
    "LLMStatusCode",
    "LayerEvent",
    "LayerGatherTask",
    "LayerProgress",
    "LayerTask",
    "LeaseEnd",
    "LinkResult",
    "LinkResults",
    "LinkState",
    "LinkStatus",
    "LlmDataDist",
    "LlmRole",
    "Notification",
    "Notifications",
    "Options",
    "Part",
    "PeerTensors",
    "Placement",
    "Plan",
    "PlanEvent",
    "Planned",
    "PoolConfig",
    "RegisterMemStatus",
    "RemoteCache",
    "Rows",
    "RunOptions",
    "Shard",
    "SubmitOptions",
    "Transfer",
    "TransferOptions",
    "TransferTask",
    "Transfers",
    "execute",
    "load_plan",
    "plan",
    "reference",
    "submit",
]

_LAZY = {
    name: room
    for room, names in {
        "kvplan.execution": "ComputeEvent ComputeStream GatherError GatherTask HostMemory "
        "LayerGatherTask LayerProgress LayerTask TransferTask Transfers execute submit",
        "kvplan.engine.queues": "Completions",
        "kvplan.engine.datadist": "LlmDataDist",
        "kvplan.engine.layer_event": "LayerEvent",
        "kvplan.lease": "BlockLease LeaseEnd",
        "kvplan.links": "ClusterInfo IpInfo LinkResult LinkResults LinkState LinkStatus "
        "RegisterMemStatus",
        "kvplan.engine.notifications": "Notification Notifications",
        "kvplan.engine.options": "Options",
        "kvplan.engine.pools": "PoolConfig",
        "kvplan.engine.ranges": "AddressRanges",
        "kvplan.engine.operation": "RunOptions SubmitOptions TransferOptions",
        "kvplan.engine.runner": "PlanEvent",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name == "reference":
        return import_module("kvplan.planning.reference")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
