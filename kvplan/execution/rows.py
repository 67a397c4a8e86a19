"""Requests lowered without making a plan first.

Small requests cost more to plan than to copy. What the planner says of two memories and of the
layers that are moved is asked once (`kvplan.planning.templates`); a request then needs its block
tables and its tokens only. The planner decides what is right: it is asked for every request that
is not lowered here, it refuses what is wrong, and it makes the plan of a lowered request when that
is looked at.
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
from kvplan.planning.plan import OBSERVERS, Plan
from kvplan.planning.templates import LoweredPart, Template, templates_of
from kvplan.types import KvCacheExtParam
from kvplan.validation import INT64_MAX

if TYPE_CHECKING:
    from kvnative._lower import Descriptors
    from kvplan.execution.memory import Addresses, TensorMemory
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.part import Kind, Operation
    from kvplan.planning.side import Side

_MAX_PAIRS: Final = 1024
"""Pairs of memories that are remembered, with the layers that are moved between them."""

_Key = tuple[int, int, "Operation", "KvCacheExtParam | None", bool, bool, bool, range | None]

_TABLES: Final = (list, tuple, np.ndarray, RequestBlocks)
_NONE = np.empty(0, dtype=np.uint64)
_new = object.__new__
_assign = object.__setattr__


class _Cut(NamedTuple):
    """A template between two memories."""

    rows: RowLowering
    num_pairs: int
    part: dict[str, Any]  # the fields that all parts have in common


class RowPair(NamedTuple):
    """Two memories and all that requests between them share.

    It holds the addresses of the memories, and keeps no memory alive.
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
    cuts: tuple[_Cut, ...]  # the first that takes a request lowers it; none: the planner is asked

    def bind(
        self,
        src_rows: Blocks,
        dst_rows: Blocks,
        num_tokens: int | None,
        src_token: int,
        dst_token: int,
    ) -> tuple[Plan, Descriptors] | None:
        """Return the plan of a request, and its descriptors; None: the planner has to be asked."""
        if type(src_rows) not in _TABLES or type(dst_rows) not in _TABLES:
            return None
        if self.kind != "C2C":  # the caller may change them
            src_rows, dst_rows = _copied(src_rows), _copied(dst_rows)
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
                vars(part).update(num_slices=num_slices, num_descriptors=len(descriptors))
                return Plan.made(part), descriptors
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
        _assign(part, "__dict__", known)  # past a constructor that sets each field by itself
        return part


class RowRequests:
    """The pairs of memories that are known; any thread may ask."""

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._pairs: dict[_Key, RowPair] = {}

    def bind(
        self,
        operation: Operation,
        kind: Kind,
        source: Side,
        target: Side,
        src: TensorMemory,
        dst: TensorMemory,
        src_rows: Blocks,
        dst_rows: Blocks,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        by_layer: bool = False,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        reinterpret: bool = False,
        heads: range | None = None,
    ) -> tuple[Plan, Descriptors] | None:
        """Return the plan of a request, and its descriptors; None: the planner has to be asked.

        Args:
            src_rows, dst_rows: block tables; of a slot, its index alone.
            num_tokens, src_token, dst_token: as of `plan_pull_blocks`; of slots on both sides the
                last two are 0.
            heads: KV heads of the model that are moved into blocks; None: all that both have.
        """
        if type(src_token) is not int or type(dst_token) is not int:
            return None
        by_tokens = num_tokens is not None or src_token != 0 or dst_token != 0
        if by_tokens and not are_tokens(kind, num_tokens, src_token, dst_token):
            return None
        pair = self.pair(
            operation, kind, source, target, src, dst, ext_param, by_layer=by_layer,
            by_tokens=by_tokens, reinterpret=reinterpret, heads=heads,
        )  # fmt: skip
        if pair is None:
            return None
        return pair.bind(src_rows, dst_rows, num_tokens, src_token, dst_token)

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
    ) -> RowPair | None:
        """Return what is known of two memories; None: the planner has to be asked.

        Args:
            by_tokens: whether the requests say tokens, or move whole rows.
        """
        if OBSERVERS:  # they look at each plan that is made
            return None
        if heads is not None and (kind == "C2C" or heads.step != 1):
            return None
        if ext_param is not ALL_LAYERS and not are_plain(ext_param):
            return None
        reinterpret = bool(reinterpret)
        layers = None if ext_param is ALL_LAYERS else ext_param
        key: _Key = (
            id(src.addresses), id(dst.addresses), operation, layers, by_layer, by_tokens,
            reinterpret, heads,
        )  # fmt: skip
        pair = self._pairs.get(key)
        if pair is not None and pair.source is source and pair.target is target:
            return pair
        cuts: list[_Cut] = []
        if _fits(source, src) and _fits(target, dst) and dst.writable:
            for template in templates_of(
                operation, kind, source, target, ext_param,
                by_layer=by_layer, by_tokens=by_tokens, reinterpret=reinterpret, heads=heads,
            ):  # fmt: skip
                rows = _rows(template, source, target, src, dst)
                if rows is None:
                    break
                fields = template.part | {"as_bytes": template.as_bytes}
                fields["common"] = object()  # by which recordings know parts of one pair
                cuts.append(_Cut(rows, len(fields["src_tensors"]), fields))
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
    """Whether a dict can tell them from all others.

    To it True is 1, and range(0, 1, 2) is range(1), which to the planner is not so.
    """
    if layers is ALL_LAYERS:
        return True
    if type(layers) is not KvCacheExtParam:
        return False
    ranges = layers.src_layer_range, layers.dst_layer_range
    number = layers.tensor_num_per_layer
    return all(it is None or (type(it) is range and it.step == 1) for it in ranges) and (
        number is None or type(number) is int
    )


def _rows(
    template: Template, source: Side, target: Side, src: TensorMemory, dst: TensorMemory
) -> RowLowering | None:
    """Return the rows of the tensors that are paired; None if tensors of the caches overlap."""
    fields = template.part
    split, per_layer = fields["split"], fields["tensors_per_layer"]
    src_views, dst_views = fields["src_tensors"], fields["dst_tensors"]
    read, src_bases, src_start = view_addresses(source, src.addresses, src_views, split, per_layer)
    written, dst_bases, dst_start = view_addresses(
        target, dst.addresses, dst_views, split, per_layer
    )
    is_one = src is dst and source == target and src_views == dst_views
    one_space = not is_one and src.in_process and dst.in_process
    # Tensors that overlap, of two caches or of one: then it depends on the rows.
    if extents_clash(
        written, target.tensor_nbytes, read if one_space else _NONE, source.tensor_nbytes
    ):
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


def view_addresses(
    side: Side, addresses: Addresses, views: range, split: tuple[str, ...], per_layer: int
) -> tuple[Addresses, Addresses, int]:
    """Return the addresses of the tensors that views lie in, each once, and of the views.

    The third value is the largest offset of a view in its tensor.
    """
    if not split:
        tensors = addresses[views.start : views.stop]
        return tensors, tensors, 0
    numbers, starts = side.locate(views, split, per_layer)
    # Each tensor once, however many views it has; one that is given twice is two.
    ordered = np.sort(numbers)
    once = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]
    return addresses[once], addresses[numbers] + starts, int(starts.max())


def _fits(side: Side, memory: TensorMemory) -> bool:
    return (
        len(memory.addresses) == side.num_tensors
        and first_below(memory.nbytes, side.tensor_nbytes) < 0
    )


def are_tokens(kind: Kind, num_tokens: int | None, src_token: int, dst_token: int) -> bool:
    """Whether numbers of tokens are as usual; otherwise they are the planner's to refuse."""
    if num_tokens is not None and not (type(num_tokens) is int and 1 <= num_tokens <= INT64_MAX):
        return False
    if kind == "C2C":
        return src_token == 0 == dst_token
    return 0 <= src_token <= INT64_MAX and 0 <= dst_token <= INT64_MAX


def _copied(rows: Blocks) -> Blocks:
    if type(rows) is list:
        return tuple(rows)
    return rows.copy() if type(rows) is np.ndarray else rows
