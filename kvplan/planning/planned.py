"""Checks of plans that were made earlier (`Planned`) against the caches that they now move."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from kvplan.lease import BlockLease
from kvplan.planning.invariants import check_invariants
from kvplan.planning.plan import Plan
from kvplan.planning.planner import VERBS
from kvplan.status import invalid
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from kvplan.planning.part import Part
    from kvplan.planning.planner import Local
    from kvplan.planning.side import Side
    from kvplan.planning.transfer import Planned


def check_plan(plan: object) -> Part:
    """Return the only part of the plan of a `Planned`; refuse several."""
    parts = check_type("plan", plan, Plan).parts
    if len(parts) > 1:
        raise invalid(
            f"plan={plan!r} has {len(parts)} parts; pass a mapping of names to Planned, one for "
            "each plan in plan.by_part()"
        )
    return parts[0]


def fitted(planned: Planned, source: Side, target: Side, local: Local, *, by_layer: bool) -> Part:
    """Return the planned part, with the names of its actual caches; refuse caches that differ."""
    part = check_plan(planned.plan)
    if part.local != local:
        needed = f'kvplan.plan(..., local="{local}")'
        raise invalid(
            f"src={shown(planned.src)} and dst={shown(planned.dst)} make a {VERBS[local]}, but "
            f"the plan is a {part.operation}; {needed} plans a {VERBS[local]}"
        )
    for name, then, now in (("src", part.src, source), ("dst", part.dst, target)):
        if then != now:
            from kvplan.inspection.diff import side_changes

            changes = "; ".join(side_changes(name, then, now))
            raise invalid(
                f"{name}={shown(getattr(planned, name))} is not as planned: {changes}; plan again"
            )
        if by_layer and "layer" not in part.split and now.extent("layer") > 1:
            raise invalid(
                f"{name}: the plan moves tensors of {now.extent('layer')} layers whole; "
                "kvplan.plan(..., by_layer=True) plans each layer by itself"
            )
    check_invariants(part)
    for name in ("src", "dst"):
        lease = getattr(planned, name)
        if isinstance(lease, BlockLease) and lease.paged:
            lease.named(f"plan {name} blocks", rows_of(part, name))
    return replace(part, src=source, dst=target)


def rows_of(part: Part, name: str) -> list[int]:
    """Return the blocks or slots of a side that a part moves, each once, ascending."""
    runs = part.segments.expanded()
    side: Side = getattr(part, name)
    offsets = runs.src_offsets if name == "src" else runs.dst_offsets
    return cast("list[int]", side.rows_of(offsets, runs.nbytes).tolist())


def check_slot(planned: Planned, name: str, slot: int) -> None:
    """Refuse a key whose slot is not the one that the plan moves."""
    rows = rows_of(check_plan(planned.plan), name)
    if rows not in ([], [slot]):
        key = shown(getattr(planned, name))
        raise invalid(f"{name}={key} names slot {slot}, but the plan moves slot {rows[0]}")
