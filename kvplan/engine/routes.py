"""Small transfers of whole rows by a known route: no plan, no operation, one native call.

What an `Operation` does for a few us of copying takes longer than that. A route remembers what does
not change from one transfer to the next: the link, both caches, and the addresses of their rows. It
moves at most 64 KiB, between memory of this process and memory of a peer that is mapped here, in
the calling thread and with the GIL: so no other thread finds it in flight, and whatever ends a link
or a cache comes before it or after it. Whatever is not as usual has no route, and is left to an
operation, which says what is wrong.
"""

from __future__ import annotations

import logging
from threading import RLock
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
_Key = tuple[Verb, int, int | tuple[int], int, "KvCacheExtParam | None"]

_MOST: Final = 1024
"""Routes that are remembered."""


class Route(NamedTuple):
    """Between a cache of a peer and one of this process; it keeps neither alive."""

    link: PeerLink
    epoch: object  # of what is known of the peer's caches
    theirs: ref[PeerMemory]
    entry: ref[CacheEntry]
    rows: Rows
    peer: Peer
    words: bytes


class Routes:
    """The routes of one engine; any thread may move by them."""

    def __init__(
        self, registry: CacheRegistry, links: Links, transfers: Transfers, metrics: Metrics
    ) -> None:
        self._registry = registry
        self._links = links
        self._transfers = transfers
        self._metrics = metrics
        self._mutex = RLock()
        self._known: dict[_Key, Route] = {}

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
        layers = None if ext_param is ALL_LAYERS else ext_param
        key = verb, there.cluster_id, named, here.cache_id, layers
        known = self._known.get(key)
        entry = self._registry.offered_entry(here.cache_id)
        if entry is None:
            return False
        if (
            known is None
            or known.link.epoch is not known.epoch
            or known.link.state is not LinkState.LINKED
            or known.entry() is not entry
            or (theirs := known.theirs()) is None
        ):
            found = self._find(verb, there, entry, ext_param)
            if found is None:
                self._known.pop(key, None)
                return False
            known, theirs = found
            with self._mutex:
                if len(self._known) >= _MOST:
                    self._known = {}
                self._known[key] = known
        pulls = verb in _PULLS
        try:
            nbytes = known.rows.move_now(
                known.peer,
                known.words,
                None if pulls else theirs.write_guard,
                src_rows,
                dst_rows,
                self._transfers.small_nbytes,
            )
        except ValueError:  # the link is closed
            return False
        if nbytes == 0:
            return False
        self._metrics.record(verb, LLMStatusCode.LLM_SUCCESS, nbytes, perf_counter() - started)
        known.link.count(nbytes if pulls else 0, 0 if pulls else nbytes)
        return True

    def _find(
        self,
        verb: Verb,
        there: CacheIndex | BlocksCacheKey,
        entry: CacheEntry,
        ext_param: KvCacheExtParam,
    ) -> tuple[Route, PeerMemory] | None:
        """The route, and the memory of the peer; None: there is none, for whatever reason."""
        link = self._links.peers.get(there.cluster_id)
        if link is None or link.state is not LinkState.LINKED:
            return None
        pulls = verb in _PULLS
        epoch = link.epoch  # before anything is looked up: it may change meanwhile
        try:
            found = link.cache(there, writable=not pulls, speculative=True)
            theirs = link.memory(found, writable=not pulls)
        except LLMException:
            return None
        remote, local, ours = link.side(found), entry.side, entry.memory
        paged = verb in _PAGED
        if local is None or remote.paged is not paged or local.paged is not paged:
            return None
        guard = theirs.guard
        if guard is None or type(ours) is not HostMemory or not ours.held:
            return None
        kind: Kind = "B2B" if paged else "C2C"
        rows = (
            self._transfers.rows.known(verb, kind, remote, local, theirs, ours, ext_param)
            if pulls
            else self._transfers.rows.known(verb, kind, local, remote, ours, theirs, ext_param)
        )
        if rows is None:
            return None
        return Route(link, epoch, ref(theirs), ref(entry), rows, *guard), theirs


_PULLS: Final = frozenset({"pull_cache", "pull_blocks"})
_PAGED: Final = frozenset({"pull_blocks", "push_blocks"})
