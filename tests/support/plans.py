"""Plans that are not made by the planner's functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvnative._lower import Descriptors
from kvplan import Plan
from kvplan.execution import TensorMemory
from kvplan.execution.rows import RowRequests, counts_tokens
from kvplan.planning.blocks import Blocks
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.part import Kind, Operation
from kvplan.planning.side import Side
from kvplan.types import KvCacheExtParam


def joined(plans: Mapping[str, Plan]) -> Plan:
    """Return one plan with the only part of each of `plans`, labelled with its name."""
    return Plan([plan.part.labelled(name) for name, plan in plans.items()])


def lower_natively(
    requests: RowRequests,
    operation: Operation,
    kind: Kind,
    source: Side,
    target: Side,
    src: TensorMemory,
    dst: TensorMemory,
    src_rows: Blocks,
    dst_rows: Blocks,
    ext_param: KvCacheExtParam = ALL_LAYERS,
    num_tokens: int | None = None,
    src_token: int = 0,
    dst_token: int = 0,
    **more: Any,
) -> tuple[Plan, Descriptors] | None:
    """Lower a request without a plan, as an operation does; return None if it needs the planner."""
    tokens = num_tokens, src_token, dst_token
    if (by_tokens := counts_tokens(kind, *tokens)) is None:
        return None
    sides = source, target, src, dst
    rows = requests.pair(operation, kind, *sides, ext_param, by_tokens=by_tokens, **more)
    if rows is None or (bound := rows.bind(src_rows, dst_rows, *tokens)) is None:
        return None
    return Plan.made(bound[0]), bound[1]
