"""Whole rows between caches that are alike, lowered without making a plan first.

Most requests are of this kind, and small ones cost more to plan than to copy. What the planner says
of two memories and the layers that are moved is asked once; a request then needs its block tables
only. The planner stays the law: it is asked for whatever is not plain, it refuses, and it makes the
plan of such a request when somebody looks at it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvnative._extents import extents_clash, first_below
from kvnative._rows import Rows
from kvnative._signals import Mutex
from kvplan.planning.kinds import plan_rows
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.plan import OBSERVERS, Plan
from kvplan.status import LLMException
from kvplan.types import KvCacheExtParam

if TYPE_CHECKING:
    from kvnative._lower import Descriptors
    from kvplan.execution.memory import Addresses, TensorMemory
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.plan import Kind, Operation
    from kvplan.planning.side import Side

_MOST: Final = 1024
"""Pairs of memories that are remembered, with the layers that are moved between them."""

_Key = tuple[int, int, "Operation", "KvCacheExtParam | None", bool]

_TABLES: Final = (list, tuple, np.ndarray)
_NONE = np.empty(0, dtype=np.uint64)
_new = object.__new__
_assign = object.__setattr__


class _Pair(NamedTuple):
    """What is known of two memories; held by their addresses, which keep no memory alive."""

    src: Addresses
    dst: Addresses
    source: Side
    target: Side
    rows: Rows | None  # None: the planner is always asked
    plan: dict[str, Any]  # what all plans of the pair have in common
    nbytes: int  # of a row, in all tensors that are moved


class RowRequests:
    """Lowers requests of whole rows; any thread may."""

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._pairs: dict[_Key, _Pair] = {}

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
    ) -> tuple[Plan, Descriptors] | None:
        """What moves rows `src_rows[i]` to rows `dst_rows[i]`; None: plan it."""
        pair = self._pair(operation, kind, source, target, src, dst, ext_param, by_layer)
        if pair is None or pair.rows is None:
            return None
        if type(src_rows) not in _TABLES or type(dst_rows) not in _TABLES:
            return None
        if kind != "C2C":  # the caller may change them
            src_rows, dst_rows = _copied(src_rows), _copied(dst_rows)
        descriptors = pair.rows.lower(src_rows, dst_rows)
        if descriptors is None:
            return None
        count = len(src_rows)
        known = pair.plan.copy()
        known["unplanned"] = src_rows, dst_rows, ext_param, by_layer
        known["num_slices"] = count
        known["nbytes"] = count * pair.nbytes
        plan = _new(Plan)
        _assign(plan, "__dict__", known)  # past a constructor that sets each field by itself
        return plan, descriptors

    def known(
        self,
        operation: Operation,
        kind: Kind,
        source: Side,
        target: Side,
        src: TensorMemory,
        dst: TensorMemory,
        ext_param: KvCacheExtParam,
    ) -> Rows | None:
        """What lowers requests between these two memories; None: the planner is always asked."""
        pair = self._pair(operation, kind, source, target, src, dst, ext_param, False)
        return None if pair is None else pair.rows

    def _pair(
        self,
        operation: Operation,
        kind: Kind,
        source: Side,
        target: Side,
        src: TensorMemory,
        dst: TensorMemory,
        ext_param: KvCacheExtParam,
        by_layer: bool,
    ) -> _Pair | None:
        """What is known of these two memories; None: the planner is to be asked."""
        if OBSERVERS:  # they look at each plan that is made
            return None
        if not are_plain(ext_param):
            return None
        layers = None if ext_param is ALL_LAYERS else ext_param
        key = id(src.addresses), id(dst.addresses), operation, layers, by_layer
        pair = self._pairs.get(key)
        if pair is not None and pair.source is source and pair.target is target:
            return pair
        plan = _law(operation, kind, source, target, ext_param, by_layer)
        rows = None
        common = {}
        nbytes = 0
        if plan is not None:
            later = ("segments", "tables", "num_slices", "nbytes", "nbytes_per_tensor")
            common = {name: it for name, it in vars(plan).items() if name not in later}
            nbytes = plan.num_tensor_pairs * source.stride
            if _fits(source, src) and _fits(target, dst) and dst.writable:
                rows = _rows(plan, src, dst)
        pair = _Pair(src.addresses, dst.addresses, source, target, rows, common, nbytes)
        with self._mutex:
            if len(self._pairs) >= _MOST:
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


def _law(
    operation: Operation,
    kind: Kind,
    source: Side,
    target: Side,
    ext_param: KvCacheExtParam,
    by_layer: bool,
) -> Plan | None:
    """The plan of the first row, if the planner moves rows as they are: all of each tensor."""
    if not (source.is_plain and target.is_plain) or source.stride != target.stride:
        return None
    try:
        plan = plan_rows(operation, kind, source, target, (0,), (0,), ext_param, by_layer)
    except LLMException:
        return None
    is_whole = (
        not plan.split
        and not plan.reinterpret
        and [*plan.segments] == [(0, 0, source.stride)]
        and not plan.segments.repeats
    )
    return plan if is_whole else None


def _rows(plan: Plan, src: TensorMemory, dst: TensorMemory) -> Rows | None:
    """Rows of the tensors that the plan pairs; None where any of both caches overlap."""
    source, target = plan.src, plan.dst
    read = src.addresses[plan.src_tensors.start : plan.src_tensors.stop]
    written = dst.addresses[plan.dst_tensors.start : plan.dst_tensors.stop]
    is_one = src is dst and plan.src_tensors == plan.dst_tensors
    one_space = not is_one and src.in_process and dst.in_process
    # Tensors that overlap, of two caches or of one: then it depends on the rows.
    if extents_clash(
        written, target.tensor_nbytes, read if one_space else _NONE, source.tensor_nbytes
    ):
        return None
    return Rows(read, written, source.count, target.count, source.stride, is_one)


def _fits(side: Side, memory: TensorMemory) -> bool:
    return (
        len(memory.addresses) == side.num_tensors
        and first_below(memory.nbytes, side.tensor_nbytes) < 0
    )


def _copied(rows: Blocks) -> Blocks:
    return rows.copy() if type(rows) is np.ndarray else tuple(rows)
