"""Plans as plain JSON values, and back, exactly; and the invariants of a plan, checked.

Contract 1: every byte in bounds on both sides, no destination byte written twice.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast, get_args

import numpy as np

from kvplan.planning.side import Side
from kvplan.planning.plan import SCHEMA_VERSION, Kind, Operation, Plan
from kvplan.planning.segments import Coalesce, Column, Segments, first_overlap
from kvplan.status import invalid
from kvplan.types import Placement
from kvplan.validation import INT64_MAX, UINT32_MAX, check_type, check_width, shown

KINDS: dict[Operation, tuple[Kind, ...]] = {
    "pull_cache": ("C2C",),
    "pull_blocks": ("C2B", "B2B"),
    "push_cache": ("C2C",),
    "push_blocks": ("C2B", "B2B"),
    "copy_cache": ("C2C",),
    "copy_blocks": ("B2B",),
    "swap_blocks": ("B2B",),
}


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return `plan` as values that `json.dumps` takes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "operation": plan.operation,
        "kind": plan.kind,
        "src": _side_to_dict(plan.src),
        "dst": _side_to_dict(plan.dst),
        "src_tensors": [plan.src_tensors.start, plan.src_tensors.stop],
        "dst_tensors": [plan.dst_tensors.start, plan.dst_tensors.stop],
        "tensors_per_layer": plan.tensors_per_layer,
        "segments": {name: getattr(plan.segments, name).tolist() for name in Segments.columns()},
        "num_slices": plan.num_slices,
        "coalesce": plan.coalesce.value,
    }


def from_dict(document: dict[str, Any]) -> Plan:
    """Return the plan that `to_dict` wrote; a document from outside is checked in full."""
    try:
        plan = _parse(document)
    except (TypeError, ValueError) as error:
        raise invalid(f"document is not a plan: {error}") from None
    check_invariants(plan)
    return plan


def _parse(document: Any) -> Plan:
    # The version first: another one may have other fields.
    version = check_type("document", document, dict).get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ValueError(f"schema_version={shown(version)} must be {SCHEMA_VERSION}")
    _check_fields("document", document, {"schema_version", *(f.name for f in fields(Plan))})
    columns = _check_fields("segments", document["segments"], set(Segments.columns()))
    return Plan(
        operation=_one_of("operation", document["operation"], get_args(Operation)),
        kind=_one_of("kind", document["kind"], get_args(Kind)),
        src=_side_from_dict("src", document["src"]),
        dst=_side_from_dict("dst", document["dst"]),
        src_tensors=_range("src_tensors", document["src_tensors"]),
        dst_tensors=_range("dst_tensors", document["dst_tensors"]),
        tensors_per_layer=_positive("tensors_per_layer", document["tensors_per_layer"]),
        segments=Segments(*(_integers(name, columns[name]) for name in Segments.columns())),
        num_slices=_positive("num_slices", document["num_slices"]),
        coalesce=Coalesce(_one_of("coalesce", document["coalesce"], tuple(Coalesce))),
    )


_SIDE_FIELDS = {it.name for it in fields(Side)} - {"way"}


def _side_to_dict(side: Side) -> dict[str, Any]:
    values = {name: getattr(side, name) for name in _SIDE_FIELDS}
    return values | {"placement": side.placement.name}


def _side_from_dict(name: str, document: Any) -> Side:
    _check_fields(name, document, _SIDE_FIELDS)
    return Side(
        num_tensors=_positive(f"{name}.num_tensors", document["num_tensors"]),
        count=_positive(f"{name}.count", document["count"]),
        stride=_positive(f"{name}.stride", document["stride"]),
        paged=check_type(f"{name}.paged", document["paged"], bool),
        placement=Placement[
            _one_of(f"{name}.placement", document["placement"], tuple(Placement.__members__))
        ],
        name=check_type(f"{name}.name", document["name"], str),
    )


def _check_fields(name: str, document: Any, expected: set[str]) -> dict[str, Any]:
    given = check_type(name, document, dict).keys()
    if given != expected:
        raise ValueError(
            f"{name}: missing fields {sorted(expected - given)}, unknown {shown(given - expected)}"
        )
    return cast(dict[str, Any], document)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={shown(value)} must be one of {[*map(str, allowed)]}")
    return value


def _positive(name: str, value: Any) -> int:
    return check_width(name, value, 1, INT64_MAX)


def _integers(name: str, values: Any) -> list[int]:
    if not set(map(type, check_type(name, values, list))) <= {int}:
        raise TypeError(f"{name}={shown(values)} must hold int only")
    return cast(list[int], values)


def _range(name: str, ends: Any) -> range:
    if len(_integers(name, ends)) != 2:
        raise ValueError(f"{name}={shown(ends)} must be [first, one past the last]")
    return range(*ends)


def check_invariants(plan: Plan) -> None:
    """Check a plan that was not made by the planner (read from a file, or built by hand)."""
    segments, t = plan.segments, plan.tensors_per_layer
    if len(segments) == 0 or not segments.nbytes.all():
        raise invalid("segments: a plan has at least one, and none of 0 bytes")
    least = len(segments)
    if plan.num_slices < least or (plan.coalesce is Coalesce.NONE and plan.num_slices != least):
        raise invalid(
            f"num_slices={plan.num_slices} of {least} segments, coalesce={plan.coalesce}: slices "
            "are merged, never cut"
        )
    letters = "2".join("B" if side.paged else "C" for side in (plan.src, plan.dst))
    if plan.kind != letters or plan.kind not in KINDS[plan.operation]:
        raise invalid(
            f"kind={plan.kind} of operation={plan.operation} between {plan.src.row}s and "
            f"{plan.dst.row}s must be {letters} and one of {KINDS[plan.operation]}"
        )
    for name, side, offsets, tensors in (
        ("src", plan.src, segments.src_offsets, plan.src_tensors),
        ("dst", plan.dst, segments.dst_offsets, plan.dst_tensors),
    ):
        if not 1 <= side.tensor_nbytes <= INT64_MAX or not 1 <= side.num_tensors <= UINT32_MAX:
            raise invalid(
                f"{name}: {side.num_tensors} tensors of {side.tensor_nbytes} bytes are out of "
                f"range [1, {UINT32_MAX}] and [1, {INT64_MAX}]"
            )
        _check_bounds(name, side, offsets, segments.nbytes)
        if not tensors or tensors.step != 1 or tensors.start < 0 or tensors.stop > side.num_tensors:
            raise invalid(
                f"{name}_tensors={tensors} must be a non-empty range of step 1 in "
                f"[0, {side.num_tensors})"
            )
        if tensors.start % t or (tensors.stop % t and tensors.stop != side.num_tensors):
            raise invalid(f"{name}_tensors={tensors} must hold whole layers of {t} tensors")
    if len(plan.src_tensors) != len(plan.dst_tensors):
        raise invalid(
            f"src_tensors={plan.src_tensors} and dst_tensors={plan.dst_tensors} must be of equal "
            "length"
        )
    if (overlap := first_overlap(segments.dst_offsets, segments.nbytes)) is not None:
        raise invalid(
            f"segments {overlap[0]} and {overlap[1]} write the same destination bytes, from "
            f"dst offset {int(segments.dst_offsets[overlap[1]])}"
        )


def _check_bounds(name: str, side: Side, offsets: Column, nbytes: Column) -> None:
    limit = np.uint64(side.tensor_nbytes)
    # Written so that no sum can wrap around.
    outside = np.flatnonzero((nbytes > limit) | (offsets > limit - np.minimum(nbytes, limit)))
    if len(outside):
        i = int(outside[0])
        raise invalid(
            f"segment {i}: {name} bytes [{int(offsets[i])}, {int(offsets[i]) + int(nbytes[i])}) "
            f"are outside the tensor's [0, {side.tensor_nbytes})"
        )
