"""Helpers for tests of programs that plan transfers; the pytest plugin offers them as fixtures.

The helpers execute plans on arrays: they need no engine, peer or compiled code of kvplan.
"""

from kvplan.testing.caches import BlockTables, Executed, make_desc, request_tokens, run_reference
from kvplan.testing.plans import Budget, GoldenPlans, difference, observe_plans, write_plan

__all__ = [
    "BlockTables",
    "Budget",
    "Executed",
    "GoldenPlans",
    "difference",
    "make_desc",
    "observe_plans",
    "request_tokens",
    "run_reference",
    "write_plan",
]
