"""Layers of a transfer, as pairs of views of both sides."""

from __future__ import annotations

from dataclasses import replace

from kvplan.layout import Layers, consecutive, numbers_text
from kvplan.planning.side import Side
from kvplan.status import invalid
from kvplan.types import DEFAULT_TENSORS_PER_LAYER, KvCacheExtParam, LayerRange
from kvplan.validation import as_int, check_type, shown

ALL_LAYERS = KvCacheExtParam()

MAX_TENSORS_PER_LAYER = 255
"""Maximum of `tensor_num_per_layer`, which is a uint8 in LLM-DataDist."""


def pair_views(
    src: Side,
    dst: Side,
    ext_param: KvCacheExtParam,
    split: tuple[str, ...] = (),
    *,
    as_bytes: bool = False,
) -> tuple[range, range, int]:
    """Return two ranges of views that are paired, and t, the number of views in a layer.

    A view is a tensor, or a piece of one; see `Side.locate`, also for `split`. Layer range i..j
    selects views i*t up to (j+1)*t, exclusive. Layouts or shards determine t, otherwise it is
    `tensor_num_per_layer` or 2. Without a range, t only groups tensors (1 if their number is odd),
    and all common layers are paired: by their numbers in the model if shards name them; otherwise
    both sides must have the same number of layers. A range on one side is paired with the model's
    same layers if shards name them, otherwise with all layers of the other side.

    `as_bytes` pairs tensors whatever layouts and shards say. Without a range, the last layer may
    then be short. Anything invalid is LLM_PARAM_INVALID; a wrong type is a TypeError.
    """
    if type(ext_param) is not KvCacheExtParam:
        check_type("layers", ext_param, KvCacheExtParam)
    given = ext_param.tensor_num_per_layer
    if given is not None and type(given) is not int:
        given = as_int("tensor_num_per_layer", given)
    src_given, dst_given = ext_param.src_layer_range, ext_param.dst_layer_range
    src_layers = None if src_given is None else _layers("src_layer_range", src_given)
    dst_layers = None if dst_given is None else _layers("dst_layer_range", dst_given)
    ranged = src_layers is not None or dst_layers is not None
    per_layer = _views_per_layer(src, dst, given, split, as_bytes, ranged)
    num_src, num_dst = (side.num_views(split) if split else side.num_tensors for side in (src, dst))
    known = src.data_type is not None is not dst.data_type
    sharded = known and not as_bytes and (has_layers(src) or has_layers(dst))
    if not ranged and not sharded:
        if num_src != num_dst:
            raise invalid(
                f"src num_tensors={src.num_tensors} and dst num_tensors={dst.num_tensors} must be "
                "equal without a layer range"
            )
        return range(num_src), range(num_dst), per_layer
    src_range = _checked("src_layer_range", src_layers, num_src // per_layer, per_layer)
    dst_range = _checked("dst_layer_range", dst_layers, num_dst // per_layer, per_layer)
    if sharded:
        src_range, dst_range = _in_model(
            src, dst, src_range, dst_range, src_layers is not None, dst_layers is not None
        )
    if len(src_range) != len(dst_range):
        raise invalid(
            f"src_layer_range={src_range} and dst_layer_range={dst_range} must be of equal length"
        )
    return _views(src_range, per_layer), _views(dst_range, per_layer), per_layer


def has_layers(side: Side) -> bool:
    """Return whether the shard of a side names layers of the model."""
    return side.shard is not None and side.shard.layers is not None


def _views_per_layer(
    src: Side,
    dst: Side,
    given: int | None,
    split: tuple[str, ...],
    as_bytes: bool,
    ranged: bool,
) -> int:
    """Return the number of views of one layer, which both sides share."""
    known = {}
    for name, side in () if as_bytes else (("src", src), ("dst", dst)):
        kv = side.extent("kv") if "kv" in split else 1
        tensors = side.known_tensors_per_layer(name, None if given is None or kv > 1 else given)
        if tensors is not None:
            known[name] = tensors * kv
    if len(known) == 2 and known["src"] != known["dst"]:
        raise invalid(
            f"a layer has {known['src']} key or value views in src, {src}, and {known['dst']} in "
            f"dst, {dst}; both must have equally many"
        )
    if len(known) == 1 and given is None:
        _check_not_latents(src, dst)
    if known:
        per_layer = next(iter(known.values()))
    elif given is not None:
        per_layer = given
    elif ranged:
        # A cache of one tensor has one layer, so that a range can name it.
        per_layer = min(DEFAULT_TENSORS_PER_LAYER, max(src.num_tensors, dst.num_tensors))
    else:
        per_layer = min(src.usual_tensors_per_layer, dst.usual_tensors_per_layer)
    for name, side in (("src", src), ("dst", dst)):
        most = side.num_views(split) if split else side.num_tensors
        if not 1 <= per_layer <= min(most, MAX_TENSORS_PER_LAYER):
            raise invalid(
                f"tensor_num_per_layer={per_layer} is out of range "
                f"[1, {min(most, MAX_TENSORS_PER_LAYER)}] of the {name} cache"
            )
        if most % per_layer and (ranged or not as_bytes):
            raise invalid(
                f"tensor_num_per_layer={per_layer}{'' if given else ' (the default)'} must divide "
                f"the {most} tensors of the {name} cache; give tensor_num_per_layer, or the cache "
                "a layout"
            )
    return per_layer


def _check_not_latents(src: Side, dst: Side) -> None:
    """Refuse latents (one tensor a layer) paired with keys and values of one head (usually two)."""
    for side, other in ((src, dst), (dst, src)):
        own = () if side.layout is None else side.layout.axes
        theirs = () if other.layout is None else other.layout.axes
        latents = bool(own) and "head" not in own and "kv" not in own and "state" not in own
        apart = "head" in theirs and "kv" not in theirs
        if latents and apart and not has_layers(side) and not has_layers(other):
            raise invalid(
                f"src and dst differ in axis head: src is {src}; dst is {dst}. Latents have one "
                "tensor a layer, keys and values of one head two: give both caches one layout, or "
                "tensor_num_per_layer"
            )


def _in_model(
    src: Side, dst: Side, src_range: range, dst_range: range, src_given: bool, dst_given: bool
) -> tuple[range, range]:
    """Reduce the local layers of both sides to the model's layers that both have."""
    (of_src, src_total), (of_dst, dst_total) = (
        _model_layers(side, local) for side, local in ((src, src_range), (dst, dst_range))
    )
    # With a range, a side whose shard names no layers may have any number of them.
    both_known = has_layers(src) and has_layers(dst)
    if src_total != dst_total and (both_known or not (src_given or dst_given)):
        raise invalid(
            f"src and dst differ in the number of the model's layers: src is {src}, of "
            f"{src_total}; dst is {dst}, of {dst_total}"
        )
    if src_given and dst_given and of_src != of_dst:
        raise invalid(
            f"src_layer_range={src_range} is layers {numbers_text(of_src)} of the model, and "
            f"dst_layer_range={dst_range} is {numbers_text(of_dst)}; they must be the same layers"
        )
    both = _in_common(of_src, of_dst)
    if not both:
        raise invalid(
            f"src has layers {numbers_text(of_src)} of the model and dst {numbers_text(of_dst)}: "
            "none in common"
        )
    for name, given, part in (("src", src_given, of_src), ("dst", dst_given, of_dst)):
        if given and part != both:
            raise invalid(
                f"{name}_layer_range is layers {numbers_text(part)} of the model, of which the "
                f"other side has only {numbers_text(both)}"
            )
    found = []
    for name, part, local in (("src", of_src, src_range), ("dst", of_dst, dst_range)):
        at = part.index(both[0])
        if consecutive(part[at : at + len(both)]) != both:
            raise invalid(
                f"src and dst have layers {numbers_text(both)} of the model in common, which are "
                f"not consecutive in {name}, {numbers_text(part)}; use one transfer, with a layer "
                "range, for each consecutive group"
            )
        found.append(range(local.start + at, local.start + at + len(both)))
    return found[0], found[1]


def _in_common(a: Layers, b: Layers) -> Layers:
    if isinstance(a, range) and isinstance(b, range):
        return range(max(a.start, b.start), min(a.stop, b.stop))
    return consecutive(tuple(sorted({*a} & {*b})))


def _model_layers(side: Side, local: range) -> tuple[Layers, int | None]:
    """Return local layers by their numbers in the model, and the model's number of layers."""
    shard = side.shard
    if shard is None or shard.layers is None:
        return local, local.stop
    return consecutive(shard.layers[local.start : local.stop]), shard.num_layers


def source_tensors(src: Side, ext_param: KvCacheExtParam) -> range:
    """Return the src tensors of a transfer, as `pair_views` does."""
    check_type("layers", ext_param, KvCacheExtParam)
    alike = replace(ext_param, dst_layer_range=ext_param.src_layer_range)
    return pair_views(src, src, alike)[0]


def _layers(name: str, given: LayerRange) -> range | None:
    """Return the half-open range that `given` means, or None for all layers."""
    match given:
        case range():
            if given.step != 1:
                raise invalid(f"{name}={given} has step {given.step}; the step must be 1")
            return given
        case (first, last):
            first, last = as_int(f"{name}[0]", first), as_int(f"{name}[1]", last)
            if first == last == -1:
                return None
            return range(first, last + 1)
        case _:
            raise TypeError(f"{name}={shown(given)} must be a range, a pair (first, last) or None")


def _checked(name: str, layers: range | None, num_layers: int, per_layer: int) -> range:
    """Return the selected layers of a cache; refuse layers that it does not have."""
    if layers is None:
        return range(num_layers)
    if not layers or layers.start < 0 or layers.stop > num_layers:
        raise invalid(
            f"{name}={layers} is {'out of range' if layers else 'empty; it must hold a layer of'} "
            f"[0, {num_layers}): {num_layers * per_layer} tensors, {per_layer} a layer"
        )
    return layers


def _views(layers: range, per_layer: int) -> range:
    return range(layers.start * per_layer, layers.stop * per_layer)
