"""Helpers for tests of the registry: descriptions, keys, a lease, and a peer's view of a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

import kvplan
from kvplan import (
    BlockLease,
    CacheDesc,
    CacheKey,
    DataType,
    LLMException,
    LLMStatusCode,
    Placement,
    Rows,
    Transfer,
)
from kvplan.engine.registry import CacheRegistry
from kvplan.lease import LeaseWord
from kvplan.links.local_engine import CacheEntry
from kvplan.transport.local import LocalTransport

_T = TypeVar("_T")

SLOTS = CacheDesc(num_tensors=2, shape=(4, 256), data_type=DataType.DT_UINT8)
BLOCKS = CacheDesc(num_tensors=2, shape=(16, 64), data_type=DataType.DT_UINT8)
ALL_TENSORS = range(2)
LEASE = BlockLease(
    7, bytes(range(16)), 3, 17, (5, 2, 900), True, "cmpl-3", (LeaseWord("local", 70_000, 9),)
)


def key(req_id: int, cluster_id: int = 7) -> CacheKey:
    return CacheKey(cluster_id, req_id)


def tried(call: Callable[[], _T]) -> tuple[_T | None, LLMStatusCode]:
    """Return the result of `call`, or None and the status of its refusal."""
    try:
        return call(), LLMStatusCode.LLM_SUCCESS
    except LLMException as error:
        return None, error.status_code


def free_nbytes(registry: CacheRegistry) -> int:
    return registry.pools.free_nbytes()[Placement.DEVICE]


def as_peer(transport: LocalTransport, entry: CacheEntry) -> Any:
    """Return the cache's memory as a peer reaches it by the published metadata."""
    desc = entry.cache.cache_desc
    link = transport.connect(entry.offered.metadata[transport.name])
    return link.memory(entry.cache.tensor_addrs, desc.tensor_nbytes)


def pulled(transport: LocalTransport, entry: CacheEntry) -> list[int]:
    """Return the first byte of each tensor, as a peer reads it."""
    desc = entry.cache.cache_desc
    into = [np.zeros(desc.shape, np.uint8) for _ in range(desc.num_tensors)]
    plan = kvplan.plan(Transfer(Rows(desc), Rows(desc)), local="dst")
    kvplan.execute(plan, src=as_peer(transport, entry), dst=into)
    return [int(tensor.flat[0]) for tensor in into]
