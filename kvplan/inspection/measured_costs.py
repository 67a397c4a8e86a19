"""What transfers cost on this machine: a file that `kvplan tune` writes, and is read on request.

Nothing reads it unasked: `plan.estimate("local")` gives the same on every machine.
"""

from __future__ import annotations

import json
import os
import platform
import pwd
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from kvplan.inspection.cost import CostLine, TransportCost
from kvplan.status import LLMException, invalid
from kvplan.validation import check_type, shown

FILE_VERSION: Final = 1
_MAX_NBYTES: Final = 1 << 20


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
    given = os.environ.get("XDG_CACHE_HOME", "")
    if Path(given).is_absolute():
        return Path(given, "kvplan", "costs.json")
    home = os.environ.get("HOME", "")
    if not Path(home).is_absolute():
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            raise invalid(
                "no place for measured costs: this user has no home directory; set XDG_CACHE_HOME"
            ) from None
    return Path(home, ".cache", "kvplan", "costs.json")


def this_machine() -> str:
    """What costs are stored by: `AMD EPYC 7763, 2 cores`."""
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} core{'' if cores == 1 else 's'}"


def _processor() -> str:
    with suppress(OSError):
        rows = re.findall(r"^([^:\n]*?)\s*: *(.*)$", _cpuinfo(), re.MULTILINE)
        said: dict[str, str] = dict(rows)
        if name := said.get("model name"):
            return name
        if part := said.get("CPU part"):  # of Arm, which has no names there
            return f"Arm {said.get('CPU implementer', '?')}/{part}"
    return platform.machine() or "unknown processor"


def _cpuinfo() -> str:
    return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")


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
    try:
        machines = _read(path)
    except FileNotFoundError:
        return None
    machine = this_machine()
    if machine not in machines:
        return None
    try:
        return _measured_of(machine, machines[machine])
    except (LLMException, TypeError, KeyError) as error:
        raise _unreadable(path, f"machines[{shown(machine)}]: {error}") from None


def save_costs(
    costs: Mapping[str, TransportCost], path: str | os.PathLike[str] | None = None
) -> MeasuredCosts:
    """Store costs of this kind of machine; those of others, and of other transports, stay.

    The file is replaced in one step: who reads it meanwhile reads the old one.

    Raises:
        OSError: it cannot be written.
        LLMException: as `load_costs`.
    """
    path = Path(path) if path is not None else costs_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        machines = _read(path)
    except FileNotFoundError:
        machines = {}
    before = load_costs(path)
    kept = {} if before is None else dict(before.costs)
    measured = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    found = MeasuredCosts(this_machine(), measured, kept | dict(costs))
    machines[found.machine] = {
        "measured": found.measured,
        "costs": {name: asdict(cost) for name, cost in found.costs.items()},
    }
    _replace(path, json.dumps({"schema_version": FILE_VERSION, "machines": machines}, indent=1))
    return found


def _replace(path: Path, text: str) -> None:
    import tempfile  # loads much that `import kvplan` needs for nothing else

    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read(path: Path) -> dict[str, Any]:
    """What is stored, by machine; only what is this machine's is looked into."""
    with path.open("rb") as file:
        blob = file.read(_MAX_NBYTES + 1)
    if len(blob) > _MAX_NBYTES:
        raise _unreadable(path, f"it has more than {_MAX_NBYTES} bytes")
    try:
        document = check_type("document", json.loads(blob), dict)
        version = document.get("schema_version")
        if version != FILE_VERSION:
            raise _unreadable(path, f"schema_version={shown(version)} must be {FILE_VERSION}")
        return cast(dict[str, Any], check_type("machines", document.get("machines"), dict))
    except (ValueError, TypeError, RecursionError) as error:
        raise _unreadable(path, str(error)) from None


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


def _unreadable(path: Path, why: str) -> LLMException:
    return invalid(f"{path}: {why}; remove it, and `kvplan tune` makes another")
