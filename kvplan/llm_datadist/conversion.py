"""Converts official values to the engine's."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Address
from typing import overload

import kvplan
from kvplan.layout import OPAQUE
from kvplan.links import ClusterInfo, IpInfo
from kvplan.llm_datadist.configs import LLMClusterInfo
from kvplan.llm_datadist.utils.utils import check_isinstance
from kvplan.llm_datadist.v2.llm_types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
)
from kvplan.status import LLMException, invalid
from kvplan.types import MAX_FORMAT
from kvplan.validation import UINT32_MAX, UINT64_MAX, shown

AnyKey = CacheKey | BlocksCacheKey | CacheKeyByIdAndIndex


def desc_of(cache_desc: CacheDesc) -> kvplan.CacheDesc:
    """Return the description; refuse one without data type or placement, or that cannot be made.

    A format that would say of a row what the original does not read is only compared.
    """
    check_isinstance("placement", cache_desc.placement, kvplan.Placement, allow_none=False)
    if cache_desc.data_type is None:
        raise TypeError(f"{cache_desc} has no data_type")
    plain = kvplan.CacheDesc(
        int(cache_desc.num_tensors),
        tuple(int(it) for it in cache_desc.shape),
        kvplan.DataType(cache_desc.data_type.value),
        cache_desc.placement,
        seq_len_dim_index=int(cache_desc.seq_len_dim_index),
    )
    text = cache_desc.kv_tensor_format
    if text is None:
        return plain
    with suppress(LLMException):  # it is no layout, or not of this shape
        named = replace(plain, kv_tensor_format=text)
        layout = named.layout
        if layout is None or (layout.row_axis == 0 and "layer" not in layout.axes):
            return named
    return replace(plain, kv_tensor_format=f"{OPAQUE}{text}"[:MAX_FORMAT])


def cache_of(cache: Cache) -> kvplan.Cache:
    """Return the engine's cache; for one with an id, the one that its manager kept."""
    if cache._engine_cache is not None:
        return cache._engine_cache
    addrs = tuple(int(it) for it in cache.tensor_addrs) if cache.cache_id == -1 else ()
    return kvplan.Cache(desc_of(cache.cache_desc), int(cache.cache_id), addrs)


@overload
def key_of(key: CacheKey) -> kvplan.CacheKey: ...
@overload
def key_of(key: BlocksCacheKey) -> kvplan.BlocksCacheKey: ...
@overload
def key_of(key: CacheKeyByIdAndIndex) -> kvplan.CacheKeyByIdAndIndex: ...
def key_of(
    key: AnyKey,
) -> kvplan.CacheKey | kvplan.BlocksCacheKey | kvplan.CacheKeyByIdAndIndex:
    """Return the key; TypeError if ids of a BlocksCacheKey are not uint64, as in the original."""
    if isinstance(key, CacheKey):
        return kvplan.CacheKey(
            int(key.cluster_id), int(key.req_id), int(key.model_id), int(key.prefix_id)
        )
    if isinstance(key, CacheKeyByIdAndIndex):
        return kvplan.CacheKeyByIdAndIndex(
            int(key.cluster_id), int(key.cache_id), int(key.batch_index)
        )
    check_isinstance("cache_key", key, BlocksCacheKey, allow_none=False)
    for name in ("cluster_id", "model_id"):
        number = check_isinstance(name, getattr(key, name), int, allow_none=False)
        if not 0 <= number <= UINT64_MAX:
            raise TypeError(f"{name}={number} of {key} is out of range [0, 2**64)")
    return kvplan.BlocksCacheKey(int(key.cluster_id), int(key.model_id))


def cluster_of(cluster: LLMClusterInfo) -> ClusterInfo:
    """Return the cluster with its remote addresses; local ones and the role are not used."""
    check_isinstance("remote_cluster_id", cluster.remote_cluster_id, int, allow_none=False)
    remote = [IpInfo(_text_of(ip), int(port)) for ip, port in cluster.remote_ip_info_list]
    return ClusterInfo(int(cluster.remote_cluster_id), remote)


def _text_of(ip: int | None) -> str:
    if ip is None or not 0 <= ip <= UINT32_MAX:
        raise invalid(f"ip={shown(ip)} is out of range [0, 2**32)")
    return str(IPv4Address(int(ip).to_bytes(4, "little")))
