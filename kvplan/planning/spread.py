"""Which tokens of a request a cache holds, where its shard names some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvplan.layout import Interleaved

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan.layout import Shard

    Tokens = NDArray[np.int64]

_NEVER: Final = 2**62
"""The period of tokens that do not repeat: no request is as long."""


class Spread(NamedTuple):
    """The tokens that a cache holds: from `first` on, the first `size` of every `period`."""

    first: int
    size: int
    period: int

    def owns(self, tokens: Tokens) -> NDArray[np.bool_]:
        """Return whether each of these tokens is held."""
        beyond = tokens - self.first
        own: NDArray[np.bool_] = (beyond >= 0) & (beyond % self.period < self.size)
        return own

    def count(self, end: int) -> int:
        """Return how many of the tokens before `end` are held."""
        periods, rest = divmod(max(end - self.first, 0), self.period)
        return periods * self.size + min(rest, self.size)

    def token(self, place: int) -> int:
        """Return the token at a place; far beyond any request, where there is none."""
        chunk, inside = divmod(place, self.size)
        return self.first + chunk * self.period + inside

    def tokens(self, places: Tokens) -> Tokens:
        """Return the tokens at these places, each of which has one."""
        if self is ALL_TOKENS:
            return places
        chunk, inside = np.divmod(places, self.size)
        found: Tokens = self.first + chunk * self.period + inside
        return found

    def places(self, tokens: Tokens) -> Tokens:
        """Return the places of these tokens, each of which is held."""
        if self is ALL_TOKENS:
            return tokens
        chunk, inside = np.divmod(tokens - self.first, self.period)
        found: Tokens = chunk * self.size + inside
        return found


ALL_TOKENS: Final = Spread(0, 1, 1)


def spread_of(shard: Shard | None) -> Spread:
    """Return which tokens of a request a cache of this shard holds; None: all."""
    tokens = None if shard is None else shard.tokens
    if tokens is None:
        return ALL_TOKENS
    if isinstance(tokens, Interleaved):
        return Spread(tokens.rank * tokens.size, tokens.size, tokens.ranks * tokens.size)
    return Spread(tokens.start, len(tokens), _NEVER)
