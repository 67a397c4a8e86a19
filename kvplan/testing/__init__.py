"""For tests of programs that plan transfers; with pytest its plugin has all of it as fixtures.

Planning only: nothing here needs memory of an engine, a peer, or anything that was compiled.
"""

from kvplan.testing.caches import BlockTables, Executed, make_desc, run_reference
from kvplan.testing.plans import Budget, GoldenPlans, difference, observe_plans, write_plan

__all__ = [
    "BlockTables",
    "Budget",
    "Executed",
    "GoldenPlans",
    "difference",
    "make_desc",
    "observe_plans",
    "run_reference",
    "write_plan",
]
