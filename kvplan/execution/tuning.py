"""Choose the tuning of copies: given, stored for this kind of machine, or built in.

`kvplan tune` measures one (`calibration.py`) and stores it; nothing is measured unasked. The file
holds numbers and names of strategies: they are checked when it is read, and are never executed.
"""

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

FILE_VERSION: Final = 2
ENVIRONMENT: Final = "KVPLAN_TUNING"
_CHOICES: Final = ("auto", "builtin")


class Finding(NamedTuple):
    """What was measured. Only what is sure is stored.

    Attributes:
        tuning: the built-in one, but for what was clearly better.
        sure: False: others used the machine, so this is what is built in.
        reasons: what each part was decided by, and by how much, for people.
        took_ms: how long it took.
        measured: when, in UTC, as ISO 8601 has it.
    """

    tuning: Tuning
    sure: bool
    reasons: tuple[str, ...]
    took_ms: float
    measured: str = ""


class Choice(NamedTuple):
    """A tuning, and why it is this one.

    Attributes:
        tuning: what copies are made with.
        source: "built in", "measured", or the name of what gave it.
        note: why what is stored is not used; empty: it is, or there is none.
    """

    tuning: Tuning
    source: str
    note: str = ""


def tuning_path() -> Path:
    """Where tunings are stored.

    Raises:
        LLMException: LLM_PARAM_INVALID: there is no place.
    """
    return cache_path("tuning.json")


def check_choice(name: str, value: object) -> None:
    """Refuse what `choose` would.

    Raises:
        TypeError: `value` is not a str.
        LLMException: LLM_PARAM_INVALID: what is wrong with it.
    """
    _given(name, check_type(name, value, str))


def choose(option: str | None = None) -> Choice:
    """Return the tuning that an engine's option, or else the environment, asks for.

    Args:
        option: "auto": the stored tuning, else the built-in one; "builtin"; or a JSON object with
            some fields of a tuning that differ from the built-in one. None: the value of
            KVPLAN_TUNING, or "auto".

    Raises:
        LLMException: LLM_PARAM_INVALID: what is wrong with it.
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
    """The tuning that it spells out; None: it names a choice."""
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
    """What tunings are stored by: more than a name, which a virtual machine gives to several."""
    said = cpuinfo()
    names = ("cpu family", "model", "stepping", "CPU variant", "CPU revision")
    parts = [f"{it.lower()} {said[it]}" for it in names if it in said]
    with suppress(OSError, ValueError):
        parts.append(f"{os.sysconf('SC_LEVEL3_CACHE_SIZE') >> 10} KiB of L3")
    return ", ".join([model_of(said), *parts, f"usable cores: {usable_cores()}"])


def load_tuning() -> Finding | None:
    """Return what is stored for this kind of machine; None: nothing yet.

    Raises:
        OSError: there is a file, and it cannot be read.
        LLMException: LLM_PARAM_INVALID: what is wrong with it, or this processor lacks for it.
    """
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
    reasons = [_line("reasons[]", it) for it in check_type("reasons", found["reasons"], list)]
    took_ms = float(check_type("took_ms", found["took_ms"], float))
    if not math.isfinite(took_ms):
        raise ValueError(f"took_ms={took_ms} must be finite")
    return Finding(tuning, True, tuple(reasons), took_ms, _line("measured", found["measured"]))


def _line(name: str, value: object) -> str:
    """A line of text, which can be shown: no control characters of terminals, no surrogates."""
    if not check_type(name, value, str).isprintable():
        raise ValueError(f"{name}={shown(value)} must be printable")
    return str(value)


def save_tuning(found: Finding) -> Finding:
    """Store a sure one for this kind of machine; those of others stay. Returned with the time.

    Raises:
        OSError: it cannot be written.
        LLMException: as `load_tuning`, unless only this machine's is wrong.
    """
    assert found.sure, "what others have disturbed says nothing of the machine"
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
