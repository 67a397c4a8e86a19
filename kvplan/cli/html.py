"""`kvplan html`: a picture of a plan, or of how two differ, in a file."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvplan.cli.common import ExitCode, json_option, write_json
from kvplan.cli.plans import STDIN, path_of, plan_argument, plan_option
from kvplan.planning.groups import GroupPlan
from kvplan.planning.plan import Plan
from kvplan.status import LLMException
from kvplan.validation import printable

if TYPE_CHECKING:
    from kvplan.planning.groups import AnyPlan

SCHEMA_VERSION: Final = 1

_KINDS: Final = (".html", ".htm", ".svg")


@click.command("html", epilog="Example: kvplan html plan.json --diff other.json -o changed.html")
@plan_argument("plan")
@plan_option("--diff", "other", "Draw what changes from PLAN.json to this one.")
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    metavar="FILE",
    help="A file that ends in .html or .svg, or - for HTML on stdout. "
    "Default: as PLAN.json is called, .html, in the folder where you are.",
)
@click.option("--open", "show", is_flag=True, help="Show it in a browser, too.")
@json_option
def command(
    plan: AnyPlan, other: AnyPlan | None, output: str | None, *, show: bool, as_json: bool
) -> ExitCode:
    """Draw a plan: source blocks, destination blocks, and what goes where.

    The HTML is one file that loads nothing else; it can be sent to others. SVG is for documents.
    PLAN.json may be - for stdin. A file that exists is replaced. Exits with 2 if it cannot be
    written.
    """
    if output == STDIN:
        if show or as_json:
            raise click.UsageError("what is written to stdout can be neither shown nor described")
        click.echo(_html(plan, other))
        return ExitCode.OK
    path = Path(output or _name_for(path_of("plan")))
    if path.suffix not in _KINDS:
        raise click.UsageError(f"--output {path} must end in {', '.join(_KINDS)}, or be -")
    if path.suffix == ".svg":
        if other is not None:
            raise click.UsageError("--diff is drawn as HTML, and not as SVG")
        text = plan.to_svg()
    else:
        text = _html(plan, other)
    path.write_text(text, encoding="utf-8")
    if as_json:
        nbytes = len(text.encode())
        write_json({"schema_version": SCHEMA_VERSION, "path": str(path), "nbytes": nbytes})
    else:
        click.echo(printable(f"{path}: {plan!r}"))
    if show and not webbrowser.open(path.absolute().as_uri()):
        raise LLMException(f"no browser can be started here; {path} is there to be opened")
    return ExitCode.OK


def _name_for(plan: str) -> str:
    return "plan.html" if plan == STDIN else f"{Path(plan).stem}.html"


def _html(plan: AnyPlan, other: AnyPlan | None) -> str:
    if other is None:
        return plan.to_html()
    if isinstance(plan, Plan) and isinstance(other, Plan):
        return plan.to_html(diff=other)
    if isinstance(plan, GroupPlan) and isinstance(other, GroupPlan):
        return plan.to_html(diff=other)
    raise click.UsageError("--diff: one is a plan of one cache, and the other one of groups")
