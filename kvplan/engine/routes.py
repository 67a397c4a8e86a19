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
from typing import TYPE_CHECKING, Final, Literal, NamedTuple
from weakref import ref

from kvplan.engine.telemetry import logger
from kvplan.execution.memory import HostMemory
from kvplan.execution.rows import are_plain
from kvplan.links.values import LinkState
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.plan import OBSERVERS
from kvplan.status import LLMException, LLMStatusCode
from kvplan.types import BlocksCacheKey, Cache, CacheIndex

if TYPE_CHECKING:
    from kvnative._process import Peer
    from kvnative._rows import Rows
    from kvnative._writers import WriteGuard
    from kvplan.engine.entry import CacheEntry
    from kvplan.engine.registry import CacheRegistry
    from kvplan.engine.telemetry import Metrics
    from kvplan.execution import Transfers
    from kvplan.lease import BlockLease
    from kvplan.links import Links, PeerLink
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.plan import Kind
    from kvplan.transport.protocol import PeerMemory
    from kvplan.types import AnyCacheKey, KvCacheExtParam

Verb = Literal["pull_cache", "pull_blocks", "push_cache", "push_blocks"]
_Key = tuple[Verb, int | tuple[int], int, "KvCacheExtParam | None"]

_LINKED: Final = LinkState.LINKED  # of an enumeration they take longer to look up
_SUCCESS: Final = LLMStatusCode.LLM_SUCCESS

_MOST: Final = 1024
"""Routes that are remembered of a link."""


class Route(NamedTuple):
    """Between a cache of a peer and one of this process, which it does not keep.

    Its link has it until the peer publishes other caches, or until the link ends.
    """

    theirs: PeerMemory
    entry: ref[CacheEntry]
    rows: Rows
    peer: Peer
    words: bytes
    guard: WriteGuard | None  # of what is written to the peer


class Routes:
    """Moves by the routes of all links of an engine; any thread may."""

    def __init__(
        self, registry: CacheRegistry, links: Links, transfers: Transfers, metrics: Metrics
    ) -> None:
        self._living = registry.living
        self._links = links
        self._transfers = transfers
        self._metrics = metrics

    def move(
        self,
        verb: Verb,
        there: AnyCacheKey | BlockLease,
        here: Cache,
        src_rows: Blocks,
        dst_rows: Blocks,
        ext_param: KvCacheExtParam,
    ) -> bool:
        """Move rows `src_rows[i]` to `dst_rows[i]`, and count that; False: nothing was moved.

        Args:
            there, here: the caches; a slot that `there` names is one of the rows.
            ext_param: the layers.
        """
        started = perf_counter()
        if OBSERVERS or type(here) is not Cache or logger.logger.isEnabledFor(logging.INFO):
            return False
        if ext_param is not ALL_LAYERS and not are_plain(ext_param):
            return False
        named: int | tuple[int]
        if type(there) is CacheIndex and (there.batch_index == 0 or verb not in _PAGED):
            named = there.cache_id
        elif type(there) is BlocksCacheKey:
            named = (there.model_id,)
        else:
            return False
        link = self._links.peers.get(there.cluster_id)
        entry = self._living.get(here.cache_id)
        if link is None or entry is None:
            return False
        if entry.cache is not here and entry.cache != here:
            return False
        routes = link.routes  # before anything is looked up: it may be another meanwhile
        if link.state is not _LINKED:
            return False
        layers = None if ext_param is ALL_LAYERS else ext_param
        key: _Key = verb, named, here.cache_id, layers
        route: Route | None = routes.get(key)
        if route is None or route.entry() is not entry:
            route = self._find(verb, link, there, entry, ext_param)
            if route is None:
                return False
            if len(routes) >= _MOST:
                routes.clear()
            routes[key] = route
        try:
            nbytes = route.rows.move_now(
                route.peer,
                route.words,
                route.guard,
                self._living,
                here.cache_id,
                entry,
                src_rows,
                dst_rows,
                self._transfers.small_nbytes,
            )
        except ValueError:  # the link is closed
            return False
        if nbytes == 0:
            return False
        pulls = verb in _PULLS
        self._metrics.record(verb, _SUCCESS, nbytes, perf_counter() - started)
        link.count(nbytes if pulls else 0, 0 if pulls else nbytes)
        return True

    def _find(
        self,
        verb: Verb,
        link: PeerLink,
        there: CacheIndex | BlocksCacheKey,
        entry: CacheEntry,
        ext_param: KvCacheExtParam,
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
            self._transfers.rows.known(verb, kind, remote, local, theirs, ours, ext_param)
            if pulls
            else self._transfers.rows.known(verb, kind, local, remote, ours, theirs, ext_param)
        )
        if rows is None:
            return None
        guard = None if pulls else theirs.write_guard
        return Route(theirs, ref(entry), rows, *theirs.guard, guard)


_PULLS: Final = frozenset({"pull_cache", "pull_blocks"})
_PAGED: Final = frozenset({"pull_blocks", "push_blocks"})
