"""One side of a plan: how a cache's rows lie in memory, without saying where; and its layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvplan.status import invalid
from kvplan.types import (
    DEFAULT_TENSORS_PER_LAYER,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    KvCacheExtParam,
    LayerRange,
    Placement,
    RemoteCache,
)
from kvplan.validation import check_index, check_type, shown

MAX_TENSORS_PER_LAYER = 255
"""The reference's field is a uint8."""


@dataclass(frozen=True)
class Side:
    """A cache as the plan sees it: `num_tensors` tensors of `count` rows of `stride` bytes."""

    num_tensors: int
    count: int
    stride: int
    paged: bool
    placement: Placement
    name: str = field(default="", compare=False)
    """Its name in texts; not part of what the plan does."""
    way: str = field(default="", compare=False)
    """For a peer's: how it is reached from here, for texts. A plan that is read back has none."""

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of one tensor."""
        return self.count * self.stride

    @property
    def row(self) -> str:
        """The word for one row: slot or block."""
        return "block" if self.paged else "slot"


Described = CacheDesc | Cache | RemoteCache | Side
"""Whatever describes a cache to the planner; addresses, if it has any, are not looked at. A Side is
for those who plan with one cache again and again."""


def side(argument: str, cache: Described, *, paged: bool) -> Side:
    """Return the side for `cache`, read as paged (rows are blocks) or contiguous (slots).

    Raises:
        TypeError: `cache` is not a description; names `argument`.
        LLMException: LLM_PARAM_INVALID for a side, or a remote cache whose key says so, of the
            other kind: a paged cache read as slots would be copied in silence, and wrong.
    """
    if isinstance(cache, Side):
        if cache.paged is not paged:
            word = "blocks" if paged else "slots"
            raise invalid(f"{argument}={cache.name} has {cache.row}s, and cannot be read as {word}")
        return cache
    if isinstance(cache, RemoteCache):
        desc, key, name = cache.cache_desc, cache.key, repr(cache.key)
        if isinstance(key, BlocksCacheKey) and not paged:
            raise invalid(
                f"{argument}={name} names a paged cache; its blocks must be given, "
                "as plan_pull_blocks and plan_push_blocks take them"
            )
        slot = isinstance(key, CacheKeyByIdAndIndex) and key.batch_index
        if paged and (slot or isinstance(key, CacheKey)):
            raise invalid(
                f"{argument}={name} names a slot, and a paged cache has none; its key is a "
                "BlocksCacheKey or a CacheIndex of batch_index 0"
            )
    elif isinstance(cache, Cache):
        desc, name = cache.cache_desc, f"cache {cache.cache_id}" if cache.cache_id >= 0 else ""
    else:
        desc, name = check_type(argument, cache, CacheDesc), ""
    found = Side.__new__(Side)
    vars(found).update(  # past a constructor that sets each field through `object.__setattr__`
        num_tensors=desc.num_tensors,
        count=desc.batch_size,
        stride=desc.stride,
        paged=paged,
        placement=desc.placement,
        name=name,
        way="",
    )
    return found


def slot_index(argument: str, given: int | None, cache: Described, read_as: Side) -> int:
    """Return the slot: `given`, or the one that the key of a remote cache names, or 0."""
    slot = 0 if given is None else given
    if isinstance(cache, RemoteCache) and isinstance(cache.key, CacheKeyByIdAndIndex):
        named = cache.key.batch_index
        if given is not None and check_type(argument, given, int) != named:
            raise invalid(f"{argument}={given} must be None or {named}, the slot of {cache.key}")
        slot = named
    if type(slot) is int and 0 <= slot < (1 if read_as.paged else read_as.count):
        return slot
    if read_as.paged and check_type(argument, slot, int) != 0:
        raise invalid(f"{argument}={slot} must be None or 0: a paged cache has no slots")
    return check_index(argument, slot, read_as.count)


def is_same_cache(a: Described, b: Described) -> bool:
    """Whether both surely are one cache: one object, one cache id, or the same addresses."""
    if a is b:
        return True
    if not (isinstance(a, Cache) and isinstance(b, Cache)):
        return False
    same_id = a.cache_id == b.cache_id >= 0
    return same_id or (bool(a.tensor_addrs) and a.tensor_addrs == b.tensor_addrs)


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
    if type(ext_param) is not KvCacheExtParam:
        check_type("ext_param", ext_param, KvCacheExtParam)
    per_layer = ext_param.tensor_num_per_layer
    if type(per_layer) is not int:
        check_type("tensor_num_per_layer", per_layer, int)
    src_given, dst_given = ext_param.src_layer_range, ext_param.dst_layer_range
    src_layers = None if src_given is None else _layers("src_layer_range", src_given)
    dst_layers = None if dst_given is None else _layers("dst_layer_range", dst_given)
    ranged = src_layers is not None or dst_layers is not None
    for name, cache in (("src", src), ("dst", dst)):
        # The default passes on a cache of one tensor: it was not asked for.
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
    """Return the src tensors of a transfer, as `tensor_ranges` does."""
    check_type("ext_param", ext_param, KvCacheExtParam)
    alike = replace(ext_param, dst_layer_range=ext_param.src_layer_range)
    return tensor_ranges(src, src, alike)[0]


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
