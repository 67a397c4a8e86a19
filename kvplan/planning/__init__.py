"""From descriptions of caches to a `Plan`: pure Python and NumPy, no addresses, no transfer."""

from kvplan.planning.part import LayerPair, Origin, Part
from kvplan.planning.plan import Plan
from kvplan.planning.schema import load_plan
from kvplan.planning.segments import Coalesce, Repeat, Segments
from kvplan.planning.side import Side

__all__ = [
    "Coalesce",
    "LayerPair",
    "Origin",
    "Part",
    "Plan",
    "Repeat",
    "Segments",
    "Side",
    "load_plan",
]
