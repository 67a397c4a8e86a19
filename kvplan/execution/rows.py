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
"""Number of cached pairs of memories, with the layers that move between them."""

_Key = tuple[int, int, "Operation", "KvCacheExtParam | None", bool, bool, bool, range | None]

_TABLES: Final = (list, tuple, np.ndarray, RequestBlocks)
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

    It holds addresses only, and keeps no memory alive.
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
    # The first that accepts a request lowers it; if empty, the planner is asked.
    cuts: tuple[_Cut, ...]

    def bind(
        self,
        src_rows: Blocks,
        dst_rows: Blocks,
        num_tokens: int | None,
        src_token: int,
        dst_token: int,
    ) -> tuple[Plan, Descriptors] | None:
        """Return the plan and the descriptors of a request, or None if the planner must decide."""
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
        """Return the part of the plan of a request that was lowered without one."""
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
    """The known pairs of memories. Any thread may ask."""

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
        """Return the plan and the descriptors of a request, or None if the planner must decide.

        `src_rows` and `dst_rows` are block tables, or the index of a slot. Between two slots, both
        token offsets are 0. `heads` are KV heads of the model that move into blocks; None: all
        common heads.
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
        """Return the pair of two memories, or None if the planner must decide.

        `by_tokens`: the requests name tokens and do not move whole rows.
        """
        if OBSERVERS:  # observers look at each plan that is made
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
                fields["common"] = object()  # identifies parts of one pair in recordings
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
    """Return True if a dict distinguishes these values from all others.

    To a dict True equals 1, and range(0, 1, 2) equals range(1); to the planner they differ.
    """
    if layers is ALL_LAYERS:
        return True
    if type(layers) is not KvCacheExtParam:
        return False
    ranges = layers.src_layer_range, layers.dst_layer_range
    number = layers.tensor_num_per_layer
    return all(rows is None or (type(rows) is range and rows.step == 1) for rows in ranges) and (
        number is None or type(number) is int
    )


def _rows(
    template: Template, source: Side, target: Side, src: TensorMemory, dst: TensorMemory
) -> RowLowering | None:
    """Return the rows of the paired tensors, or None if tensors of the caches overlap."""
    fields = template.part
    split, per_layer = fields["split"], fields["tensors_per_layer"]
    src_views, dst_views = fields["src_tensors"], fields["dst_tensors"]
    read, src_bases, src_start = view_addresses(source, src.addresses, src_views, split, per_layer)
    written, dst_bases, dst_start = view_addresses(
        target, dst.addresses, dst_views, split, per_layer
    )
    is_one = src is dst and source == target and src_views == dst_views
    one_space = not is_one and src.in_process and dst.in_process
    # If tensors of two caches or of one overlap, the rows decide.
    if tensors_clash(target, written, source, read if one_space else _NONE):
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

    Tensors whose rows lie between each other's, as those of layers in one page, do not.
    """
    if not extents_clash(written, target.tensor_nbytes, read, source.tensor_nbytes):
        return False
    apart, nbytes = (target.stride, target.row_nbytes), target.tensor_nbytes
    if apart != (source.stride, source.row_nbytes):
        return len(read) > 0 or not are_interleaved(written, nbytes, *apart)
    both = np.concatenate((written, read))
    return not are_interleaved(both, max(nbytes, source.tensor_nbytes), *apart)


def are_interleaved(addresses: Addresses, nbytes: int, stride: int, row_nbytes: int) -> bool:
    """Return True if rows of `row_nbytes`, `stride` bytes apart, share no byte in any two tensors.

    Tensors of `nbytes` at these addresses are compared if their extents overlap.
    """
    if stride == row_nbytes or not len(addresses):
        return False
    starts = np.sort(addresses)
    together = np.split(starts, np.flatnonzero(starts[1:] - starts[:-1] >= np.uint64(nbytes)) + 1)
    for group in together:
        places = np.sort((group - group[0]) % np.uint64(stride))
        ends = np.append(places[1:], places[0] + np.uint64(stride))
        if (ends - places < np.uint64(row_nbytes)).any():
            return False
    return True


def view_addresses(
    side: Side, addresses: Addresses, views: range, split: tuple[str, ...], per_layer: int
) -> tuple[Addresses, Addresses, int]:
    """Return the addresses of distinct tensors and of views, and the largest offset of a view."""
    if not split:
        tensors = addresses[views.start : views.stop]
        return tensors, tensors, 0
    numbers, starts = side.locate(views, split, per_layer)
    # Each tensor once, however many views it has. A tensor that is given twice counts as two.
    ordered = np.sort(numbers)
    once = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]
    return addresses[once], addresses[numbers] + starts, int(starts.max())


def _fits(side: Side, memory: TensorMemory) -> bool:
    return (
        len(memory.addresses) == side.num_tensors
        and first_below(memory.nbytes, side.tensor_nbytes) < 0
    )


def are_tokens(kind: Kind, num_tokens: int | None, src_token: int, dst_token: int) -> bool:
    """Return True for ordinary numbers of tokens. The planner rejects the others."""
    if num_tokens is not None and not (type(num_tokens) is int and 1 <= num_tokens <= INT64_MAX):
        return False
    if kind == "C2C":
        return src_token == 0 == dst_token
    return 0 <= src_token <= INT64_MAX and 0 <= dst_token <= INT64_MAX


def _copied(rows: Blocks) -> Blocks:
    if type(rows) is list:
        return tuple(rows)
    return rows.copy() if type(rows) is np.ndarray else rows
