"""Plans as plain JSON values, and back, exactly."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast, get_args

from kvplan.planning.invariants import check_invariants
from kvplan.planning.layout import Side
from kvplan.planning.plan import SCHEMA_VERSION, Kind, Operation, Plan
from kvplan.planning.segments import Coalesce, Segments
from kvplan.status import invalid
from kvplan.types import Placement
from kvplan.validation import INT64_MAX, check_type, check_width, shown


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
    """Return the plan that `to_dict` wrote; a document from outside is checked in full.

    Raises:
        LLMException: LLM_PARAM_INVALID for another schema version, a missing, unknown or
            impossible field, or a plan that breaks an invariant.
    """
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
