"""Small transfers of whole rows by a known route: no plan, no operation, one native call.

What an `Operation` does for a few us of copying takes longer than that. A route is what does not
change from one transfer to the next: both caches, and the addresses of their rows. By it at most
64 KiB move, between memory of this process and memory of a peer that is mapped here, in the calling
thread and with the GIL: so no other thread finds it in flight, and whatever ends a link or a cache
comes before it or after it. Whatever is not as usual has no route, and is left to an operation,
which says what is wrong.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast
from weakref import ref

from kvplan.engine.telemetry import logger
from kvplan.execution.memory import HostMemory
from kvplan.execution.rows import are_plain
from kvplan.lease import BlockLease
from kvplan.links.values import LinkState
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.plan import OBSERVERS
from kvplan.planning.segments import DEFAULT_COALESCE
from kvplan.planning.transfer import Rows, Transfer
from kvplan.status import LLMException, LLMStatusCode
from kvplan.types import BlocksCacheKey, Cache, CacheIndex

if TYPE_CHECKING:
    from kvnative._process import Peer
    from kvnative._rows import RowLowering
    from kvnative._writers import WriteGuard
    from kvplan.engine.entry import CacheEntry
    from kvplan.engine.registry import CacheRegistry
    from kvplan.engine.telemetry import Metrics
    from kvplan.execution import Transfers
    from kvplan.links import Links, PeerLink
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.part import Kind
    from kvplan.transport.protocol import PeerMemory
    from kvplan.types import KvCacheExtParam

Verb = Literal["pull_cache", "pull_blocks", "push_cache", "push_blocks"]
_Key = tuple[Verb, int | tuple[int], int, "KvCacheExtParam | None", bool]

_LINKED: Final = LinkState.LINKED  # of an enumeration they take longer to look up
_SUCCESS: Final = LLMStatusCode.LLM_SUCCESS

_TRANSPORT: Final = "local"  # the only one with memory of a peer that is mapped here
_MOST: Final = 1024
"""Routes that are remembered of a link."""


class Route(NamedTuple):
    """Between a cache of a peer and one of this process, which it does not keep.

    Its link has it until the peer publishes other caches, or until the link ends.
    """

    theirs: PeerMemory
    entry: ref[CacheEntry]
    rows: RowLowering
    peer: Peer
    words: bytes
    guard: WriteGuard | None  # of what is written to the peer


class UndeliveredError(Exception):
    """Every byte was moved, and the peer could not be notified.

    Args:
        operation: that has moved them.
        link: to the peer.
        error: why not.
    """

    def __init__(self, operation: Verb, link: PeerLink, error: LLMException) -> None:
        super().__init__(operation, link, error)
        self.operation: Verb = operation
        self.link = link
        self.error = error


class Routes:
    """Moves by the routes of all links of an engine; any thread may."""

    def __init__(
        self, registry: CacheRegistry, links: Links, transfers: Transfers, metrics: Metrics
    ) -> None:
        self._living = registry.living
        self._links = links
        self._transfers = transfers
        self._metrics = metrics

    def move(self, transfer: Transfer, notify: bytes | None = None) -> bool:
        """Move what is small and usual, notify the peer, and count that; False: nothing was moved.

        Raises:
            UndeliveredError: every byte was moved, and the peer could not be notified.
        """
        started = perf_counter()
        src, dst = transfer.src, transfer.dst
        if (
            OBSERVERS
            or type(src) is not Rows
            or type(dst) is not Rows
            or transfer.nbytes is not None
            or transfer.reinterpret is not False
            or transfer.coalesce is not DEFAULT_COALESCE
            or transfer.rank is not None
            or logger.logger.isEnabledFor(logging.INFO)
        ):
            return False
        for rows in (src, dst):
            if type(rows.first_token) is not int or type(rows.offset) is not int or rows.offset:
                return False
        layers = transfer.layers
        if layers is not ALL_LAYERS and not are_plain(layers):
            return False
        pulls = type(dst.cache) is Cache
        here, there = (dst, src) if pulls else (src, dst)
        cache, key = here.cache, there.cache
        if type(cache) is not Cache:
            return False
        named: int | tuple[int]
        slot, lease = 0, None
        src_blocks, dst_blocks, num_tokens = src.blocks, dst.blocks, transfer.num_tokens
        if type(key) is BlockLease:
            if not key.paged:
                return False
            named, lease = key.cache_id, key
            try:
                if pulls and dst_blocks is not None:
                    src_blocks, num_tokens = key.request(
                        "src_blocks", src_blocks, num_tokens, src.first_token
                    )
                elif not pulls and src_blocks is not None:
                    dst_blocks, num_tokens = key.request(
                        "dst_blocks", dst_blocks, num_tokens, dst.first_token
                    )
            except (LLMException, TypeError):
                return False
        elif type(key) is CacheIndex:
            named, slot = key.cache_id, key.batch_index
        elif type(key) is BlocksCacheKey:
            named = (key.model_id,)
        else:
            return False
        paged = src_blocks is not None
        if paged is (dst_blocks is None) or (slot if paged else type(key) is not CacheIndex):
            return False
        by_tokens = num_tokens is not None or src.first_token > 0 or dst.first_token > 0
        if by_tokens and not paged:
            return False
        if num_tokens is not None and not (type(num_tokens) is int and num_tokens > 0):
            return False
        link = self._links.peers.get(key.cluster_id)
        entry = self._living.get(cache.cache_id)
        if link is None or entry is None:
            return False
        if entry.cache is not cache and entry.cache != cache:
            return False
        if paged:
            if here.slot is not None or there.slot is not None:
                return False
            src_rows, dst_rows = cast("Blocks", src_blocks), cast("Blocks", dst_blocks)
        else:
            if there.slot not in (None, slot):
                return False
            own_slot = 0 if here.slot is None else here.slot
            src_rows, dst_rows = ((slot,), (own_slot,)) if pulls else ((own_slot,), (slot,))
        routes = link.routes  # before anything is looked up: it may be another meanwhile
        if link.state is not _LINKED:
            return False
        verb: Verb = _VERBS[pulls, paged]
        plain_layers = None if layers is ALL_LAYERS else layers
        known: _Key = verb, named, cache.cache_id, plain_layers, by_tokens
        route: Route | None = routes.get(known)
        if route is None or route.entry() is not entry:
            route = self._find(verb, link, key, entry, layers, by_tokens=by_tokens)
            if route is None:
                return False
            if len(routes) >= _MOST:
                routes.clear()
            routes[known] = route
        words = route.words
        if lease is not None:
            word = lease.packed_word(_TRANSPORT)
            if word is None or lease.instance != link.instance:
                return False
            words += word
        try:
            nbytes = route.rows.move_now(
                route.peer,
                words,
                route.guard,
                self._living,
                cache.cache_id,
                entry,
                src_rows,
                dst_rows,
                self._transfers.small_nbytes,
                num_tokens or 0,
                src.first_token,
                dst.first_token,
            )
        except ValueError:  # the link is closed
            return False
        if nbytes == 0:
            return False
        if notify is not None:
            try:
                link.notify(notify)
            except LLMException as error:
                raise UndeliveredError(verb, link, error) from None
        self._metrics.record(verb, _SUCCESS, nbytes, perf_counter() - started)
        link.count(nbytes if pulls else 0, 0 if pulls else nbytes)
        return True

    def _find(
        self,
        verb: Verb,
        link: PeerLink,
        there: CacheIndex | BlocksCacheKey | BlockLease,
        entry: CacheEntry,
        ext_param: KvCacheExtParam,
        *,
        by_tokens: bool,
    ) -> Route | None:
        """The route; None: there is none, for whatever reason."""
        pulls = verb in _PULLS
        try:
            found = link.cache(there, writable=not pulls, speculative=True)
            theirs = link.memory(found, writable=not pulls)
        except LLMException:
            return None
        remote, local, ours = link.side(found), entry.side, entry.memory
        paged = verb in _PAGED
        if local is None or remote.paged is not paged or local.paged is not paged:
            return None
        if theirs.guard is None or type(ours) is not HostMemory or not ours.held:
            return None
        kind: Kind = "B2B" if paged else "C2C"
        rows = (
            self._transfers.rows.known(
                verb, kind, remote, local, theirs, ours, ext_param, by_tokens=by_tokens
            )
            if pulls
            else self._transfers.rows.known(
                verb, kind, local, remote, ours, theirs, ext_param, by_tokens=by_tokens
            )
        )
        if rows is None:
            return None
        guard = None if pulls else theirs.write_guard
        return Route(theirs, ref(entry), rows, *theirs.guard, guard)


_VERBS: Final[dict[tuple[bool, bool], Verb]] = {
    (True, True): "pull_blocks",
    (True, False): "pull_cache",
    (False, True): "push_blocks",
    (False, False): "push_cache",
}
_PULLS: Final = frozenset({"pull_cache", "pull_blocks"})
_PAGED: Final = frozenset({"pull_blocks", "push_blocks"})
