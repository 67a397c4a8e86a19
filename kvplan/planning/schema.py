"""Plans as plain JSON values, and back, exactly."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

from kvplan.planning.invariants import check_invariants
from kvplan.planning.layout import Side
from kvplan.planning.plan import SCHEMA_VERSION, Kind, Operation, Plan
from kvplan.planning.segments import Coalesce, Segments
from kvplan.status import invalid
from kvplan.types import Placement


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
    if not isinstance(document, dict):
        raise invalid(f"document must be a dict, not {type(document).__name__}")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise invalid(f"schema_version={version!r} must be {SCHEMA_VERSION}")
    expected = {field.name for field in fields(Plan)} | {"schema_version"}
    if document.keys() != expected:
        odd = sorted(expected ^ document.keys(), key=str)
        raise invalid(f"document: missing or unknown fields {odd}")
    try:
        plan = Plan(
            operation=_one_of("operation", document["operation"], get_args(Operation)),
            kind=_one_of("kind", document["kind"], get_args(Kind)),
            src=_side_from_dict("src", document["src"]),
            dst=_side_from_dict("dst", document["dst"]),
            src_tensors=range(*_integers("src_tensors", document["src_tensors"], 2)),
            dst_tensors=range(*_integers("dst_tensors", document["dst_tensors"], 2)),
            tensors_per_layer=_positive("tensors_per_layer", document["tensors_per_layer"]),
            segments=Segments(
                *(_integers(name, document["segments"][name]) for name in Segments.columns())
            ),
            num_slices=_positive("num_slices", document["num_slices"]),
            coalesce=Coalesce(document["coalesce"]),
        )
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise invalid(f"document is not a plan: {error!r}") from None
    check_invariants(plan)
    return plan


def _side_to_dict(side: Side) -> dict[str, Any]:
    values = {field.name: getattr(side, field.name) for field in fields(Side)}
    return values | {"placement": side.placement.name}


def _side_from_dict(name: str, document: dict[str, Any]) -> Side:
    if document.keys() != {field.name for field in fields(Side)}:
        raise ValueError(f"{name}: fields must be {[field.name for field in fields(Side)]}")
    if not isinstance(document["paged"], bool) or not isinstance(document["name"], str):
        raise TypeError(f"{name}: paged must be a bool and name a str")
    return Side(
        num_tensors=_positive(f"{name}.num_tensors", document["num_tensors"]),
        count=_positive(f"{name}.count", document["count"]),
        stride=_positive(f"{name}.stride", document["stride"]),
        paged=document["paged"],
        placement=Placement[document["placement"]],
        name=document["name"],
    )


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {allowed}")
    return value


def _positive(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r} must be an int > 0")
    return value


def _integers(name: str, values: Any, length: int | None = None) -> list[int]:
    if not isinstance(values, list) or (length is not None and len(values) != length):
        raise TypeError(f"{name} must be a list of {length or 'n'} int")
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{name} must hold int >= 0")
    return values
