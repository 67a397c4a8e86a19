"""Plans in files: JSON of `to_dict`, one document, read from outside and so checked in full."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from kvplan.planning.plan import Plan
from kvplan.status import LLMException, invalid
from kvplan.validation import open_regular, shown

if TYPE_CHECKING:
    StrPath = str | os.PathLike[str]

MAX_NBYTES: Final = 128 << 20
"""Of a plan's file: room for three million segments that nothing could merge."""


def save(plan: Plan, path: StrPath) -> None:
    """Write `plan` to a file that `load_plan` reads.

    Raises:
        OSError: the file cannot be written.
    """
    import json  # as `load_plan` does: who only plans needs none

    Path(path).write_text(json.dumps(plan.to_dict()) + "\n", encoding="utf-8")


def load_plan(path: StrPath) -> Plan:
    """Return the plan that `plan.save` wrote.

    Raises:
        OSError: the file cannot be read.
        LLMException: LLM_PARAM_INVALID: it is not a regular file, or holds no plan, or one of
            another schema version; the message names the file and the field.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return read_plan(file, os.fspath(path))


def read_plan(file: BinaryIO, name: str) -> Plan:
    """As `load_plan`, from an open file that errors call `name`."""
    import json

    blob = file.read(MAX_NBYTES + 1)
    if len(blob) > MAX_NBYTES:
        raise invalid(f"{name} has more than {MAX_NBYTES >> 20} MiB, which no plan has")
    try:
        return _plan_of(json.loads(blob))
    except RecursionError:
        raise invalid(f"{name} is no plan: it is nested too deeply") from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise invalid(f"{name} is no plan: it is not JSON: {error}") from None
    except LLMException as error:
        raise LLMException(f"{name}: {error.args[0]}", status_code=error.status_code) from None


def _plan_of(document: Any) -> Plan:
    if not isinstance(document, dict):
        raise invalid(
            f"document is not a plan: it is {shown(document)}, and a plan is an object with "
            "schema_version"
        )
    return Plan.from_dict(document)
