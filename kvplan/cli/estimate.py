"""`kvplan estimate`: how long a plan is expected to take, over each transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from kvplan.cli.common import ExitCode, console, json_option, table, write_json, write_table
from kvplan.cli.costs import as_json as estimate_json
from kvplan.cli.costs import builtin_option, costs_here
from kvplan.cli.plans import plan_argument, transport_option
from kvplan.inspection.cost import TRANSPORT_COSTS, ms_text
from kvplan.inspection.units import nbytes_text, plural

if TYPE_CHECKING:
    from kvplan.cli.costs import Costs
    from kvplan.inspection.cost import Estimate
    from kvplan.planning.groups import AnyPlan

SCHEMA_VERSION: Final = 1


@click.command("estimate", epilog="Example: kvplan estimate plan.json -t local -t tcp")
@plan_argument("plan")
@transport_option(
    "transports",
    "Over this one; can be given several times. Default: all whose costs are known.",
    multiple=True,
)
@builtin_option
@json_option
def command(
    plan: AnyPlan, transports: tuple[str, ...], *, builtin: bool, as_json: bool
) -> ExitCode:
    """Print how long a plan is expected to take over each transport, and what that is spent on.

    The costs are those that `kvplan tune` measured on this machine, where it has, else kvplan's
    own, of a machine with 2 cores. PLAN.json may be - for stdin. Exits with 2 if it is no plan,
    or nothing is known of a transport that was asked for.
    """
    costs = costs_here(builtin=builtin)
    chosen = transports or tuple(it for it in TRANSPORT_COSTS if costs.of(it).lines)
    found = [plan.estimate(costs.of(it)) for it in dict.fromkeys(chosen)]
    if as_json:
        rows = [estimate_json(it, costs) for it in found]
        write_json(
            {
                "schema_version": SCHEMA_VERSION,
                "operation": plan.operation,
                "num_descriptors": plan.num_descriptors,
                "nbytes": plan.nbytes,
                "estimates": rows,
            }
        )
    else:
        _write(plan, found, costs)
    return ExitCode.OK


def _write(plan: AnyPlan, found: list[Estimate], costs: Costs) -> None:
    out = console()
    out.print(
        f"{plan.operation}: {plural(plan.num_descriptors, 'descriptor')}, "
        f"{nbytes_text(plan.nbytes)}",
        style="bold",
    )
    fastest = min(it.ms for it in found)
    rows = table("transport", "way", ">ms", ">GB/s", ">fixed", ">calls", ">descriptors", ">bytes")
    for it in found:
        parts = (it.fixed_ms, it.calls_ms, it.descriptors_ms, it.bytes_ms)
        rows.add_row(
            it.transport,
            it.way,
            _ms(it.ms),
            f"{it.gigabytes_per_s:.2f}",
            *(_ms(part) if part else "" for part in parts),
            style="bold green" if it.ms == fastest else None,
        )
    write_table(out, rows)
    by_source: dict[str, list[str]] = {}
    for it in found:
        by_source.setdefault(costs.source(it.transport), []).append(it.transport)
    for source, names in by_source.items():
        out.print(f"{', '.join(names)}: {source}", style="dim")


def _ms(ms: float) -> str:
    return ms_text(ms).removesuffix(" ms")
