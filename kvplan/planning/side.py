"""One side of a plan: a cache as it lies in memory, without saying where; its layers and views."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

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

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan.layout import CacheLayout, Shard
    from kvplan.types import DataType

MAX_TENSORS_PER_LAYER = 255
"""The reference's field is a uint8."""


@dataclass(frozen=True)
class Side:
    """A cache as the plan sees it: `num_tensors` tensors of `count` rows, `stride` bytes apart.

    Attributes:
        paged: whether rows are blocks; slots if not.
        data_type, shape: of a tensor, as it lies in memory; None and (): not known, rows are opaque
            bytes (a plan of schema 1, a peer's bare addresses).
        layout: what the dimensions are; None: not known.
        label: a kv_tensor_format that is no layout: only compared.
        shard: which part of the model's cache it is; None: all of it, or not known.
    """

    num_tensors: int
    count: int
    stride: int
    paged: bool
    placement: Placement
    data_type: DataType | None = None
    shape: tuple[int, ...] = ()
    layout: CacheLayout | None = None
    label: str | None = None
    shard: Shard | None = None
    name: str = field(default="", compare=False)
    """Its name in texts; not part of what the plan does."""
    way: str = field(default="", compare=False)
    """For a peer's: how it is reached from here, for texts. A plan that is read back has none."""

    @cached_property
    def tensor_nbytes(self) -> int:
        """Bytes of one tensor."""
        if self.data_type is None:
            return self.count * self.stride
        return math.prod(self.shape) * self.data_type.bits // 8

    @property
    def row(self) -> str:
        """The word for one row: slot or block."""
        return "block" if self.paged else "slot"

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Dimensions of a row, and before it those that are not rows."""
        at = 0 if self.layout is None else self.layout.row_axis
        return self.shape[:at] + self.shape[at + 1 :]

    @cached_property
    def meaning(self) -> tuple[object, ...]:
        """Everything that says what a row means: two sides where it is equal are copied as bytes.

        Empty: nothing is known.
        """
        if self.data_type is None:
            return ()
        return (self.data_type, self.row_shape, self.layout, self.label, self.shard)

    @cached_property
    def rows_are_whole(self) -> bool:
        """Whether the bytes of a row lie together: no axis of the model is outside of the rows."""
        return self.layout is None or math.prod(self.shape[: self.layout.row_axis]) == 1

    def rows(self, offset: int, nbytes: int) -> tuple[int, int]:
        """First and last row that `nbytes` bytes from `offset` on lie in."""
        period = self.count * self.stride  # after which an axis outside of the rows begins again
        return offset % period // self.stride, (offset + nbytes - 1) % period // self.stride

    def extent(self, axis: str) -> int:
        """How many there are along an axis; 1 where the layout does not have it."""
        layout = self.layout
        return self.shape[layout.axes.index(axis)] if layout and axis in layout.axes else 1

    def stride_of(self, axis: str) -> int:
        """Bytes from one to the next along an axis; 0 where the layout does not have it."""
        layout, data_type = self.layout, self.data_type
        if layout is None or data_type is None or axis not in layout.axes:
            return 0
        return math.prod(self.shape[layout.axes.index(axis) + 1 :]) * data_type.bits // 8

    def said_tensors_per_layer(self, name: str, given: int | None) -> int | None:
        """Tensors of one layer, where the layout or the shard say it.

        Raises:
            LLMException: LLM_PARAM_INVALID: they say another number than was given.
        """
        layout, shard = self.layout, self.shard
        if shard is not None and shard.layers is not None:
            said = max(self.num_tensors * self.extent("layer") // len(shard.layers), 1)
        elif layout is None or ("head" in layout.axes and "kv" not in layout.axes):
            return None  # keys and values may have tensors of their own
        else:
            said = 1
        if given not in (None, said):
            raise invalid(
                f"tensor_num_per_layer={given} must be None or {said}, as the {name} cache says: "
                f"{self.num_tensors} tensors of {self}"
            )
        return said

    @cached_property
    def usual_tensors_per_layer(self) -> int | None:
        """Tensors of one layer where nobody says how many; None: they are not layers of so many."""
        said = self.said_tensors_per_layer("", None)
        usual = min(DEFAULT_TENSORS_PER_LAYER, self.num_tensors) if said is None else said
        return None if self.num_tensors % usual else usual

    @cached_property
    def is_plain(self) -> bool:
        """Whether a row is one run of bytes of one layer."""
        return self.rows_are_whole and self.extent("layer") == 1

    def locate(
        self, views: range, split: tuple[str, ...], per_layer: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """The tensor of each view, and the byte of it where the view begins.

        A view is what a plan pairs: a tensor, or, where the plan splits an axis that lies inside of
        the tensors, one layer or the keys or values of it.

        Args:
            split: the axes that are split, of "layer" and "kv".
            per_layer: views of one layer.
        """
        layers = self.extent("layer") if "layer" in split else 1
        kv = self.extent("kv") if "kv" in split else 1
        layer, part = np.divmod(np.arange(views.start, views.stop), per_layer)
        apart = per_layer // kv  # keys and values in tensors of their own
        tensors = (layer // layers) * apart + part // kv
        starts = (layer % layers) * self.stride_of("layer") + (part % kv) * self.stride_of("kv")
        return tensors, starts.astype(np.uint64)

    def num_views(self, split: tuple[str, ...]) -> int:
        """How many views there are where the axes in `split` are split; see `locate`."""
        return self.num_tensors * math.prod(self.extent(axis) for axis in split)

    def __str__(self) -> str:
        """`DT_FLOAT16 (block 64, token 16, head 8, dim 128), heads 0..7 of 32`."""
        if self.data_type is None:
            return f"rows of {self.stride} bytes"
        if self.layout is not None:
            names = zip(self.layout.axes, self.shape, strict=True)
            shape = ", ".join(f"{name} {length}" for name, length in names)
        else:
            shape = ", ".join(map(str, self.shape))
        label = f" {self.label}" if self.label else ""
        shard = f", {self.shard}" if self.shard else ""
        return f"{self.data_type.name} ({shape}){label}{shard}"


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
    layout = desc.layout
    found = Side.__new__(Side)
    vars(found).update(  # past a constructor that sets each field through `object.__setattr__`
        num_tensors=desc.num_tensors,
        count=desc.batch_size,
        stride=desc.stride,
        paged=paged,
        placement=desc.placement,
        data_type=desc.data_type,
        # Without a layout, what is before the rows is 1, and says nothing.
        shape=desc.shape if layout is not None else desc.shape[desc.batch_dim_index :],
        layout=layout,
        label=desc.kv_tensor_format if layout is None else None,
        shard=desc.shard,
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


def pair_views(
    src: Side,
    dst: Side,
    ext_param: KvCacheExtParam,
    split: tuple[str, ...] = (),
    *,
    as_bytes: bool = False,
) -> tuple[range, range, int]:
    """Return the views of a transfer, two ranges of one length, and how many are one layer.

    A view is a tensor, or a part of one; see `Side.locate`, for `split` too.

    Layer range i..j selects the views i*t up to (j+1)*t, t views a layer: what the layouts say,
    `tensor_num_per_layer`, or 2. With no range, all layers that both sides have are taken: by their
    number in the model where there are shards, otherwise both must have as many. A range on one
    side goes with all layers of the other, if their numbers agree.

    Args:
        as_bytes: whether tensors are paired whatever layouts and shards say; with no range,
            tensor_num_per_layer only groups them then, and the last layer may be short.

    Raises:
        TypeError: ext_param, a range or tensor_num_per_layer of another type.
        LLMException: LLM_PARAM_INVALID for a step other than 1, an empty range, layers that a
            cache does not have, ranges of unequal length or of other layers of the model,
            tensor_num_per_layer outside [1, num_tensors], not dividing the number of tensors, or
            not what the layout says.
    """
    if type(ext_param) is not KvCacheExtParam:
        check_type("ext_param", ext_param, KvCacheExtParam)
    given = ext_param.tensor_num_per_layer
    if given is not None and type(given) is not int:
        check_type("tensor_num_per_layer", given, int)
    src_given, dst_given = ext_param.src_layer_range, ext_param.dst_layer_range
    if (
        src_given is None
        and dst_given is None
        and given is None
        and not split
        and src.meaning == dst.meaning
        and src.num_tensors == dst.num_tensors
        and (per_layer := src.usual_tensors_per_layer) is not None
    ):  # almost always: all layers of two caches that are alike
        return range(src.num_tensors), range(src.num_tensors), per_layer
    src_layers = None if src_given is None else _layers("src_layer_range", src_given)
    dst_layers = None if dst_given is None else _layers("dst_layer_range", dst_given)
    ranged = src_layers is not None or dst_layers is not None
    per_layer = _views_per_layer(src, dst, given, split, as_bytes, ranged)
    num_src, num_dst = (it.num_views(split) if split else it.num_tensors for it in (src, dst))
    known = src.data_type is not None is not dst.data_type
    sharded = known and not as_bytes and (_has_layers(src) or _has_layers(dst))
    if not ranged and not sharded:
        if num_src != num_dst:
            raise invalid(
                f"src num_tensors={src.num_tensors} and dst num_tensors={dst.num_tensors} must be "
                "equal where no layer range is given"
            )
        return range(num_src), range(num_dst), per_layer
    src_range = _checked("src_layer_range", src_layers, src, num_src // per_layer, per_layer)
    dst_range = _checked("dst_layer_range", dst_layers, dst, num_dst // per_layer, per_layer)
    if sharded:
        src_range, dst_range = _in_model(
            src, dst, src_range, dst_range, src_layers is not None, dst_layers is not None
        )
    if len(src_range) != len(dst_range):
        raise invalid(
            f"src_layer_range={src_range} and dst_layer_range={dst_range} must be of equal length"
        )
    return _views(src_range, per_layer), _views(dst_range, per_layer), per_layer


def _has_layers(side: Side) -> bool:
    return side.shard is not None and side.shard.layers is not None


def _views_per_layer(
    src: Side,
    dst: Side,
    given: int | None,
    split: tuple[str, ...],
    as_bytes: bool,
    ranged: bool,
) -> int:
    """How many views are one layer, on both sides."""
    said = {}
    for name, it in () if as_bytes else (("src", src), ("dst", dst)):
        kv = it.extent("kv") if "kv" in split else 1
        tensors = it.said_tensors_per_layer(name, None if given is None or kv > 1 else given)
        if tensors is not None:
            said[name] = tensors * kv
    if len(said) == 2 and said["src"] != said["dst"]:
        raise invalid(
            f"a layer is {said['src']} of K and V at src, {src}, and {said['dst']} at dst, {dst}"
        )
    if len(said) == 1 and given is None:
        _check_not_latents(src, dst)
    if said:
        per_layer = next(iter(said.values()))
    elif given is not None:
        per_layer = given
    else:
        # The default passes on a cache of one tensor: it was not asked for.
        per_layer = min(DEFAULT_TENSORS_PER_LAYER, src.num_tensors, dst.num_tensors)
    for name, it in (("src", src), ("dst", dst)):
        most = it.num_views(split) if split else it.num_tensors
        if not 1 <= per_layer <= min(most, MAX_TENSORS_PER_LAYER):
            raise invalid(
                f"tensor_num_per_layer={per_layer} is out of range "
                f"[1, {min(most, MAX_TENSORS_PER_LAYER)}] of the {name} cache"
            )
        if most % per_layer and (ranged or not as_bytes):
            raise invalid(
                f"tensor_num_per_layer={per_layer}{'' if given else ' (the default)'} must divide "
                f"the {most} tensors of the {name} cache; give it, or a layout that says it"
            )
    return per_layer


def _check_not_latents(src: Side, dst: Side) -> None:
    """Refuse latents (MLA), a tensor a layer, with one head's keys and values, perhaps two."""
    for it, other in ((src, dst), (dst, src)):
        own, theirs = (() if side.layout is None else side.layout.axes for side in (it, other))
        latents = bool(own) and "head" not in own and "kv" not in own and "state" not in own
        apart = "head" in theirs and "kv" not in theirs
        if latents and apart and not _has_layers(it) and not _has_layers(other):
            raise invalid(
                f"src and dst differ in axis head: src is {src}; dst is {dst}. Keys and values of "
                "one head have two tensors a layer, latents one: give both caches one layout, or "
                "tensor_num_per_layer"
            )


def _in_model(
    src: Side, dst: Side, src_range: range, dst_range: range, src_given: bool, dst_given: bool
) -> tuple[range, range]:
    """Cut local layers of both sides to those that are the same in the model."""
    (of_src, src_total), (of_dst, dst_total) = (
        _model_layers(it, local) for it, local in ((src, src_range), (dst, dst_range))
    )
    # With a range, what is not said by a shard is not known.
    said = _has_layers(src) and _has_layers(dst)
    if src_total != dst_total and (said or not (src_given or dst_given)):
        raise invalid(
            f"src and dst differ in axis layer, how many the model has: src is {src}, of "
            f"{src_total}; dst is {dst}, of {dst_total}"
        )
    if src_given and dst_given and of_src != of_dst:
        raise invalid(
            f"src_layer_range={src_range} is {of_src} of the model, and dst_layer_range="
            f"{dst_range} is {of_dst}; they must be the same layers"
        )
    both = range(max(of_src.start, of_dst.start), min(of_src.stop, of_dst.stop))
    if not both:
        raise invalid(
            f"src has layers {of_src.start}..{of_src.stop - 1} of the model and dst "
            f"{of_dst.start}..{of_dst.stop - 1}: none in common"
        )
    for name, given, part in (("src", src_given, of_src), ("dst", dst_given, of_dst)):
        if given and part != both:
            raise invalid(
                f"{name}_layer_range is {part} of the model, of which the other side has only "
                f"{both}"
            )
    src_shift, dst_shift = src_range.start - of_src.start, dst_range.start - of_dst.start
    return (
        range(both.start + src_shift, both.stop + src_shift),
        range(both.start + dst_shift, both.stop + dst_shift),
    )


def _model_layers(side: Side, local: range) -> tuple[range, int | None]:
    """The numbers in the model of a cache's layers `local`, and how many the model has."""
    shard = side.shard
    if shard is None or shard.layers is None:
        return local, local.stop
    first = shard.layers.start
    return range(local.start + first, local.stop + first), shard.num_layers


def source_tensors(src: Side, ext_param: KvCacheExtParam) -> range:
    """Return the src tensors of a transfer, as `pair_views` does."""
    check_type("ext_param", ext_param, KvCacheExtParam)
    alike = replace(ext_param, dst_layer_range=ext_param.src_layer_range)
    return pair_views(src, src, alike)[0]


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


def _checked(
    name: str, layers: range | None, cache: Side, num_layers: int, per_layer: int
) -> range:
    """The local layers that are meant, of those that `cache` has."""
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
