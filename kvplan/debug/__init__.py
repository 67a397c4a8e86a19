"""Debugging wrong answers: which bytes of a cache are wrong, and where they came from.

`locate` compares a cache with its expected content. For the first wrong bytes, by layer and then
in the order of the request, it names layer, heads, tokens and block. It also names the descriptor
that writes them, its source, and where their content belongs. `replay` makes the expected content
with the reference executor. Engines and transports do not belong here.
"""

from __future__ import annotations

from kvplan.debug.difference import Difference, Located, Wrong
from kvplan.debug.locate import locate, replay

__all__ = ["Difference", "Located", "Wrong", "locate", "replay"]
