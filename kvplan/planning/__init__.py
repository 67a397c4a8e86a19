"""From descriptions of caches to a `Plan`: pure Python and NumPy, no addresses, no transfer."""

from kvplan.planning.files import load_plan
from kvplan.planning.gather import plan_gather
from kvplan.planning.groups import GroupPlan, plan_groups
from kvplan.planning.plan import LayerPair, Origin, Plan
from kvplan.planning.planner import (
    plan_copy_blocks,
    plan_copy_cache,
    plan_pull_blocks,
    plan_pull_cache,
    plan_push_blocks,
    plan_push_cache,
    plan_swap_blocks,
)
from kvplan.planning.segments import Coalesce, Repeat, Segments
from kvplan.planning.side import Side

__all__ = [
    "Coalesce",
    "GroupPlan",
    "LayerPair",
    "Origin",
    "Plan",
    "Repeat",
    "Segments",
    "Side",
    "load_plan",
    "plan_copy_blocks",
    "plan_copy_cache",
    "plan_gather",
    "plan_groups",
    "plan_pull_blocks",
    "plan_pull_cache",
    "plan_push_blocks",
    "plan_push_cache",
    "plan_swap_blocks",
]
