"""Plans that were made before: executed as they are, if both caches are what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Unpack, cast

from kvplan.engine.operation import Prepared, SubmitOptions
from kvplan.engine.resolve import READ, WRITTEN, TransferOperation
from kvplan.lease import BlockLease
from kvplan.planning.invariants import check_invariants
from kvplan.planning.part import Part
from kvplan.planning.plan import Plan
from kvplan.planning.planner import VERBS
from kvplan.planning.side import is_same_cache
from kvplan.planning.transfer import Planned, Rows, Transfer
from kvplan.status import invalid
from kvplan.types import Cache
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.planning.planner import Local
    from kvplan.planning.side import Side


class PlannedOperation(TransferOperation):
    """An operation that executes a plan which was made before."""

    __slots__ = ("_planned",)

    def __init__(
        self,
        engine: Engine,
        planned: Planned,
        *,
        by_layer: bool = False,
        speculative: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> None:
        part = check_plan(planned.plan)
        rows = Transfer(Rows(planned.src), Rows(planned.dst))
        super().__init__(engine, rows, by_layer=by_layer, speculative=speculative, **options)
        self._planned = planned
        self.name = f"{VERBS[self._local]}_layers" if by_layer else part.operation

    def prepare(self) -> Prepared:
        """Find both caches, and compare them with what the plan says."""
        planned = self._planned
        part, src, dst = check_plan(planned.plan), planned.src, planned.dst
        src_slot = dst_slot = 0
        if self._local == "dst":
            source, src_slot, src_memory = self.peer(
                "src", Rows(src), READ, paged=part.src.paged, writable=False
            )
        else:
            source, src_memory = self.own("src", cast(Cache, src), paged=part.src.paged)
        if self._local == "src":
            target, dst_slot, dst_memory = self.peer(
                "dst", Rows(dst), WRITTEN[:-1], paged=part.dst.paged, writable=True
            )
        elif self._local == "both" and is_same_cache(cast(Cache, src), cast(Cache, dst)):
            target, dst_memory = source, src_memory
        else:
            target, dst_memory = self.own("dst", cast(Cache, dst), paged=part.dst.paged)
        if self._local == "dst":
            _check_slot("src", src, src_slot, part)
        elif self._local == "src":
            _check_slot("dst", dst, dst_slot, part)
        made = fitted(planned, source, target, self._local, by_layer=self.by_layer)
        return Plan.made(made), src_memory, dst_memory, None


def check_plan(plan: object) -> Part:
    """Return the part of the plan of a `Planned`."""
    parts = check_type("plan", plan, Plan).parts
    if len(parts) > 1:
        raise invalid(
            f"plan={plan!r} has {len(parts)} parts; they move by a mapping of names to Planned, of "
            "each part its plan in plan.by_part()"
        )
    return parts[0]


def fitted(planned: Planned, source: Side, target: Side, local: Local, *, by_layer: bool) -> Part:
    """Return the part that is planned, with the names of the caches that it is executed between."""
    part = check_plan(planned.plan)
    if part.local != local:
        needed = f'kvplan.plan(..., local="{local}")'
        raise invalid(
            f"src={shown(planned.src)} and dst={shown(planned.dst)} make a {VERBS[local]}, and "
            f"the plan is of {part.operation}; {needed} plans a {VERBS[local]}"
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
    """Return the blocks or slots of a side that a plan moves, each once, ascending."""
    runs = part.segments.expanded()
    side: Side = getattr(part, name)
    offsets = runs.src_offsets if name == "src" else runs.dst_offsets
    return cast("list[int]", side.rows_of(offsets, runs.nbytes).tolist())


def _check_slot(name: str, key: object, slot: int, part: Part) -> None:
    side: Side = getattr(part, name)
    if not side.paged and (rows := rows_of(part, name)) not in ([], [slot]):
        raise invalid(f"{name}={shown(key)} names slot {slot}, and the plan moves slot {rows[0]}")
