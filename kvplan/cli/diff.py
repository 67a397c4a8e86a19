"""`kvplan diff`: how two plans differ, as text and as an exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from kvplan.cli.common import (
    ExitCode,
    json_option,
    picture_option,
    plan_argument,
    write_json,
    write_text,
)
from kvplan.cli.paint import write_lines
from kvplan.inspection.diff import is_equivalent

if TYPE_CHECKING:
    from kvplan.planning.plan import Plan

SCHEMA_VERSION: Final = 1


@click.command("diff", epilog="Example: kvplan diff expected.json found.json || echo differs")
@plan_argument("old", "A.json")
@plan_argument("new", "B.json")
@picture_option("html")
@json_option
def command(old: Plan, new: Plan, html: str | None, *, as_json: bool) -> ExitCode:
    """Print how plan B differs from plan A, ending in a verdict.

    Exits with 0 if they are identical or equivalent (the same bytes go to the same places), with
    1 if not, with 2 if one of them is no plan. Names of caches are not compared. One of the two
    may be - for stdin.
    """
    same = is_equivalent(old, new)
    if html is not None:
        if as_json:
            raise click.UsageError("--html and --json cannot be combined")
        write_text(old.to_html(diff=new), html)
        return ExitCode.OK if same else ExitCode.DIFFERENT
    text = old.diff(new)
    if as_json:
        last = " ".join(text[text.rindex("verdict: ") :].split()).removeprefix("verdict: ")
        write_json(
            {
                "schema_version": SCHEMA_VERSION,
                "same": same,
                "identical": old == new,
                "verdict": last,
                "text": text,
            }
        )
    else:
        write_lines(text.splitlines())
    return ExitCode.OK if same else ExitCode.DIFFERENT
