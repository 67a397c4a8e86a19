"""From descriptions of caches to a `Plan`: pure Python and NumPy, no addresses, no transfer."""

from kvplan.planning.side import Side
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
from kvplan.planning.segments import Coalesce, Segments

__all__ = [
    "Coalesce",
    "LayerPair",
    "Origin",
    "Plan",
    "Segments",
    "Side",
    "plan_copy_blocks",
    "plan_copy_cache",
    "plan_pull_blocks",
    "plan_pull_cache",
    "plan_push_blocks",
    "plan_push_cache",
    "plan_swap_blocks",
]
