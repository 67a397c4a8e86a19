"""From descriptions of caches to a `Plan`: pure Python and NumPy, no addresses, no transfer."""

from kvplan.planning.files import load_plan
from kvplan.planning.groups import GroupPlan
from kvplan.planning.plan import LayerPair, Origin, Plan
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
]
