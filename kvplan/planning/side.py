"""One side of a plan: the memory layout of a cache and its tokens, without addresses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvplan.layout import CacheLayout, Interleaved, Layers, Shard
from kvplan.status import invalid
from kvplan.types import (
    DEFAULT_TENSORS_PER_LAYER,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    Placement,
    RemoteCache,
)
from kvplan.validation import as_int, check_index, check_type

Tokens = NDArray[np.int64]
_Offsets = TypeVar("_Offsets", int, Tokens)

NO_PERIOD: Final = 2**62
"""The period of tokens that do not repeat: longer than any request."""


class Spread(NamedTuple):
    """The tokens of a request that a cache holds: `size` of every `period`, from `first` on."""

    first: int
    size: int
    period: int

    def owns(self, tokens: Tokens) -> NDArray[np.bool_]:
        """Return, for each of these tokens, whether the cache holds it."""
        beyond = tokens - self.first
        own: NDArray[np.bool_] = (beyond >= 0) & (beyond % self.period < self.size)
        return own

    def count(self, end: int) -> int:
        """Return the number of held tokens before `end`."""
        periods, rest = divmod(max(end - self.first, 0), self.period)
        return periods * self.size + min(rest, self.size)

    def token(self, place: int) -> int:
        """Return the token at a place; a number beyond any request if the place is unused."""
        chunk, inside = divmod(place, self.size)
        return self.first + chunk * self.period + inside

    def tokens(self, places: Tokens) -> Tokens:
        """Return the tokens at these places, each of which must have one."""
        if self is ALL_TOKENS:
            return places
        chunk, inside = np.divmod(places, self.size)
        found: Tokens = self.first + chunk * self.period + inside
        return found

    def places(self, tokens: Tokens) -> Tokens:
        """Return the places of these tokens, each of which must be held."""
        if self is ALL_TOKENS:
            return tokens
        chunk, inside = np.divmod(tokens - self.first, self.period)
        found: Tokens = chunk * self.size + inside
        return found


ALL_TOKENS: Final = Spread(0, 1, 1)


def spread_of(shard: Shard | None) -> Spread:
    """Return the tokens of a request that a cache of this shard holds; all of them for None."""
    tokens = None if shard is None else shard.tokens
    if tokens is None:
        return ALL_TOKENS
    if isinstance(tokens, Interleaved):
        return Spread(tokens.rank * tokens.size, tokens.size, tokens.ranks * tokens.size)
    return Spread(tokens.start, len(tokens), NO_PERIOD)


@dataclass(frozen=True)
class Side:
    """A cache in a plan: `num_tensors` tensors of `count` rows, `stride` bytes apart.

    A row has `row_nbytes` bytes; bytes between two rows do not belong to the cache.

    Attributes:
        num_tensors: number of tensors.
        count: rows of a tensor.
        stride: bytes from the first byte of a row to the first of the next.
        placement: the place of the tensors: host or device.
        paged: True if rows are blocks, False if they are slots.
        data_type, shape: data type and shape of a tensor in memory. None and (): unknown, rows are
            opaque bytes (bare addresses).
        layout: the names of the dimensions; None: unknown.
        label: the name of an unknown layout, which is only compared (`kvplan.layout.OPAQUE`).
        shard: the part of the model's cache; None: all of it, or unknown.
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
    """The cache's name in texts."""
    way: str = field(default="", compare=False)
    """The way to a peer's cache, for texts; empty for a cache here, or if unknown."""
    cache_id: int = field(default=-1, compare=False)
    """The cache's id in its engine; -1: unknown."""

    @cached_property
    def row_nbytes(self) -> int:
        """Contiguous bytes of a row."""
        if self.data_type is None:
            return self.stride
        axis = 0 if self.layout is None else self.layout.row_axis
        return math.prod(self.shape[axis + 1 :]) * self.data_type.bits // 8

    @cached_property
    def rows_nbytes(self) -> int:
        """Bytes of all rows of one tensor, without the bytes between them."""
        if self.data_type is None:
            return self.count * self.stride
        return math.prod(self.shape) * self.data_type.bits // 8

    @cached_property
    def tensor_nbytes(self) -> int:
        """Bytes from the first byte of a tensor to its last, including those between rows."""
        rows = self.rows_nbytes // self.row_nbytes
        return (rows - 1) * self.stride + self.row_nbytes

    @property
    def row(self) -> str:
        """The word for one row: slot or block."""
        return "block" if self.paged else "slot"

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Dimensions of a row, preceded by those outside the rows."""
        at = 0 if self.layout is None else self.layout.row_axis
        return self.shape[:at] + self.shape[at + 1 :]

    @cached_property
    def meaning(self) -> tuple[object, ...]:
        """The properties of a row that must be equal on both sides to copy it as bytes.

        Empty if they are unknown.
        """
        if self.data_type is None:
            return ()
        return (self.data_type, self.row_shape, self.layout, self.label, self.shard)

    @cached_property
    def spread(self) -> Spread:
        """The tokens of a request that the cache holds."""
        return spread_of(self.shard)

    @property
    def has_all_tokens(self) -> bool:
        """True if the cache holds all tokens of a request."""
        return self.shard is None or self.shard.tokens is None

    @cached_property
    def rows_are_whole(self) -> bool:
        """True if a row is contiguous: no axis of the model is outside the rows."""
        return self.layout is None or math.prod(self.shape[: self.layout.row_axis]) == 1

    def rows(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the first and the last row that `nbytes` bytes from `offset` on touch."""
        period = self.count * self.stride  # the bytes of one index of the outer axes
        return offset % period // self.stride, (offset + nbytes - 1) % period // self.stride

    def rows_of(self, offsets: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the rows that ranges of a tensor touch, each once, ascending."""
        stride, count = self.stride, self.count
        first = offsets.astype(np.int64) // stride
        # If an axis is outside the rows, a range may pass all rows several times.
        lengths = np.minimum(
            (offsets + nbytes - np.uint64(1)).astype(np.int64) // stride - first + 1, count
        )
        inside = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.unique((np.repeat(first, lengths) + inside) % count)

    def extent(self, axis: str) -> int:
        """Return the length of an axis; 1 if the layout does not have it."""
        layout = self.layout
        return self.shape[layout.axes.index(axis)] if layout and axis in layout.axes else 1

    def stride_of(self, axis: str) -> int:
        """Return the whole bytes from one element of an axis to the next; 0 without the axis."""
        layout, data_type = self.layout, self.data_type
        if layout is None or data_type is None or axis not in layout.axes:
            return 0
        inner, row = layout.axes.index(axis) + 1, layout.row_axis
        if inner <= row + 1:  # the axis of the rows, or one outside it
            return math.prod(self.shape[inner : row + 1]) * self.stride
        return math.prod(self.shape[inner:]) * data_type.bits // 8

    def is_inside(self, axis: str) -> bool:
        """Return True if an axis is inside the rows; False without the axis."""
        layout = self.layout
        if layout is None or axis not in layout.axes:
            return False
        return layout.axes.index(axis) > layout.row_axis

    def index_along(self, axis: str, offsets: _Offsets) -> _Offsets:
        """Return the position of a tensor's bytes along an axis; 0 without the axis."""
        stride = self.stride_of(axis)
        if not stride:
            return offsets * 0
        if self.is_inside(axis):
            offsets = offsets % self.stride
        return offsets // stride % self.extent(axis)

    def known_tensors_per_layer(self, name: str, given: int | None) -> int | None:
        """Return the number of tensors of a layer; None: neither layout nor shard determines it.

        Raises:
            LLMException: LLM_PARAM_INVALID: `given` is another number.
        """
        layout, shard = self.layout, self.shard
        if shard is not None and shard.layers is not None:
            known = max(self.num_tensors * self.extent("layer") // len(shard.layers), 1)
        elif layout is None or ("head" in layout.axes and "kv" not in layout.axes):
            return None  # keys and values may have tensors of their own
        else:
            known = 1
        if given not in (None, known):
            raise invalid(
                f"tensor_num_per_layer={given} must be None or {known}, that of the {name} cache: "
                f"{self.num_tensors} tensors of {self}"
            )
        return known

    def numbered_layers(self, split: tuple[str, ...], per_layer: int) -> Layers | None:
        """Return the model's layer numbers.

        None if the shard names no layers, or if `per_layer` views are not a layer.
        """
        layers = None if self.shard is None else self.shard.layers
        if layers is None:
            return None
        of_shard = self.usual_tensors_per_layer * (self.extent("kv") if "kv" in split else 1)
        return layers if of_shard == per_layer else None

    @cached_property
    def usual_tensors_per_layer(self) -> int:
        """Tensors of one layer if the caller gives no number and no layer range.

        An unknown number only groups tensors: 1 for an odd number of tensors, otherwise 2.
        """
        known = self.known_tensors_per_layer("", None)
        if known is not None:
            return known
        return 1 if self.num_tensors % DEFAULT_TENSORS_PER_LAYER else DEFAULT_TENSORS_PER_LAYER

    @cached_property
    def is_plain(self) -> bool:
        """True if a row is one run of bytes of one layer."""
        return self.rows_are_whole and self.extent("layer") == 1

    def locate(
        self, views: range, split: tuple[str, ...], per_layer: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return the tensor of each view, and the byte at which the view begins in it.

        A plan pairs views. A view is a tensor or, if the plan splits axes inside the tensors, one
        layer, or the keys or values of one layer.

        Args:
            views: numbers of the views.
            split: the axes that are split, of "layer" and "kv".
            per_layer: views of one layer.
        """
        layers = self.extent("layer") if "layer" in split else 1
        kv = self.extent("kv") if "kv" in split else 1
        layer, part = np.divmod(np.arange(views.start, views.stop), per_layer)
        apart = per_layer // kv  # tensors of a layer
        tensors = (layer // layers) * apart + part // kv
        starts = (layer % layers) * self.stride_of("layer") + (part % kv) * self.stride_of("kv")
        return tensors, starts.astype(np.uint64)

    def num_views(self, split: tuple[str, ...]) -> int:
        """Return the number of views if the axes in `split` are split; see `locate`."""
        return self.num_tensors * math.prod(self.extent(axis) for axis in split)

    def __str__(self) -> str:
        """Return `DT_FLOAT16 (block 64, token 16, head 8, dim 128), heads 0..7 of 32`."""
        if self.data_type is None:
            return f"rows of {self.stride} bytes"
        if self.layout is not None:
            names = zip(self.layout.axes, self.shape, strict=True)
            shape = ", ".join(f"{name} {length}" for name, length in names)
        else:
            shape = ", ".join(map(str, self.shape))
        label = f" {self.label}" if self.label else ""
        shard = f", {self.shard}" if self.shard else ""
        apart = "" if self.stride == self.row_nbytes else f", {self.row}s {self.stride} bytes apart"
        return f"{self.data_type.name} ({shape}){label}{shard}{apart}"


Described = CacheDesc | Cache | RemoteCache | Side
"""Descriptions of a cache for the planner.

A `Side` saves work for callers that plan with one cache repeatedly.
"""


def side(argument: str, cache: Described, *, paged: bool) -> Side:
    """Return the side of `cache`, read as paged (rows are blocks) or contiguous (slots)."""
    if isinstance(cache, Side):
        if cache.paged is not paged:
            word = "blocks" if paged else "slots"
            raise invalid(f"{argument}={cache.name} has {cache.row}s, not {word}")
        return cache
    if isinstance(cache, RemoteCache):
        desc, key, name, cache_id = cache.cache_desc, cache.key, repr(cache.key), -1
        if isinstance(key, BlocksCacheKey) and not paged:
            raise invalid(
                f"{argument}={name} names a paged cache; {argument}.blocks must name blocks of it"
            )
        slot = isinstance(key, CacheKeyByIdAndIndex) and key.batch_index
        if paged and (slot or isinstance(key, CacheKey)):
            raise invalid(
                f"{argument}={name} names a slot, which a paged cache does not have; use a "
                "BlocksCacheKey, or a CacheIndex with batch_index 0"
            )
    elif isinstance(cache, Cache):
        desc, cache_id = cache.cache_desc, cache.cache_id
        name = f"cache {cache_id}" if cache_id >= 0 else ""
    else:
        return _side_of(check_type(argument, cache, CacheDesc), paged)
    return _side(desc, paged, name, cache_id)


@lru_cache(maxsize=256)
def _side_of(desc: CacheDesc, paged: bool) -> Side:
    """Return the side of a bare description, cached."""
    return _side(desc, paged, "", -1)


def _side(desc: CacheDesc, paged: bool, name: str, cache_id: int) -> Side:
    layout = desc.layout
    found = Side.__new__(Side)
    vars(found).update(  # faster than the constructor of a frozen dataclass
        num_tensors=desc.num_tensors,
        count=desc.batch_size,
        stride=desc.stride,
        paged=paged,
        placement=desc.placement,
        data_type=desc.data_type,
        # Without a layout, dimensions before the rows have length 1.
        shape=desc.shape if layout is not None else desc.shape[desc.batch_dim_index :],
        layout=layout,
        label=desc.kv_tensor_format if layout is None else None,
        shard=desc.shard,
        name=name,
        way="",
        cache_id=cache_id,
    )
    return found


def slot_index(argument: str, given: int | None, cache: Described, read_as: Side) -> int:
    """Return `given`, or the slot that the key of a remote cache names, or 0."""
    if given is not None and type(given) is not int:
        given = as_int(argument, given)
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
    """Return True for the same object, and for caches of one cache id or equal addresses."""
    if a is b:
        return True
    if not (isinstance(a, Cache) and isinstance(b, Cache)):
        return False
    same_id = a.cache_id == b.cache_id >= 0
    return same_id or (bool(a.tensor_addrs) and a.tensor_addrs == b.tensor_addrs)
