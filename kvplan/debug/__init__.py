"""Why is this answer wrong? Which bytes of a cache are not as they should be, and where from.

`locate` compares a cache with what it should hold, and says of the first bytes that differ, in the
order of the request: which layer, heads, tokens and block they are, which descriptor of the plan
wrote them, from where, and whose bytes they are instead. `replay` needs no cache that is right: it
makes one, by the reference executor, from what the source held.
"""

from __future__ import annotations

from kvplan.debug.difference import Difference, Located, Wrong
from kvplan.debug.locate import locate, replay

__all__ = ["Difference", "Located", "Wrong", "locate", "replay"]
