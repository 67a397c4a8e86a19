"""`kvplan explain`: a plan as text."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final, get_args

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
from kvplan.inspection.units import DEFAULT_LIMIT, Format

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.planning.part import Part
    from kvplan.planning.plan import Plan

SCHEMA_VERSION: Final = 1


@click.command("explain", epilog="Example: kvplan explain plan.json --format table --limit 8")
@plan_argument("plan")
@click.option(
    "-f",
    "--format",
    "form",
    type=click.Choice(get_args(Format)),
    default="tree",
    show_default=True,
    help="As layers and their blocks, or one row for each descriptor.",
)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    default=DEFAULT_LIMIT,
    show_default=True,
    metavar="N",
    help="Rows of each list before the rest is only counted.",
)
@click.option("--all", "everything", is_flag=True, help="All rows, however many there are.")
@picture_option("html")
@picture_option("svg")
@json_option
def command(
    plan: Plan,
    form: Format,
    limit: int,
    html: str | None,
    svg: str | None,
    *,
    everything: bool,
    as_json: bool,
) -> ExitCode:
    """Print what a plan copies, from which blocks to which, and how.

    PLAN.json is a file that plan.save(path) wrote, of one cache or of a group of caches; - is
    stdin. The HTML of --html is one file that loads nothing else. Exits with 0, or with 2 if it is
    not a plan.
    """
    if [html is not None, svg is not None, as_json].count(True) > 1:
        raise click.UsageError("only one of --html, --svg and --json can be given")
    rows = None if everything else limit
    if html is not None:
        write_text(plan.to_html(), html)
    elif svg is not None:
        write_text(plan.to_svg(), svg)
    elif as_json:
        write_json(_document(plan, rows))
    else:
        write_lines(plan.explain_lines(form, rows))
    return ExitCode.OK


def _document(plan: Plan, limit: int | None) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "operation": plan.operation,
        "kind": plan.kind,
        "fingerprint": plan.fingerprint,
        "num_tensor_pairs": plan.num_tensor_pairs,
        "num_descriptors": plan.num_descriptors,
        "nbytes": plan.nbytes,
        "parts": [part.label for part in plan.parts],
        "descriptors": [*islice(_descriptors(plan), limit)],
    }


def _descriptors(plan: Plan) -> Iterator[dict[str, Any]]:
    """Each, with the layers, tensors and rows it came from; offsets are into these tensors."""
    for part, first, *_ in plan.placed():
        for index in range(part.num_descriptors):
            yield _descriptor(part, index) | {"index": first + index}


def _descriptor(part: Part, index: int) -> dict[str, Any]:
    pair, run = divmod(index, part.segments.num_runs)
    (_, src_base), (_, dst_base) = part.pair(pair)
    src, dst, nbytes = part.run_at(run)
    return {
        "index": index,
        **part.origin(index)._asdict(),
        "src_offset": src_base + src,
        "dst_offset": dst_base + dst,
        "nbytes": nbytes,
    }
