"""Conversion of values and arguments of the official package to those of the engine."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Address
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

import kvplan
from kvplan.layout import OPAQUE
from kvplan.links import ClusterInfo, IpInfo
from kvplan.llm_datadist.configs import LLMClusterInfo
from kvplan.llm_datadist.utils.utils import check_isinstance, check_uint32
from kvplan.llm_datadist.v2.llm_types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    check_layer_range,
)
from kvplan.planning.layers import ALL_LAYERS
from kvplan.status import LLMException, invalid
from kvplan.types import MAX_FORMAT, KvCacheExtParam
from kvplan.validation import UINT32_MAX, UINT64_MAX, shown

AnyKey = CacheKey | BlocksCacheKey | CacheKeyByIdAndIndex


def desc_of(cache_desc: CacheDesc) -> kvplan.CacheDesc:
    """Convert a description; raise if data type or placement is missing.

    A format becomes opaque if it names a layer axis, does not begin with the rows, or does not fit.
    """
    check_isinstance("placement", cache_desc.placement, kvplan.Placement, allow_none=False)
    if cache_desc.data_type is None:
        raise TypeError(f"{cache_desc} has no data_type")
    plain = kvplan.CacheDesc(
        int(cache_desc.num_tensors),
        tuple(map(int, cache_desc.shape)),
        kvplan.DataType(cache_desc.data_type.value),
        cache_desc.placement,
        seq_len_dim_index=int(cache_desc.seq_len_dim_index),
    )
    text = cache_desc.kv_tensor_format
    if text is None:
        return plain
    with suppress(LLMException):  # the format is not a layout of this shape
        named = replace(plain, kv_tensor_format=text)
        layout = named.layout
        if layout is None or (layout.row_axis == 0 and "layer" not in layout.axes):
            return named
    return replace(plain, kv_tensor_format=f"{OPAQUE}{text}"[:MAX_FORMAT])


def cache_of(cache: Cache) -> kvplan.Cache:
    """Return the cache as the engine's: the one that the manager made, otherwise a new one."""
    if cache._engine_cache is not None:
        return cache._engine_cache
    addrs = tuple(map(int, cache.tensor_addrs)) if cache.cache_id == -1 else ()
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
    """Convert a key. Ids of a BlocksCacheKey that are not uint64 raise TypeError."""
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
    """Convert a cluster and its remote addresses. Local addresses and the role are not used."""
    check_isinstance("remote_cluster_id", cluster.remote_cluster_id, int, allow_none=False)
    remote = [IpInfo(_text_of(ip), int(port)) for ip, port in cluster.remote_ip_info_list]
    return ClusterInfo(int(cluster.remote_cluster_id), remote)


def _text_of(ip: int | None) -> str:
    if ip is None or not 0 <= ip <= UINT32_MAX:
        raise invalid(f"ip={shown(ip)} is out of range [0, 2**32)")
    return str(IPv4Address(int(ip).to_bytes(4, "little")))


TENSORS_PER_LAYER = 2

Indices = list[int] | tuple[int, ...]
Table = list[int] | NDArray[np.int64]

_LONG = 64  # blocks; an array is faster for longer tables


def layers_of(
    src_layer_range: range | None, dst_layer_range: range | None, tensor_num_per_layer: int
) -> KvCacheExtParam:
    """Return ranges of layers for the engine. Without ranges, the default 2 moves all tensors."""
    check_uint32("tensor_num_per_layer", tensor_num_per_layer)
    if tensor_num_per_layer == 0:
        raise invalid("tensor_num_per_layer=0 is out of range [1, num_tensors]")
    _check_layers("src_layer_range", src_layer_range)
    _check_layers("dst_layer_range", dst_layer_range)
    if src_layer_range is dst_layer_range is None and tensor_num_per_layer == TENSORS_PER_LAYER:
        return ALL_LAYERS
    return KvCacheExtParam(src_layer_range, dst_layer_range, int(tensor_num_per_layer))


def pushed_layers_of(
    src_layer_range: range | None,
    dst_layer_range: range | None,
    tensor_num_per_layer: int,
    num_tensors: int,
) -> KvCacheExtParam:
    """Convert the layers of a push; a missing range means all local layers.

    The remote cache may have more layers; the push then writes its first ones.
    """
    layers = layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
    per_layer = int(tensor_num_per_layer)
    if layers is ALL_LAYERS and num_tensors % per_layer:
        return KvCacheExtParam(range(num_tensors), range(num_tensors), 1)
    whole = range(num_tensors // per_layer)
    src = whole if src_layer_range is None else src_layer_range
    dst = whole if dst_layer_range is None else dst_layer_range
    if len(src) != len(dst):
        raise invalid(f"src_layer_range={src} and dst_layer_range={dst} must be of equal length")
    if src_layer_range is None and num_tensors % per_layer:
        return layers  # a range would lack the last, incomplete layer
    return KvCacheExtParam(src, dst, per_layer)


def layers_given(kwargs: Mapping[str, Any]) -> KvCacheExtParam:
    """Return `layers_of` for the keyword arguments of a pull."""
    return layers_of(
        kwargs.get("src_layer_range"),
        kwargs.get("dst_layer_range"),
        kwargs.get("tensor_num_per_layer", TENSORS_PER_LAYER),
    )


def _check_layers(name: str, layers: range | None) -> None:
    check_layer_range(name, layers)
    if layers is not None:
        check_uint32(f"{name}.stop - 1", layers.stop - 1)


def indices_of(
    name: str, blocks: Indices | None, refusal: type[Exception] = TypeError
) -> list[int]:
    """Return block indices as a list; raise `refusal` for an int outside uint64."""
    check_isinstance(name, blocks, [list, tuple])
    if not blocks:
        return []
    # The usual case, several times faster for long tables.
    if set(map(type, blocks)) == {int} and min(blocks) >= 0 and max(blocks) <= UINT64_MAX:
        return list(blocks)
    check_isinstance(name, blocks, [list, tuple], int)
    return [_index(name, block, refusal) for block in blocks]


def table_of(name: str, blocks: Indices | None, *, allow_none: bool = True) -> Table:
    """Return block indices as a list, or a long table as an array, which is faster to check."""
    check_isinstance(name, blocks, [list, tuple], allow_none=allow_none)
    if blocks and len(blocks) >= _LONG and set(map(type, blocks)) == {int}:
        with suppress(struct.error):  # beyond int64
            table = np.frombuffer(struct.pack(f"{len(blocks)}q", *blocks), np.int64)
            if table.min() >= 0:
                return table
    return indices_of(name, blocks)


@overload
def last_wins(src_blocks: list[int], dst_blocks: list[int]) -> tuple[list[int], list[int]]: ...
@overload
def last_wins(src_blocks: Table, dst_blocks: Table) -> tuple[Table, Table]: ...
def last_wins(src_blocks: Table, dst_blocks: Table) -> tuple[Table, Table]:
    """Keep only the last pair of each destination.

    Tables of unequal length are returned unchanged.
    """
    if len(src_blocks) != len(dst_blocks) or _are_distinct(dst_blocks):
        return src_blocks, dst_blocks
    source_of = dict(zip(_listed(dst_blocks), _listed(src_blocks), strict=True))
    return list(source_of.values()), list(source_of)


def _are_distinct(blocks: Table) -> bool:
    if isinstance(blocks, list) or (end := int(blocks.max()) + 1) > 64 * len(blocks):
        return len(set(_listed(blocks))) == len(blocks)
    seen = np.zeros(end, np.bool_)
    seen[blocks] = True
    return int(np.count_nonzero(seen)) == len(blocks)


def _listed(blocks: Table) -> list[int]:
    return blocks if isinstance(blocks, list) else blocks.tolist()


def copies_of(copy_block_info: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Return the copies as `each_once` does; an index that is not a uint64 raises TypeError."""
    return each_once(
        (_index("copy_block_info", src), _index("copy_block_info", dst))
        for src, targets in copy_block_info.items()
        for dst in targets
    )


def each_once(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Return {src: [dst, ...]} for copies inside one cache; the last copy to a block counts.

    A copy of a block to itself counts only if the block has no other source.
    """
    source_of: dict[int, int] = {}
    for src, dst in pairs:
        if src != dst or dst not in source_of:
            source_of[dst] = src
    copies: dict[int, list[int]] = {}
    for dst, src in source_of.items():
        copies.setdefault(src, []).append(dst)
    return copies


def _index(name: str, value: int, refusal: type[Exception] = TypeError) -> int:
    if not 0 <= value <= UINT64_MAX:
        raise refusal(f"{name} holds {shown(value)}; block indices must be in range [0, 2**64)")
    return int(value)


def check_kind(name: str, cache: Cache, *, is_blocks: bool) -> None:
    """Check that a cache is paged (`is_blocks`), or contiguous."""
    if cache.is_blocks_cache is not is_blocks:
        raise invalid(f"{name}={cache} must be {'paged' if is_blocks else 'contiguous'}")


def check_alike(src: Cache, dst: Cache) -> None:
    """Check that two caches can swap blocks: HOST and DEVICE, with equal tensors and blocks."""
    ends = [desc_of(cache.cache_desc) for cache in (src, dst)]
    for what, values in (
        ("placement", [desc.placement.name for desc in ends]),
        ("num_tensors", [desc.num_tensors for desc in ends]),
        ("bytes of a block", [desc.rows_nbytes // desc.shape[0] for desc in ends]),
    ):
        if (values[0] == values[1]) is (what == "placement"):
            raise invalid(
                f"{what} is {values[0]} in src_cache and {values[1]} in dst_cache; a swap needs "
                "one cache of HOST and one of DEVICE, with equal num_tensors and bytes of a block"
            )


def check_some(name: str, blocks: Sized) -> None:
    """Check that a block table is not empty."""
    if not len(blocks):
        raise invalid(f"{name} is empty; at least one block is needed")
