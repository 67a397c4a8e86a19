"""`kvplan check`: validate a plan, a placement of weights, or a reshard between two placements."""

from __future__ import annotations

import json
import os
import sys
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from kvplan.cli.common import STDIN, ExitCode, json_option, stdin, write_json, write_lines
from kvplan.planning.schema import MAX_NBYTES, read_plan
from kvplan.planning.texts import nbytes_text, plural
from kvplan.status import LLMException
from kvplan.validation import open_regular

if TYPE_CHECKING:
    from kvplan.planning.plan import Plan
    from kvplan.planning.weights import WeightPlacement


@click.command(
    "check",
    epilog="Examples: kvplan check plan.json; kvplan check tp2.json --from tp4.json --save plans/",
)
@click.argument("file", metavar="FILE", type=click.Path(), required=False)
@click.option(
    "--from",
    "source",
    metavar="SOURCE",
    type=click.Path(),
    help="Placement of weights that FILE, another one, is filled from: plan the reshard.",
)
@click.option(
    "--save",
    "folder",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --from: write the plan of each participant to FOLDER/PARTICIPANT.json.",
)
@click.option("--schema", "schema", is_flag=True, help="Print the JSON schema of plans.")
@json_option
def check(
    file: str | None, *, source: str | None, folder: Path | None, schema: bool, as_json: bool
) -> ExitCode:
    """Check a file: a plan, or a placement of weights.

    FILE is a plan, or Mooncake's WeightPlacementManifest as JSON; - is stdin. With --from the
    reshard from SOURCE is planned, and each byte of FILE's participants must be written exactly
    once. Exits with 0 if everything holds, with 1 if something does not, and with 2 if a file
    cannot be read. See docs/reference/plan-format.md.
    """
    if schema:
        text = resources.files("kvplan.planning").joinpath("plan.schema.json").read_text("utf-8")
        sys.stdout.write(text)
        return ExitCode.OK
    if file is None:
        raise click.UsageError("Missing argument 'FILE'.")
    if folder is not None and source is None:
        raise click.UsageError("--save needs --from SOURCE")
    named = {name: _read(name) for name in (file, source) if name is not None}
    try:
        lines, document = _checked(file, source, named, folder)
    except LLMException as error:
        message = str(error).removesuffix(f" ({error.status_code.name})")
        lines, document = [message], {"valid": False, "error": message}
    if as_json:
        write_json({"file": file} | document)
    else:
        write_lines(lines)
    return ExitCode.OK if document["valid"] else ExitCode.DIFFERENT


def _read(name: str) -> bytes:
    """Return the bytes of a file, or of stdin."""
    if name == STDIN:
        return stdin("a file").read(MAX_NBYTES + 1)
    with os.fdopen(open_regular(name), "rb") as file:
        return file.read(MAX_NBYTES + 1)


def _checked(
    file: str, source: str | None, blobs: dict[str, bytes], folder: Path | None
) -> tuple[list[str], dict[str, Any]]:
    """Check the files; return the findings as lines and as a document."""
    from kvplan.planning.weights import is_placement, plan_reshard, read_placement

    if source is None and not is_placement(_json(blobs[file])):
        plan = read_plan(BytesIO(blobs[file]), file)
        text = (
            f"{file}: a plan: {plan!r}; every byte is inside its tensor, and none is written twice"
        )
        return [text], {"valid": True, "document": "plan", **_facts(plan)}
    target = read_placement(blobs[file], file)
    lines = [_placed(file, target)]
    if source is None:
        return lines, {"valid": True, "document": "weights", "participants": len(target.parts)}
    giving = read_placement(blobs[source], source)
    plans = plan_reshard(giving, target)
    lines.append(_placed(source, giving))
    facts = {}
    for participant, plan in plans.items():
        sources = sorted({part.source for part in plan.parts if part.source is not None})
        takes = ", ".join(giving.parts[index].participant_id for index in sources)
        facts[participant] = _facts(plan) | {"sources": sources}
        lines.append(
            f"{participant}: {nbytes_text(plan.nbytes)} in {plural(plan.num_descriptors, 'copy')} "
            f"from {takes}; each byte is written once"
        )
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            plan.save(folder / f"{quote(participant, safe='')}.json")
    return lines, {"valid": True, "document": "reshard", "participants": facts}


def _json(blob: bytes) -> object:
    """Return the JSON value; None for malformed JSON, which `read_plan` then reports."""
    try:
        return json.loads(blob)
    except (ValueError, RecursionError):
        return None


def _facts(plan: Plan) -> dict[str, Any]:
    names = ("operation", "kind", "fingerprint", "num_descriptors", "nbytes")
    return {name: getattr(plan, name) for name in names} | {"parts": len(plan.parts)}


def _placed(name: str, placement: WeightPlacement) -> str:
    tensors, parts = len(placement.tensors), len(placement.parts)
    return (
        f"{name}: weights of {placement.resource_id}, generation {placement.weight_generation}: "
        f"{plural(tensors, 'tensor')} on {plural(parts, 'participant')}, each covered"
    )
