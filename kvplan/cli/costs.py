"""Which costs the commands estimate with: those that `kvplan tune` measured here, or kvplan's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from kvplan.inspection.copy_ways import stored_tables
from kvplan.inspection.cost import TRANSPORT_COSTS, TransportCost, cuda_cost
from kvplan.inspection.measured_costs import MeasuredCosts, load_costs

if TYPE_CHECKING:
    from kvplan.inspection.copy_ways import CopyTable
    from kvplan.inspection.cost import Estimate

_F = TypeVar("_F", bound=Callable[..., Any])


def builtin_option(function: _F) -> _F:
    """Give a command `--builtin`."""
    option = click.option(
        "--builtin",
        is_flag=True,
        help="Estimate with kvplan's own costs, and not those of `kvplan tune`.",
    )
    return option(function)


class Costs(NamedTuple):
    """The costs of this machine, and how its GPUs copy.

    Attributes:
        measured: None where there are none, or they are not asked.
        tables: of copies, by kind of GPU, the latest first; None: they are not asked.
    """

    measured: MeasuredCosts | None
    tables: Mapping[str, CopyTable] | None

    def of(self, transport: str) -> TransportCost:
        """The best that is known of a transport; of kinds of GPU the one that was measured last."""
        if transport == "cuda" and self.tables:
            return cuda_cost(next(iter(self.tables.values())))
        if self.is_measured(transport):
            assert self.measured is not None
            return self.measured.costs[transport]
        return TRANSPORT_COSTS[transport]

    def is_measured(self, transport: str) -> bool:
        """Whether it was measured here."""
        return self.measured is not None and transport in self.measured.costs

    def source(self, transport: str) -> str:
        """Where its costs come from, for people."""
        cost = self.of(transport)
        if cost.copies is not None and self.tables:
            others = [kind for kind in self.tables if kind != cost.copies.device]
            more = f"; not of {', '.join(others)}" if others else ""
            return f"{cost.source}; of {cost.copies.device}{more}"
        if self.is_measured(transport) or not cost.lines:
            return cost.source
        return f"kvplan's own, {cost.source}"


def costs_here(*, builtin: bool) -> Costs:
    """Those of `kvplan tune`, unless kvplan's own are asked for.

    Raises:
        OSError, LLMException: what is stored cannot be read.
    """
    return Costs(None, None) if builtin else Costs(load_costs(), stored_tables())


def as_json(estimate: Estimate, costs: Costs) -> dict[str, object]:
    """An estimate with its parts, and where they come from."""
    return {
        "transport": estimate.transport,
        "way": estimate.way,
        "calls": estimate.calls,
        "call": estimate.call,
        "fixed_ms": estimate.fixed_ms,
        "calls_ms": estimate.calls_ms,
        "descriptors_ms": estimate.descriptors_ms,
        "bytes_ms": estimate.bytes_ms,
        "ms": estimate.ms,
        "gigabytes_per_s": estimate.gigabytes_per_s,
        "measured_here": costs.is_measured(estimate.transport),
        "source": costs.source(estimate.transport),
    }
