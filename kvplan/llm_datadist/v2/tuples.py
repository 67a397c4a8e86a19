"""Converts the tuples that the original's Python part passes to its C++ part.

Each type here is a tuple; its fields are listed in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import kvplan
from kvplan.llm_datadist.configs import LLMClusterInfo
from kvplan.llm_datadist.v2.llm_types import PushType
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.transfer import PeerTensors
from kvplan.status import invalid
from kvplan.types import KvCacheExtParam

CacheDesc = tuple[int, int, int, Sequence[int], int, bool]
"""Number of tensors, data type, dimension of the sequence, shape, placement, whether paged."""

CacheKey = tuple[int, int, int, int, int, int, bool]
"""Cluster, cache id (-1: none), slot, request, prefix, model, whether it is of a paged cache."""

Cache = tuple[int, list[list[int]]]
"""Id (-1: none), and for each device an address for each tensor."""

PullParam = tuple[
    int, int, Sequence[int], Sequence[int], Sequence[int], Sequence[int], int, int, int
]
"""Bytes (-1: all), slot, blocks there, blocks here, tensors there, tensors here (none: all), offset
there, offset here (-1: none), tensors per layer."""

CopyParam = tuple[int, int, int, int, int, int, int, Sequence[tuple[int, int]]]
"""Id to, id from, slot to, slot from, offset, bytes, request, pairs of blocks (from, to)."""

TransferConfig = tuple[int, int, int, Sequence[int], int, int, int, int, int, int]
"""Cache id, slot, layer, addresses there, cluster, model or cache id there, slot there, number of a
PushType, layer there, tensors per layer."""

BlockConfig = tuple[int, Sequence[int], Sequence[int]]
"""Bytes of a block there, blocks here, blocks there."""

Cluster = tuple[int, int, Sequence[tuple[int, int]], Sequence[tuple[int, int]]]
"""Id, role, (ip, port) of this process, (ip, port) of the peer."""

NO_CACHE: Final[Cache] = (-1, [])

_ANY = kvplan.CacheDesc(1, (1,), kvplan.DataType.DT_INT8)


def desc_of(packed: CacheDesc) -> tuple[kvplan.CacheDesc, bool]:
    """Return the description, and whether the cache is paged; refuse unknown numbers."""
    num_tensors, data_type, seq_len_dim, shape, placement, is_blocks = packed
    try:
        kinds = kvplan.DataType(data_type), kvplan.Placement(placement)
    except ValueError as error:
        raise invalid(str(error)) from None
    desc = kvplan.CacheDesc(num_tensors, tuple(shape), *kinds, seq_len_dim_index=seq_len_dim)
    return desc, bool(is_blocks)


def cache_called(engine: kvplan.LlmDataDist, cache_id: int) -> kvplan.Cache:
    """Return a cache of the engine by its id; one that is not there is refused where it is used."""
    entry = engine._running().registry.living.get(cache_id)
    return kvplan.Cache(_ANY, cache_id) if entry is None else entry.cache


def key_of(
    packed: CacheKey,
) -> kvplan.CacheKey | kvplan.BlocksCacheKey | kvplan.CacheKeyByIdAndIndex:
    """Return the key."""
    cluster_id, cache_id, slot, req_id, prefix_id, model_id, is_blocks = packed
    if is_blocks:
        return kvplan.BlocksCacheKey(cluster_id, model_id)
    if cache_id != -1:
        return kvplan.CacheKeyByIdAndIndex(cluster_id, cache_id, slot)
    return kvplan.CacheKey(cluster_id, req_id, model_id, prefix_id)


def request_keys_of(packed: Sequence[CacheKey]) -> list[kvplan.CacheKey]:
    """Return keys of requests; refuse one of another kind."""
    keys = [key_of(it) for it in packed]
    if wrong := [it for it in keys if not isinstance(it, kvplan.CacheKey)]:
        raise invalid(f"{wrong[0]} must be the key of a request")
    return [it for it in keys if isinstance(it, kvplan.CacheKey)]


def blocks_key_of(packed: Sequence[CacheKey]) -> kvplan.BlocksCacheKey | None:
    """Return the key of a paged cache, if there is one; refuse several, or another kind."""
    keys = [key_of(it) for it in packed]
    if not keys:
        return None
    if len(keys) > 1 or not isinstance(keys[0], kvplan.BlocksCacheKey):
        raise invalid(f"a paged cache has one key, a BlocksCacheKey; not {keys}")
    return keys[0]


def layers_of(
    src_tensors: Sequence[int], dst_tensors: Sequence[int], tensors_per_layer: int
) -> KvCacheExtParam:
    """Return layers for tensors, all where none are named; refuse tensors of a part of a layer."""
    if tensors_per_layer < 1:
        raise invalid(f"tensors per layer={tensors_per_layer} must be > 0")
    if not src_tensors and not dst_tensors:
        return ALL_LAYERS
    src, dst = (_layers(it, tensors_per_layer) for it in (src_tensors, dst_tensors))
    return KvCacheExtParam(src, dst, tensors_per_layer)


def _layers(tensors: Sequence[int], tensors_per_layer: int) -> range | None:
    if not tensors:
        return None
    layers = range(tensors[0] // tensors_per_layer, tensors[-1] // tensors_per_layer + 1)
    whole = range(layers.start * tensors_per_layer, layers.stop * tensors_per_layer)
    if list(tensors) != list(whole):
        raise invalid(f"tensors {list(tensors)} are not layers of {tensors_per_layer}")
    return layers


def blocks_at(
    cache: Cache, num_blocks: int, block_nbytes: int, placement: kvplan.Placement
) -> kvplan.Cache:
    """Return the paged cache at addresses of one device, to the end of its first `num_blocks`."""
    _, per_device = cache
    if len(per_device) != 1:
        raise invalid(f"addresses of {len(per_device)} devices; there must be one")
    (addrs,) = per_device
    shape = (num_blocks, block_nbytes)
    desc = kvplan.CacheDesc(len(addrs), shape, kvplan.DataType.DT_INT8, placement)
    return kvplan.Cache(desc, -1, tuple(addrs))


def destination_of(
    packed: TransferConfig, block_nbytes: int
) -> tuple[kvplan.CacheIndex | kvplan.BlocksCacheKey | PeerTensors, KvCacheExtParam]:
    """Return where one layer goes, and which it is; refuse an unknown PushType."""
    _, _, layer, addrs, cluster_id, of_peer, slot, push_type, dst_layer, per_layer = packed
    src, dst = range(layer, layer + 1), range(dst_layer, dst_layer + 1)
    if push_type == PushType.NO_CACHE_KEY.value:
        to = PeerTensors(cluster_id, tuple(addrs), block_nbytes or None)
        return to, KvCacheExtParam(src, None, per_layer)
    if push_type == PushType.BLOCKS_CACHE_KEY.value:
        return kvplan.BlocksCacheKey(cluster_id, of_peer), KvCacheExtParam(src, dst, per_layer)
    if push_type == PushType.CACHE_KEY_BY_ID.value:
        to_slot = kvplan.CacheIndex(cluster_id, of_peer, slot)
        return to_slot, KvCacheExtParam(src, dst, per_layer)
    raise invalid(f"push type {push_type} is not one of {[it.value for it in PushType]}")


def clusters_of(packed: Sequence[Cluster]) -> list[LLMClusterInfo]:
    """Return clusters to link with."""
    clusters = []
    for cluster_id, role, local, remote in packed:
        cluster = LLMClusterInfo()
        cluster.remote_cluster_id = cluster_id
        cluster.remote_role_type = role
        for ip, port in local:
            cluster.append_local_ip_info(ip, port)
        for ip, port in remote:
            cluster.append_remote_ip_info(ip, port)
        clusters.append(cluster)
    return clusters
