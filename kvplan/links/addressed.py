"""Where addresses in a peer lie: in which tensors of which cache that it offers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvplan.links.peer_table import PeerCache
from kvplan.status import LLMException, LLMStatusCode, invalid


class Addressed(NamedTuple):
    """A cache that holds all addresses, and the bytes from each to the end of its tensor."""

    cache: PeerCache
    left: list[int]


def find_addressed(caches: Iterable[PeerCache], addresses: Sequence[int]) -> Addressed | None:
    """The cache that holds all addresses; None: none does.

    Of several (one memory may be registered twice) a writable one, with the most room.
    """
    lowest, highest = min(addresses), max(addresses)
    found = [
        Addressed(it, left)
        for it in caches
        if it.first <= lowest and highest <= it.last and all(left := _left(it, addresses))
    ]
    return max(found, key=lambda it: (it.cache.writable, min(it.left)), default=None)


def not_addressed(caches: Sequence[PeerCache], who: str, addresses: Sequence[int]) -> LLMException:
    """Why `find_addressed` has found none: LLM_KV_CACHE_NOT_EXIST, or LLM_PARAM_INVALID.

    Args:
        who: offers the caches.
    """
    homes: list[int] = []
    for position, address in enumerate(addresses):
        home = next((it for it in caches if _left(it, [address])[0]), None)
        if home is None:
            return LLMException(
                f"addresses[{position}]={address:#x} lies in no cache that {who} offers",
                status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            )
        homes.append(home.cache_id)
    other = next((it for it, home in enumerate(homes) if home != homes[0]), 0)
    return invalid(
        f"addresses[0]={addresses[0]:#x} lies in cache {homes[0]} of {who}, and "
        f"addresses[{other}]={addresses[other]:#x} in cache {homes[other]}; one transfer goes to "
        "one cache"
    )


def _left(cache: PeerCache, addresses: Sequence[int]) -> list[int]:
    """Bytes from each address to the end of the tensor that it lies in; 0: in none."""
    starts = sorted(cache.addresses)
    nbytes = cache.desc.tensor_nbytes
    # Tensors are of one size: of two that overlap, the one that begins last reaches furthest.
    behind = ((it, bisect_right(starts, it)) for it in addresses)
    return [max(0, starts[i - 1] + nbytes - it) if i else 0 for it, i in behind]
