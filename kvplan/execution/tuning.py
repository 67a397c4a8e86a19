"""The choice of a copy tuning: given, stored for this kind of machine, or built in."""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvnative._tuning import Tuning, builtin_tuning, check_tuning
from kvnative.cores import usable_cores
from kvplan.status import LLMException, invalid
from kvplan.system.machine_file import (
    cache_path,
    cpuinfo,
    model_of,
    read_machines,
    unreadable,
    write_machines,
)
from kvplan.validation import check_type, shown

FILE_VERSION: Final = 3
ENVIRONMENT: Final = "KVPLAN_TUNING"
_CHOICES: Final = ("auto", "builtin")


class Finding(NamedTuple):
    """A measurement. Only sure ones are stored.

    Attributes:
        tuning: the built-in tuning with the fields that were clearly better.
        sure: False if too little could be measured; the tuning is then the built-in one.
        reasons: the comparison that decided each field, as text.
        took_ms: duration of the measurement in milliseconds.
        measured: time of the measurement, in UTC, as ISO 8601.
    """

    tuning: Tuning
    sure: bool
    reasons: tuple[str, ...]
    took_ms: float
    measured: str = ""


class Choice(NamedTuple):
    """A tuning and its origin.

    Attributes:
        tuning: the tuning of copies.
        source: "built in", "measured", or the name of the option or variable that gave it.
        note: the reason why the stored tuning cannot be read; otherwise empty.
    """

    tuning: Tuning
    source: str
    note: str = ""


def tuning_path() -> Path:
    """Return the path of the file of tunings."""
    return cache_path("tuning.json")


def check_choice(name: str, value: object) -> None:
    """Check an argument of `choose`."""
    _given(name, check_type(name, value, str))


def choose(option: str | None = None) -> Choice:
    """Return the tuning that an engine's option or the environment selects.

    Args:
        option: "auto" for the stored tuning, else the built-in one; "builtin"; or a JSON object
            with fields that differ from the built-in tuning. None: KVPLAN_TUNING, or "auto".
    """
    name, text = "kvplan.tuning", option
    if text is None:
        name, text = ENVIRONMENT, os.environ.get(ENVIRONMENT) or "auto"
    given = _given(name, text)
    if given is not None:
        return Choice(given, name)
    if text == "builtin":
        return Choice(builtin_tuning(), "built in")
    try:
        found = load_tuning()
    except (OSError, LLMException) as error:
        return Choice(builtin_tuning(), "built in", note=str(error))
    if found is None:
        return Choice(builtin_tuning(), "built in")
    return Choice(found.tuning, "measured")


def _given(name: str, text: str) -> Tuning | None:
    """Return the tuning in a JSON object, or None for the name of a choice."""
    if text in _CHOICES:
        return None
    if not text.startswith("{"):
        raise invalid(f"{name}={shown(text)} must be {', '.join(_CHOICES)} or a JSON object")
    try:
        fields = json.loads(text)
        unknown = sorted(fields.keys() - set(Tuning._fields))
        if not unknown:
            tuning = builtin_tuning()._replace(**fields)
            check_tuning(tuning)
            return tuning
    except (ValueError, TypeError, RecursionError) as error:
        raise invalid(f"{name}={shown(text)}: {error}") from None
    known = ", ".join(Tuning._fields)
    raise invalid(f"{name}={shown(text)}: {shown(unknown[0])} must be one of {known}")


def this_processor() -> str:
    """Return this machine's key in the file; in virtual machines, processors may share a name."""
    info = cpuinfo()
    names = ("cpu family", "model", "stepping", "CPU variant", "CPU revision")
    parts = [f"{name.lower()} {info[name]}" for name in names if name in info]
    with suppress(OSError, ValueError):
        parts.append(f"{os.sysconf('SC_LEVEL3_CACHE_SIZE') >> 10} KiB of L3")
    return ", ".join([model_of(info), *parts, f"usable cores: {usable_cores()}"])


def load_tuning() -> Finding | None:
    """Return the tuning that is stored for this kind of machine, or None."""
    path = tuning_path()
    machines = read_machines(path, FILE_VERSION)
    if not machines or (machine := this_processor()) not in machines:
        return None
    try:
        return _finding_of(machines[machine])
    except (LLMException, TypeError, ValueError, KeyError) as error:
        raise unreadable(path, f"machines[{shown(machine)}]: {error}") from None


def _finding_of(document: Any) -> Finding:
    found = check_type("machine", document, dict)
    tuning = Tuning(**check_type("tuning", found["tuning"], dict))
    check_tuning(tuning)
    reasons = [
        _line("reasons[]", reason) for reason in check_type("reasons", found["reasons"], list)
    ]
    took_ms = float(check_type("took_ms", found["took_ms"], float))
    if not math.isfinite(took_ms):
        raise ValueError(f"took_ms={took_ms} must be finite")
    return Finding(tuning, True, tuple(reasons), took_ms, _line("measured", found["measured"]))


def _line(name: str, value: object) -> str:
    """Return a line of text that is safe for terminals: no control characters or surrogates."""
    if not check_type(name, value, str).isprintable():
        raise ValueError(f"{name}={shown(value)} must be printable")
    return str(value)


def save_tuning(found: Finding) -> Finding:
    """Store a sure measurement for this kind of machine, and return it with the time."""
    assert found.sure, "other processes disturbed the measurement"
    path = tuning_path()
    machines = read_machines(path, FILE_VERSION)
    found = found._replace(measured=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    machines[this_processor()] = {
        "measured": found.measured,
        "took_ms": round(found.took_ms, 1),
        "tuning": found.tuning._asdict(),
        "reasons": found.reasons,
    }
    write_machines(path, FILE_VERSION, machines)
    return found
