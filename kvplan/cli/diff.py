"""`kvplan diff`: how two plans differ, as text and as an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvplan.cli.common import ExitCode, json_option, write_json
from kvplan.cli.paint import write_lines
from kvplan.cli.plans import picture_option, plan_argument
from kvplan.inspection.diff import is_equivalent
from kvplan.inspection.page import to_html
from kvplan.planning.groups import GroupPlan
from kvplan.planning.plan import Plan

if TYPE_CHECKING:
    from kvplan.planning.groups import AnyPlan

SCHEMA_VERSION: Final = 1


@click.command("diff", epilog="Example: kvplan diff expected.json found.json || echo differs")
@plan_argument("old", "A.json")
@plan_argument("new", "B.json")
@picture_option("html", "Write it as a page, too: this text above pictures of both plans.")
@json_option
def command(old: AnyPlan, new: AnyPlan, *, html: Path | None, as_json: bool) -> ExitCode:
    """Print how plan B differs from plan A, ending in a verdict.

    Exits with 0 if they are identical or equivalent (the same bytes go to the same places), with
    1 if not, with 2 if one of them is no plan. Names of caches are not compared. One of the two
    may be - for stdin.
    """
    text = _text(old, new)
    if html is not None:
        to_html(old, html, other=new, difference=text)
    same = _is_same(old, new)
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


def _text(old: AnyPlan, new: AnyPlan) -> str:
    if isinstance(old, Plan) and isinstance(new, Plan):
        return old.diff(new)
    if isinstance(old, GroupPlan) and isinstance(new, GroupPlan):
        return old.diff(new)
    return f"- {old!r}\n+ {new!r}\nverdict: different - a plan of one cache, and one of groups"


def _is_same(old: AnyPlan, new: AnyPlan) -> bool:
    """Whether both write the same bytes to the same places."""
    if isinstance(old, Plan) and isinstance(new, Plan):
        return is_equivalent(old, new)
    if isinstance(old, GroupPlan) and isinstance(new, GroupPlan):
        # In another order, groups are other memory: it is given by position.
        return [*old.groups] == [*new.groups] and all(
            _is_same(plan, new.groups[name]) for name, plan in old.groups.items()
        )
    return False
