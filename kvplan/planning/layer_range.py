"""Layer ranges: from what the two interfaces write to a pair of tensor ranges."""

from __future__ import annotations

from dataclasses import replace

from kvplan.planning.layout import Side
from kvplan.status import invalid
from kvplan.types import DEFAULT_TENSORS_PER_LAYER, KvCacheExtParam, LayerRange
from kvplan.validation import check_type, shown

MAX_TENSORS_PER_LAYER = 255
"""The reference's field is a uint8."""


def tensor_ranges(src: Side, dst: Side, ext_param: KvCacheExtParam) -> tuple[range, range]:
    """Return the src and dst tensors of a transfer: two ranges of one length.

    Layer range i..j selects tensors i*t up to (j+1)*t, t = `tensor_num_per_layer`. With no range,
    all tensors are taken, and t only groups them (the last layer may then be short). A range on
    one side goes with all tensors of the other, if their numbers agree.

    Raises:
        TypeError: ext_param, a range or tensor_num_per_layer of another type.
        LLMException: LLM_PARAM_INVALID for a step other than 1, an empty range, layers that a
            cache does not have, ranges of unequal length, tensor_num_per_layer outside
            [1, num_tensors] or, where a range is given, not dividing the number of tensors.
    """
    check_type("ext_param", ext_param, KvCacheExtParam)
    per_layer = check_type("tensor_num_per_layer", ext_param.tensor_num_per_layer, int)
    src_given, dst_given = ext_param.src_layer_range, ext_param.dst_layer_range
    src_layers = None if src_given is None else _layers("src_layer_range", src_given)
    dst_layers = None if dst_given is None else _layers("dst_layer_range", dst_given)
    ranged = src_layers is not None or dst_layers is not None
    _check_per_layer("src", src, per_layer, ranged)
    if dst.num_tensors != src.num_tensors:
        _check_per_layer("dst", dst, per_layer, ranged)
    if not ranged:
        if src.num_tensors != dst.num_tensors:
            raise invalid(
                f"src num_tensors={src.num_tensors} and dst num_tensors={dst.num_tensors} must be "
                "equal where no layer range is given"
            )
        return range(src.num_tensors), range(dst.num_tensors)
    src_tensors = _tensors("src_layer_range", src_layers, src, per_layer)
    dst_tensors = _tensors("dst_layer_range", dst_layers, dst, per_layer)
    if len(src_tensors) != len(dst_tensors):
        raise invalid(
            f"src_layer_range={_show(src_layers, src, per_layer)} and "
            f"dst_layer_range={_show(dst_layers, dst, per_layer)} must be of equal length"
        )
    return src_tensors, dst_tensors


def source_tensors(src: Side, ext_param: KvCacheExtParam) -> range:
    """Return the src tensors of a transfer; arguments and errors as for `tensor_ranges`."""
    check_type("ext_param", ext_param, KvCacheExtParam)
    alike = replace(ext_param, dst_layer_range=ext_param.src_layer_range)
    return tensor_ranges(src, src, alike)[0]


def _check_per_layer(name: str, cache: Side, per_layer: int, ranged: bool) -> None:
    # The default passes on a cache of one tensor: nobody asked for it.
    most = cache.num_tensors if cache.num_tensors > 1 else DEFAULT_TENSORS_PER_LAYER
    if not 1 <= per_layer <= most or per_layer > MAX_TENSORS_PER_LAYER:
        raise invalid(
            f"tensor_num_per_layer={per_layer} is out of range "
            f"[1, {min(cache.num_tensors, MAX_TENSORS_PER_LAYER)}] of the {name} cache"
        )
    if ranged and cache.num_tensors % per_layer:
        raise invalid(
            f"tensor_num_per_layer={per_layer} must divide the {cache.num_tensors} tensors of "
            f"the {name} cache where a layer range is given"
        )


def _layers(name: str, given: LayerRange) -> range | None:
    """The half-open range that `given` means, or None for all layers."""
    match given:
        case range():
            if given.step != 1:
                raise invalid(f"{name}={given} has step {given.step}; the step must be 1")
            return given
        case (first, last):
            check_type(f"{name}[0]", first, int)
            check_type(f"{name}[1]", last, int)
            if first == last == -1:
                return None
            return range(first, last + 1)
        case _:
            raise TypeError(f"{name}={shown(given)} must be a range, a pair (first, last) or None")


def _tensors(name: str, layers: range | None, cache: Side, per_layer: int) -> range:
    if layers is None:
        return range(cache.num_tensors)
    num_layers = cache.num_tensors // per_layer
    if not layers or layers.start < 0 or layers.stop > num_layers:
        raise invalid(
            f"{name}={layers} is {'out of range' if layers else 'empty; it must hold a layer of'} "
            f"[0, {num_layers}): {cache.num_tensors} tensors, {per_layer} a layer"
        )
    return range(layers.start * per_layer, layers.stop * per_layer)


def _show(layers: range | None, cache: Side, per_layer: int) -> range:
    return range(cache.num_tensors // per_layer) if layers is None else layers
