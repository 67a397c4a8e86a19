"""What transfers cost on this machine: a file that `kvplan tune` writes, and is read on request.

Nothing reads it unasked: `plan.estimate("local")` gives the same on every machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvplan.inspection.cost import CostLine, TransportCost
from kvplan.machine_file import (
    cache_path,
    read_machines,
    this_machine,
    unreadable,
    write_machines,
)
from kvplan.status import LLMException
from kvplan.validation import check_type, shown

FILE_VERSION: Final = 1


class MeasuredCosts(NamedTuple):
    """What was measured on one kind of machine.

    Attributes:
        machine: which: the model of its processor, and how many cores a process may use.
        measured: when, in UTC, as ISO 8601 has it: "2026-11-25T18:50:00Z".
        costs: by name, as `plan.estimate` takes them.
    """

    machine: str
    measured: str
    costs: Mapping[str, TransportCost]


def costs_path() -> Path:
    """Where `kvplan tune` stores its costs: in XDG_CACHE_HOME, or ~/.cache.

    Raises:
        LLMException: LLM_PARAM_INVALID: there is neither.
    """
    return cache_path("costs.json")


def load_costs(path: str | os.PathLike[str] | None = None) -> MeasuredCosts | None:
    """Return what `kvplan tune` has measured on this kind of machine; None: nothing yet.

    `plan.estimate(load_costs().costs["local"])` estimates with it.

    Args:
        path: of the file; None: where `kvplan tune` puts it.

    Raises:
        OSError: there is a file, and it cannot be read.
        LLMException: LLM_PARAM_INVALID: it is not one that `kvplan tune` wrote (naming what is
            wrong), or there is no place for one.
    """
    path = Path(path) if path is not None else costs_path()
    machines = read_machines(path, FILE_VERSION)
    if not machines or (machine := this_machine()) not in machines:
        return None
    try:
        return _measured_of(machine, machines[machine])
    except (LLMException, TypeError, KeyError) as error:
        raise unreadable(path, f"machines[{shown(machine)}]: {error}") from None


def save_costs(
    costs: Mapping[str, TransportCost], path: str | os.PathLike[str] | None = None
) -> MeasuredCosts:
    """Store costs of this kind of machine; those of others, and of other transports, stay.

    Raises:
        OSError: it cannot be written.
        LLMException: as `load_costs`.
    """
    path = Path(path) if path is not None else costs_path()
    machines = read_machines(path, FILE_VERSION)
    before = load_costs(path)
    kept = {} if before is None else dict(before.costs)
    measured = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    found = MeasuredCosts(this_machine(), measured, kept | dict(costs))
    machines[found.machine] = {
        "measured": found.measured,
        "costs": {name: _stored(cost) for name, cost in found.costs.items()},
    }
    write_machines(path, FILE_VERSION, machines)
    return found


def _stored(cost: TransportCost) -> dict[str, Any]:
    fields = asdict(cost)
    del fields["copies"]  # those of a GPU are stored by its kind, see copy_ways
    return fields


def _measured_of(machine: str, document: Any) -> MeasuredCosts:
    stored = check_type("costs", check_type("machine", document, dict)["costs"], dict)
    measured = check_type("measured", document["measured"], str)
    costs = {}
    for name, it in stored.items():
        fields = {**check_type(f"costs[{shown(name)}]", it, dict)}
        lines = check_type("lines", fields.pop("lines"), list)
        made = tuple(CostLine(**check_type("lines[]", line, dict)) for line in lines)
        costs[name] = TransportCost(**fields, lines=made)
    return MeasuredCosts(machine, measured, costs)
