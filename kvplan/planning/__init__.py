"""Planning: from descriptions of caches to a `Plan`, in pure Python and NumPy.

No module here uses sockets or `kvnative`, and only plans of ranges have addresses.
"""

from kvplan.planning.part import LayerPair, Part
from kvplan.planning.plan import Plan
from kvplan.planning.schema import load_plan
from kvplan.planning.segments import Coalesce, Repeat, Segments
from kvplan.planning.side import Side
from kvplan.planning.texts import Origin

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
