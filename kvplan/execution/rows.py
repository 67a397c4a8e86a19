"""Requests that are lowered without making a plan first.

Planning a small request takes longer than copying it. So the planner is asked once for each pair of
memories and selection of layers (`kvplan.planning.templates`); a request then only needs its block
tables and tokens. The planner still decides what is valid: it gets every request that is not
lowered here, rejects invalid ones, and makes the plan of a lowered request on demand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvnative._extents import extents_clash, first_below
from kvnative._rows import RowLowering
from kvnative._signals import Mutex
from kvplan.planning.blocks import RequestBlocks
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.part import Part
from kvplan.planning.plan import OBSERVERS
from kvplan.planning.templates import LoweredPart, Template, templates_of
from kvplan.types import CacheDesc, KvCacheExtParam
from kvplan.validation import INT64_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvnative._lower import Descriptors
    from kvplan.execution.memory import Addresses, TensorMemory
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.part import Kind, Operation
    from kvplan.planning.side import Side

_MAX_PAIRS: Final = 1024
"""Maximum number of cached `RowPair` values."""

_Key = tuple[
    int, int, "Operation", "KvCacheExtParam | None", bool, bool, bool, range | None, int | None,
    int | None,
]  # fmt: skip

_TABLES: Final[dict[type, Any]] = {
    list: tuple,
    tuple: None,
    np.ndarray: np.ndarray.copy,
    RequestBlocks: None,
}
"""Types of block tables, and how to copy those that the caller may change."""

_NONE = np.empty(0, dtype=np.uint64)
_new = object.__new__
_assign = object.__setattr__


class _Cut(NamedTuple):
    """A template between two memories."""

    rows: RowLowering
    num_pairs: int
    part: dict[str, Any]  # the fields that all parts share


class RowPair(NamedTuple):
    """Two memories, and everything that requests between them share.

    It holds only addresses, and keeps no memory alive.
    """

    operation: Operation
    kind: Kind
    src: Addresses
    dst: Addresses
    source: Side
    target: Side
    layers: KvCacheExtParam
    by_layer: bool
    reinterpret: bool
    heads: range | None
    # The first cut that accepts a request lowers it; without cuts, the planner is asked.
    cuts: tuple[_Cut, ...]

    def bind(
        self,
        src_rows: Blocks,
        dst_rows: Blocks,
        num_tokens: int | None,
        src_token: int,
        dst_token: int,
        name: str = "",
        place: int | None = None,
    ) -> tuple[Part, Descriptors] | None:
        """Return the part and the descriptors of a request, or None if the planner must decide.

        The rows are block tables, for a slot with its index. `name` and `place` label the part.
        """
        if type(src_rows) not in _TABLES or type(dst_rows) not in _TABLES:
            return None
        if (copy := _TABLES[type(src_rows)]) is not None:
            src_rows = copy(src_rows)
        if (copy := _TABLES[type(dst_rows)]) is not None:
            dst_rows = copy(dst_rows)
        for cut in self.cuts:
            lowered = cut.rows.lower(
                src_rows,
                dst_rows,
                num_tokens or 0,
                src_token,
                dst_token,
                type(src_rows) is RequestBlocks,
                type(dst_rows) is RequestBlocks,
            )
            if lowered is not None:
                descriptors, num_slices = lowered
                part = self.part(
                    cut, descriptors.total_nbytes, src_rows, dst_rows, num_tokens, src_token,
                    dst_token,
                )  # fmt: skip
                vars(part).update(
                    num_slices=num_slices, num_descriptors=len(descriptors), name=name, source=place
                )
                return part, descriptors
        return None

    def part(
        self,
        cut: _Cut,
        nbytes: int,
        src_rows: Blocks,
        dst_rows: Blocks,
        num_tokens: int | None,
        src_token: int,
        dst_token: int,
    ) -> Part:
        """Return the part of the plan of a lowered request."""
        known = cut.part.copy()
        known["request"] = (
            src_rows, dst_rows, self.layers, self.by_layer, num_tokens, src_token, dst_token,
            self.reinterpret, self.heads,
        )  # fmt: skip
        known["nbytes"] = nbytes
        known["nbytes_per_tensor"] = nbytes // cut.num_pairs
        part = _new(LoweredPart)
        _assign(part, "__dict__", known)  # bypass a constructor that sets each field separately
        return part


class RowRequests:
    """The known pairs of memories; thread-safe."""

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._pairs: dict[_Key, RowPair] = {}

    def pair(
        self,
        operation: Operation,
        kind: Kind,
        source: Side,
        target: Side,
        src: TensorMemory,
        dst: TensorMemory,
        ext_param: KvCacheExtParam,
        *,
        by_layer: bool = False,
        by_tokens: bool = False,
        reinterpret: bool = False,
        heads: range | None = None,
        src_tensor: int | None = None,
        dst_tensor: int | None = None,
    ) -> RowPair | None:
        """Return the pair of two memories, or None if the planner must decide.

        Args:
            by_tokens: True if the requests count tokens, see `counts_tokens`.
            heads: the KV heads of the model that move into blocks; None: all common ones.
            src_tensor, dst_tensor: the first tensor of a side in memory that it shares with other
                caches; None: the memory belongs only to the side.
        """
        if OBSERVERS:  # observers look at each plan that is made
            return None
        if heads is not None and (kind == "C2C" or heads.step != 1):
            return None
        if ext_param is not ALL_LAYERS and not are_plain(ext_param):
            return None
        layers = None if ext_param is ALL_LAYERS else ext_param
        key: _Key = (
            id(src.addresses), id(dst.addresses), operation, layers, by_layer, by_tokens,
            reinterpret, heads, src_tensor, dst_tensor,
        )  # fmt: skip
        pair = self._pairs.get(key)
        if pair is not None and pair.source is source and pair.target is target:
            return pair
        cuts: list[_Cut] = []
        read, written = _tensors(source, src, src_tensor), _tensors(target, dst, dst_tensor)
        one_space = src.in_process and dst.in_process
        if read is not None and written is not None and dst.writable:
            for template in templates_of(
                operation, kind, source, target, ext_param,
                by_layer=by_layer, by_tokens=by_tokens, reinterpret=reinterpret, heads=heads,
            ):  # fmt: skip
                rows = _rows(template, source, target, read, written, one_space=one_space)
                if rows is None:
                    break
                known = _new(LoweredPart)
                fields = vars(known)
                fields.update(template.part, as_bytes=template.as_bytes)
                fields["common"] = object()  # identifies parts of one pair in recordings
                if by_layer:
                    _ = known.src_layers, known.tensors_by_layer
                cuts.append(_Cut(rows, len(known.src_tensors), fields))
        pair = RowPair(
            operation, kind, src.addresses, dst.addresses, source, target, ext_param, by_layer,
            reinterpret, heads, tuple(cuts),
        )  # fmt: skip
        with self._mutex:
            if len(self._pairs) >= _MAX_PAIRS:
                self._pairs = {}
            self._pairs[key] = pair
        return pair


def are_plain(layers: KvCacheExtParam) -> bool:
    """Return True if a dict distinguishes these values from all others.

    To a dict True equals 1, and range(0, 1, 2) equals range(1); to the planner they differ.
    """
    if layers is ALL_LAYERS:
        return True
    if type(layers) is not KvCacheExtParam:
        return False
    for rows in (layers.src_layer_range, layers.dst_layer_range):
        if rows is not None and (type(rows) is not range or rows.step != 1):
            return False
    number = layers.tensor_num_per_layer
    return number is None or type(number) is int


def _rows(
    template: Template,
    source: Side,
    target: Side,
    src: Addresses,
    dst: Addresses,
    *,
    one_space: bool,
) -> RowLowering | None:
    """Return the lowering of the paired tensors, or None if tensors of the caches overlap."""
    fields = template.part
    split, per_layer = fields["split"], fields["tensors_per_layer"]
    src_views, dst_views = fields["src_tensors"], fields["dst_tensors"]
    read, src_bases, src_start = view_addresses(source, src, src_views, split, per_layer)
    written, dst_bases, dst_start = view_addresses(target, dst, dst_views, split, per_layer)
    is_one = src is dst and source == target and src_views == dst_views
    # If tensors of one or two caches overlap, the planner compares rows.
    if tensors_clash(target, written, source, read if one_space and not is_one else _NONE):
        return None
    return RowLowering(
        src_bases,
        dst_bases,
        template.src,
        template.dst,
        template.run,
        template.levels,
        template.kv,
        source.tensor_nbytes - src_start,
        target.tensor_nbytes - dst_start,
        is_one,
        template.as_bytes,
    )


def tensors_clash(target: Side, written: Addresses, source: Side, read: Addresses) -> bool:
    """Return True if a written tensor may share a byte with another written tensor or a read one.

    Interleaved rows, such as those of layers in one page, do not clash.
    """
    if not extents_clash(written, target.tensor_nbytes, read, source.tensor_nbytes):
        return False
    counts = len(written), len(read)
    return not are_apart(np.concatenate((written, read)), (target, source), counts)


def are_apart(
    addresses: Addresses, caches: Sequence[Side | CacheDesc], counts: Sequence[int]
) -> bool:
    """Return True only if no two tensors have rows that share a byte.

    `addresses` has the tensors of all caches in order; `counts`, the number of tensors of each.
    """
    shapes = [(side.tensor_nbytes, side.stride, side.row_nbytes) for side in caches]
    order = np.argsort(addresses)
    starts = addresses[order]
    sizes, strides, rows = np.repeat(np.array(shapes, np.uint64), counts, axis=0)[order].T
    reach = np.maximum.accumulate(starts + sizes)
    together = np.flatnonzero(starts[1:] < reach[:-1])  # with the next tensor
    if not len(together):
        return True
    groups = np.split(together, np.flatnonzero(np.diff(together) > 1) + 1)
    for group in (slice(int(run[0]), int(run[-1]) + 2) for run in groups):
        stride = strides[group.start]
        if (strides[group] != stride).any():
            return False
        places = (starts[group] - starts[group.start]) % stride
        around = np.argsort(places)
        ends = np.append(places[around][1:], places[around][0] + stride)
        if (ends - places[around] < rows[group][around]).any():
            return False
    return True


def view_addresses(
    side: Side, addresses: Addresses, views: range, split: tuple[str, ...], per_layer: int
) -> tuple[Addresses, Addresses, int]:
    """Return the addresses of tensors and of views, and the largest offset of a view."""
    if not split:
        tensors = addresses[views.start : views.stop]
        return tensors, tensors, 0
    numbers, starts = side.locate(views, split, per_layer)
    # Each tensor once, however many views it has. An address that is given twice counts twice.
    ordered = np.sort(numbers)
    once = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]
    return addresses[once], addresses[numbers] + starts, int(starts.max())


def _tensors(side: Side, memory: TensorMemory, first: int | None) -> Addresses | None:
    """Return a side's addresses in memory, from tensor `first` on; None: the side does not fit."""
    addresses, nbytes = memory.addresses, memory.nbytes
    if first is not None:
        addresses, nbytes = (
            column[first : first + side.num_tensors] for column in (addresses, nbytes)
        )
    if len(addresses) != side.num_tensors or first_below(nbytes, side.tensor_nbytes) >= 0:
        return None
    return addresses


def counts_tokens(
    kind: Kind, num_tokens: int | None, src_token: int, dst_token: int
) -> bool | None:
    """Return True if a request counts tokens, False if rows move whole; None: ask the planner."""
    if type(src_token) is not int or type(dst_token) is not int:
        return None
    if num_tokens is None and src_token == 0 == dst_token:
        return False
    if num_tokens is not None and not (type(num_tokens) is int and 1 <= num_tokens <= INT64_MAX):
        return None
    if kind == "C2C":
        return True if src_token == 0 == dst_token else None
    return True if 0 <= src_token <= INT64_MAX and 0 <= dst_token <= INT64_MAX else None
