"""`kvplan explain`: a plan as text."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from kvplan.cli.common import ExitCode, json_option, write_json
from kvplan.cli.costs import builtin_option, costs_here
from kvplan.cli.paint import write_lines
from kvplan.cli.plans import picture_option, plan_argument, transport_option
from kvplan.inspection.units import DEFAULT_LIMIT, Format
from kvplan.planning.groups import GroupPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.planning.groups import AnyPlan
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
@transport_option("transport", "Say how the plan would move over it, and how long that takes.")
@builtin_option
@picture_option("html", "Draw it as a page that loads nothing else, and print no text.")
@picture_option("svg", "Draw it as SVG, and print no text.")
@json_option
def command(
    plan: AnyPlan,
    form: Format,
    limit: int,
    transport: str | None,
    *,
    everything: bool,
    builtin: bool,
    html: Path | None,
    svg: Path | None,
    as_json: bool,
) -> ExitCode:
    """Print what a plan copies, from which blocks to which, and how.

    PLAN.json is a file that plan.save(path) wrote, of one cache or of a group of caches; - is
    stdin. Exits with 0, or with 2 if it is no plan.
    """
    if html is not None:
        plan.to_html(html)
    if svg is not None:
        plan.to_svg(svg)
    rows = None if everything else limit
    cost, over, source = None, None, None
    if transport is not None:
        costs = costs_here(builtin=builtin)
        cost = costs.of(transport)
        over, source = cost.outline(plan), costs.source(transport)
    if as_json:
        table = None if cost is None else cost.copies
        copies = None if table is None else table.document(plan)
        write_json(_document(plan, rows) | {"over": over, "source": source, "copies": copies})
        return ExitCode.OK
    if html is None and svg is None:
        write_lines(plan.explain_lines(form, rows, transport=cost))
    if source is not None:
        write_lines([f"{transport}: {source}"])
    return ExitCode.OK


def _document(plan: AnyPlan, limit: int | None) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "operation": plan.operation,
        "kind": plan.kind,
        "fingerprint": plan.fingerprint,
        "num_tensor_pairs": plan.num_tensor_pairs,
        "num_descriptors": plan.num_descriptors,
        "nbytes": plan.nbytes,
        "groups": [*plan.groups] if isinstance(plan, GroupPlan) else None,
        "descriptors": [*islice(_descriptors(plan), limit)],
    }


def _descriptors(plan: AnyPlan) -> Iterator[dict[str, Any]]:
    """Each, with the layers, tensors and rows it came from; offsets are into these tensors."""
    if isinstance(plan, GroupPlan):
        for part in plan.parts():
            for row in _descriptors(part.plan):
                yield row | {"index": part.descriptor + row["index"], "group": part.name}
        return
    for index in range(plan.num_descriptors):
        yield _descriptor(plan, index)


def _descriptor(plan: Plan, index: int) -> dict[str, Any]:
    pair, run = divmod(index, plan.segments.num_runs)
    (_, src_base), (_, dst_base) = plan.pair(pair)
    src, dst, nbytes = plan.run_at(run)
    return {
        "index": index,
        **plan.origin(index)._asdict(),
        "src_offset": src_base + src,
        "dst_offset": dst_base + dst,
        "nbytes": nbytes,
    }
