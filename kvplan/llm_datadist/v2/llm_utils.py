"""Helper functions of the official package."""

from __future__ import annotations

from collections.abc import Sequence

from kvplan.llm_datadist import data_type as data_types
from kvplan.llm_datadist.data_type import DataType
from kvplan.llm_datadist.utils.utils import check_isinstance, check_uint32
from kvplan.llm_datadist.v2.llm_types import CacheDesc
from kvplan.status import invalid
from kvplan.types import NO_ID
from kvplan.validation import shown

_MAX_PORT = 2**16 - 1


def is_invalid_id(req_id_or_prefix_id: int) -> bool:
    """Return True if an id is negative or 2**64-1, which mean "none"."""
    return req_id_or_prefix_id < 0 or req_id_or_prefix_id == NO_ID


def is_valid_id(req_id_or_prefix_id: int) -> bool:
    """Return True if an id names a request or a prefix."""
    return not is_invalid_id(req_id_or_prefix_id)


def clone_cache_desc(cache_desc: CacheDesc) -> CacheDesc:
    """Return a copy of a description, with a copy of its shape."""
    return CacheDesc(
        cache_desc.num_tensors,
        cache_desc.shape[:],
        cache_desc.data_type,
        cache_desc.placement,
        cache_desc.batch_dim,
        cache_desc.seq_len_dim_index,
        cache_desc.kv_tensor_format,
    )


def calc_tensor_size(shape: Sequence[int], data_type: DataType) -> int:
    """Return the bytes of a tensor.

    Raises:
        LLMException: LLM_PARAM_INVALID: a dimension below 1, or a size beyond int64.
    """
    nbytes = data_types.calc_tensor_size(shape, data_type.value)
    if nbytes < 0:
        raise invalid(
            f"shape={shown(shape)} of {data_type} has no size: each dimension must be >= 1, and "
            "all together below 2**63 bytes"
        )
    return nbytes


def layer_range_to_tensor_indices(
    src_layer_range: range | None, dst_layer_range: range | None, tensor_num_per_layer: int = 2
) -> tuple[list[int], list[int]]:
    """Return the tensor indices of each range of layers; an empty list for None.

    Raises:
        TypeError: a range of the wrong type.
        ValueError: a layer is not a uint32.
        LLMException: LLM_PARAM_INVALID: a step other than 1, or a negative layer.
    """
    ranges = {"src_layer_range": src_layer_range, "dst_layer_range": dst_layer_range}
    for name, layers in ranges.items():
        check_isinstance(name, layers, range)
        if layers is not None and layers.step != 1:
            raise invalid(f"{name}={layers}: step must be 1")
    src, dst = (_tensors(name, layers, tensor_num_per_layer) for name, layers in ranges.items())
    return src, dst


def _tensors(name: str, layers: range | None, tensors_per_layer: int) -> list[int]:
    if not layers:
        return []
    if layers.start < 0:
        raise invalid(f"{name}={layers} must begin at 0 or above")
    check_uint32(name, layers.start)
    check_uint32(name, layers.stop - 1)
    return list(range(layers.start * tensors_per_layer, layers.stop * tensors_per_layer))


def parse_listen_ip_info(listen_ip_info: str) -> tuple[str, int]:
    """Return the address and port of "ip:port".

    Raises:
        TypeError: not a str.
        LLMException: LLM_PARAM_INVALID: malformed, or a port that is not a uint16.
    """
    check_isinstance("llm.listenIpInfo", listen_ip_info, str, allow_none=False)
    ip, *ports = listen_ip_info.split(":")
    if len(ports) != 1 or not (port := ports[0].strip()).isdecimal():
        raise invalid(f'llm.listenIpInfo={shown(listen_ip_info)} must be of the form "ip:port"')
    if int(port) > _MAX_PORT:
        raise invalid(f"port {port} of llm.listenIpInfo is out of range [0, {_MAX_PORT}]")
    return ip, int(port)
