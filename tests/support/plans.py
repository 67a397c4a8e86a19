"""Plans of several parts, made of plans of one."""

from __future__ import annotations

from collections.abc import Mapping

from kvplan import Plan


def joined(plans: Mapping[str, Plan]) -> Plan:
    """Return one plan that has the only part of each of these, under its name."""
    return Plan([plan.part.labelled(name) for name, plan in plans.items()])
