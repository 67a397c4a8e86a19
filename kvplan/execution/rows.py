"""Whole rows of all layers between caches that are alike, lowered without making a plan first.

Most requests are of this kind, and small ones cost more to plan than to copy. What the planner says
of two memories is asked once; a request then needs its block tables only. The planner stays the
law: it is asked for whatever is not plain, it refuses, and it makes the plan of such a request when
somebody looks at it.
"""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvnative._extents import extents_clash, first_below
from kvnative._rows import Rows
from kvplan.planning.kinds import plan_rows
from kvplan.planning.plan import OBSERVERS, Plan
from kvplan.status import LLMException

if TYPE_CHECKING:
    from kvnative._lower import Descriptors
    from kvplan.execution.memory import Addresses, TensorMemory
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.plan import Kind, Operation
    from kvplan.planning.side import Side

_MOST: Final = 1024
"""Pairs of memories that are remembered."""

_TABLES: Final = (list, tuple, np.ndarray)
_NONE = np.empty(0, dtype=np.uint64)
_new = object.__new__
_assign = object.__setattr__


class _Pair(NamedTuple):
    """What is known of two memories; held by their addresses, which keep no memory alive."""

    src: Addresses
    dst: Addresses
    operation: Operation
    source: Side
    target: Side
    rows: Rows | None  # None: the planner is always asked
    plan: dict[str, Any]  # what all plans of the pair have in common
    nbytes: int  # of a row, in all tensors


class RowRequests:
    """Lowers requests of whole rows; any thread may."""

    def __init__(self) -> None:
        self._mutex = RLock()
        self._pairs: dict[tuple[int, int], _Pair] = {}

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
    ) -> tuple[Plan, Descriptors] | None:
        """What moves rows `src_rows[i]` to rows `dst_rows[i]`; None: plan it."""
        if OBSERVERS:  # they look at each plan that is made
            return None
        pair = self._pairs.get((id(src.addresses), id(dst.addresses)))
        if (
            pair is None
            or pair.source is not source
            or pair.target is not target
            or pair.operation != operation
        ):
            pair = self._add(operation, kind, source, target, src, dst)
        if pair.rows is None:
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
        known["rows"] = src_rows, dst_rows
        known["num_slices"] = count
        known["nbytes"] = count * pair.nbytes
        plan = _new(Plan)
        _assign(plan, "__dict__", known)  # past a constructor that sets each field by itself
        return plan, descriptors

    def _add(
        self,
        operation: Operation,
        kind: Kind,
        source: Side,
        target: Side,
        src: TensorMemory,
        dst: TensorMemory,
    ) -> _Pair:
        plan = _law(operation, kind, source, target)
        rows = None
        if plan is not None and _fits(source, src) and _fits(target, dst) and dst.writable:
            one_space = src.in_process and dst.in_process
            read = src.addresses if one_space else _NONE
            # Tensors that overlap, of two caches or of one: then it depends on the rows.
            if not extents_clash(dst.addresses, target.tensor_nbytes, read, source.tensor_nbytes):
                rows = Rows(src.addresses, dst.addresses, source.count, target.count, source.stride)
        common = {}
        if plan is not None:
            later = ("segments", "tables", "num_slices", "nbytes", "nbytes_per_tensor")
            common = {name: it for name, it in vars(plan).items() if name not in later}
        pair = _Pair(
            src.addresses, dst.addresses, operation, source, target, rows, common,
            source.num_tensors * source.stride,
        )  # fmt: skip
        with self._mutex:
            if len(self._pairs) >= _MOST:
                self._pairs = {}
            self._pairs[id(src.addresses), id(dst.addresses)] = pair
        return pair


def _law(operation: Operation, kind: Kind, source: Side, target: Side) -> Plan | None:
    """The plan of the first row, if the planner moves rows as they are: all of each tensor."""
    if not (source.is_plain and target.is_plain) or source.stride != target.stride:
        return None
    try:
        plan = plan_rows(operation, kind, source, target, (0,), (0,))
    except LLMException:
        return None
    tensors = range(source.num_tensors)
    is_whole = (
        plan.src_tensors == plan.dst_tensors == tensors == range(target.num_tensors)
        and not plan.split
        and not plan.reinterpret
        and [*plan.segments] == [(0, 0, source.stride)]
        and not plan.segments.repeats
    )
    return plan if is_whole else None


def _fits(side: Side, memory: TensorMemory) -> bool:
    return (
        len(memory.addresses) == side.num_tensors
        and first_below(memory.nbytes, side.tensor_nbytes) < 0
    )


def _copied(rows: Blocks) -> Blocks:
    return rows.copy() if type(rows) is np.ndarray else tuple(rows)
