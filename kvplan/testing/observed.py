"""Plans that are made while a test runs, and what they may cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplan.inspection.units import plural
from kvplan.planning.plan import OBSERVERS
from kvplan.status import invalid
from kvplan.validation import check_type

if TYPE_CHECKING:
    from kvplan.planning.plan import Plan


@contextmanager
def observe_plans() -> Iterator[list[Plan]]:
    """Collect every plan that is made in this process inside the `with` block, in order.

    Those of `kvplan.plan`, and those that engines make for their operations, in all threads. A plan
    that was read from a document, or is a part of another, was not made.
    """
    plans: list[Plan] = []
    OBSERVERS.append(plans.append)
    try:
        yield plans
    finally:
        # The very method: those of two empty lists are equal.
        at = next(i for i, it in enumerate(OBSERVERS) if getattr(it, "__self__", None) is plans)
        del OBSERVERS[at]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a plan may come to.

    Attributes:
        max_descriptors: descriptors of each plan; None: any number.
        max_nbytes: bytes that each plan moves; None: any number.
    """

    max_descriptors: int | None = None
    max_nbytes: int | None = None

    def __post_init__(self) -> None:
        limits = {"max_descriptors": self.max_descriptors, "max_nbytes": self.max_nbytes}
        if all(it is None for it in limits.values()):
            raise invalid("a budget has max_descriptors, max_nbytes, or both")
        for name, value in limits.items():
            if value is not None and check_type(name, value, int) < 0:
                raise invalid(f"{name}={value} must be None or >= 0")

    def failure(self, plans: list[Plan]) -> str:
        """What is to be said of plans of which some exceed it, or of none; empty: they keep it."""
        if not plans:
            return "no plan was made, so nothing was checked against the budget"
        excess = [(it, said) for it in plans if (said := self._excess(it))]
        if not excess:
            return ""
        worst, said = max(excess, key=lambda it: (it[0].num_descriptors, it[0].nbytes))
        lines = [f"{len(excess)} of {plural(len(plans), 'plan')} over budget: {said}"]
        lines += [f"also {it!r}" for it, _ in excess[:8] if it is not worst]
        return "\n".join([*lines, worst.explain()])

    def _excess(self, plan: Plan) -> str:
        said = [
            f"{found:,} {word}, max_{name}={limit:,}"
            for found, limit, word, name in (
                (plan.num_descriptors, self.max_descriptors, "descriptors", "descriptors"),
                (plan.nbytes, self.max_nbytes, "bytes", "nbytes"),
            )
            if limit is not None and found > limit
        ]
        return "; ".join(said)
