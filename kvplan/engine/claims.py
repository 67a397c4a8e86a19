"""Keys of caches: the slot that each names, the claims on it, and the tensors pulled so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvplan.status import LLMException, LLMStatusCode, busy, invalid, not_exist
from kvplan.types import NO_ID, BlocksCacheKey, CacheDesc, CacheKey
from kvplan.validation import check_type, shown

AnyKey = CacheKey | BlocksCacheKey

CACHE_KEYS: Final = "cache_keys"
"""The argument with the keys of a contiguous cache; for a paged cache: `BLOCKS_CACHE_KEY`."""

MAX_CLAIMS: Final = 4096
"""Limit of open claims per holder."""

BLOCKS_CACHE_KEY: Final = "blocks_cache_key"


class KeyName(NamedTuple):
    """The identity of a key without its cluster, which is the same for all keys of an engine."""

    kind: str  # "request", "prefix" or "blocks": each has its own ids
    model_id: int
    number: int


def name_of(key: AnyKey) -> KeyName | None:
    """Return the identity of a key; None: a padding key, which only skips a row."""
    if isinstance(key, BlocksCacheKey):
        return KeyName("blocks", key.model_id, 0)
    if key.prefix_id == NO_ID:
        return None if key.req_id == NO_ID else KeyName("request", key.model_id, key.req_id)
    if key.req_id != NO_ID:
        raise invalid(f"{key} names both a request and a prefix; give only one of them")
    return KeyName("prefix", key.model_id, key.prefix_id)


def check_keys(keys: Sequence[AnyKey], paged: bool) -> None:
    """Refuse keys that this kind of cache does not take."""
    expected = BlocksCacheKey if paged else CacheKey
    if not isinstance(keys, Sequence):
        raise TypeError(f"{CACHE_KEYS}={shown(keys)} must be a sequence of {expected.__name__}")
    for row, key in enumerate(keys):
        check_type(BLOCKS_CACHE_KEY if paged else f"{CACHE_KEYS}[{row}]", key, expected)
    if paged and len(keys) > 1:
        raise invalid(f"{BLOCKS_CACHE_KEY}={shown(keys)}: a paged cache has at most one")


def check_fit(keys: Sequence[AnyKey], desc: CacheDesc) -> None:
    """Refuse more keys than the cache has slots."""
    if len(keys) > desc.batch_size:
        raise invalid(
            f"{CACHE_KEYS} has {len(keys)} elements; at most batch_size={desc.batch_size} slots "
            "can be named"
        )


@dataclass(eq=False, slots=True)
class BoundKey:
    """A key and the slot that it names.

    Attributes:
        name: identity of the key, unique in an index.
        cache_id: the cache.
        batch_index: the slot in the cache.
        missing: tensors not yet pulled by the key; the last pull removes the key. None: the key
            stays.
        holder: the holder of its claims; set only if a pull removes the key.
        num_claims: open claims.
    """

    name: KeyName
    cache_id: int
    batch_index: int
    missing: set[int] | None
    holder: Hashable = None
    num_claims: int = 0


class KeyIndex:
    """The keys of an engine and their claims; not thread-safe, callers hold a lock."""

    def __init__(self) -> None:
        self._bound: dict[KeyName, BoundKey] = {}
        self._claims: dict[int, tuple[BoundKey, Hashable]] = {}
        self._held: Counter[Hashable] = Counter()  # open claims, by holder
        self._last_claim_id = 0
        self._uses: dict[int, int] = {}  # number of keys and claims by cache id, without zeros

    def is_used(self, cache_id: int) -> bool:
        """Return whether a key names the cache, or a claim on it is open."""
        return cache_id in self._uses

    def bind(
        self, cache_id: int, keys: Sequence[AnyKey], *, num_tensors: int, consumable: bool
    ) -> None:
        """Bind key i to slot i of the cache; on an error bind none."""
        found: dict[KeyName, BoundKey] = {}
        for row, key in enumerate(keys):
            if (name := name_of(key)) is None:
                continue
            if (other := found.get(name) or self._bound.get(name)) is not None:
                owner = "this cache" if name in found else f"cache {other.cache_id}"
                raise invalid(
                    f"{BLOCKS_CACHE_KEY}={key} already names {owner}"
                    if isinstance(key, BlocksCacheKey)
                    else f"{CACHE_KEYS}[{row}]={key} already names slot {other.batch_index} of "
                    f"{owner}"
                )
            once = consumable and name.kind == "request"
            found[name] = BoundKey(name, cache_id, row, set(range(num_tensors)) if once else None)
        self._bound.update(found)
        self._use(cache_id, len(found))

    def find(self, key: AnyKey) -> BoundKey:
        """Return the slot that `key` names."""
        if (name := name_of(key)) is None:
            raise invalid(f"{key} names neither a request nor a prefix")
        if (bound := self._bound.get(name)) is None:
            raise not_exist(f"no cache has {key}")
        return bound

    def remove(self, bound: BoundKey) -> None:
        """Remove a key, unless it was removed before."""
        # `pop`: a finalizer may remove the key after the lookup.
        if self._bound.get(bound.name) is bound and self._bound.pop(bound.name, None) is bound:
            self._forget_use(bound)

    def unbind(self, cache_id: int) -> None:
        """Remove all keys of a cache. Its claims stay open."""
        for bound in list(self._bound.values()):
            if bound.cache_id == cache_id:
                self.remove(bound)

    def claim(self, key: AnyKey, holder: Hashable) -> tuple[int, BoundKey]:
        """Let `holder` pull by `key`; the cache stays until the claim is released."""
        bound = self.find(key)
        if self._held[holder] >= MAX_CLAIMS:
            raise busy(
                f"{holder} has {MAX_CLAIMS} claims open, the maximum; claim {key} after one of "
                "them has ended"
            )
        if bound.missing is not None:
            if bound.num_claims and bound.holder != holder:
                raise LLMException(
                    f"{key} is being pulled by {bound.holder}; only one holder can pull it",
                    status_code=LLMStatusCode.LLM_REPEAT_REQUEST,
                )
            bound.holder = holder
        bound.num_claims += 1
        self._use(bound.cache_id, 1)
        self._held[holder] += 1
        self._last_claim_id += 1
        self._claims[self._last_claim_id] = bound, holder
        return self._last_claim_id, bound

    def release(self, claim_id: int, tensors: range | None) -> int | None:
        """End a claim, and return the id of its cache; None: the claim is unknown.

        `tensors` were pulled completely; None: the pull failed, moved no tensor whole, or its
        tensors are unknown. A request's key is removed once all tensors were pulled.
        """
        bound, holder = self._claims.pop(claim_id, (None, None))
        if bound is None:
            return None
        self._held[holder] -= 1
        if not self._held[holder]:
            del self._held[holder]
        bound.num_claims -= 1
        if bound.missing is not None and tensors is not None:
            bound.missing = {tensor for tensor in bound.missing if tensor not in tensors}
            if not bound.missing:
                self.remove(bound)
        return self._forget_use(bound)

    def holder_of(self, claim_id: int) -> Hashable:
        """Return the holder of a claim; None: the claim is unknown."""
        return self._claims.get(claim_id, (None, None))[1]

    def claims_of(self, holder: Hashable) -> list[int]:
        """Return the ids of the open claims of `holder`."""
        return [claim_id for claim_id, (_, other) in list(self._claims.items()) if other == holder]

    def _forget_use(self, bound: BoundKey) -> int:
        self._use(bound.cache_id, -1)
        return bound.cache_id

    def _use(self, cache_id: int, delta: int) -> None:
        count = self._uses.get(cache_id, 0) + delta
        if count:
            self._uses[cache_id] = count
        else:
            self._uses.pop(cache_id, None)
