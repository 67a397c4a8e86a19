"""Known pairs of caches: requests that need no lookup, and small ones that move inline.

A pair is what all requests between two caches share: both sides, their memory, and the lowering of
block tables. The link keeps the pairs of its peer's caches by name. A request of a known pair looks
up no cache, whether an operation runs it or `move_now`.

At most 64 KiB move inline, between memory of this process and mapped memory of a peer, in the
calling thread and with the GIL. No other thread sees such a transfer in flight: the end of a link
or of a cache comes before it or after it.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias
from weakref import ref

import msgspec

from kvplan.engine.operation import Operation, conclude
from kvplan.engine.telemetry import logger
from kvplan.execution.memory import HostMemory
from kvplan.execution.rows import are_plain, are_tokens
from kvplan.lease import BlockLease
from kvplan.links.values import LinkState
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.plan import OBSERVERS, Plan
from kvplan.planning.segments import DEFAULT_COALESCE
from kvplan.planning.transfer import Rows, Transfer
from kvplan.status import LLMException, LLMStatusCode
from kvplan.types import BlocksCacheKey, Cache, CacheIndex

if TYPE_CHECKING:
    from kvnative._process import Peer
    from kvnative._writers import WriteGuard
    from kvplan.engine.engine import Engine
    from kvplan.engine.entry import CacheEntry
    from kvplan.execution.rows import RowPair
    from kvplan.links import PeerLink
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.part import Kind
    from kvplan.transport.link import PeerMemory
    from kvplan.types import KvCacheExtParam

_LINKED: Final = LinkState.LINKED  # the lookup in an enumeration takes longer
_SUCCESS: Final = LLMStatusCode.LLM_SUCCESS

_TRANSPORT: Final = "local"  # the only transport that maps memory of peers
_MAX_PAIRS: Final = 1024  # per link


class NamedPair(NamedTuple):
    """A cache of a peer and one of this process; keeps neither memory."""

    entry: ref[CacheEntry]
    theirs: PeerMemory
    rows: RowPair
    peer: Peer
    words: bytes
    guard: WriteGuard | None  # of writes to the peer


_Key: TypeAlias = "tuple[bool, Kind, int | tuple[int], int, KvCacheExtParam | None, bool, bool]"


class Request(msgspec.Struct):
    """A usual transfer with a peer: its link, its own cache, and the rows that move.

    Attributes:
        pulls: whether the peer's cache is the source.
        link: the link to the peer.
        pairs: the pairs of the link, read before anything else was looked up.
        name: the name of the pair in `pairs`.
        pair: the pair, if an earlier request has made it.
        entry: the cache of this process.
        key: the name of the peer's cache.
        lease: the key, if the key is a lease.
        src_rows, dst_rows: block tables; of a slot only its index.
        num_tokens, src_token, dst_token: as of `RowPair.bind`.
    """

    pulls: bool
    link: PeerLink
    pairs: dict[_Key, NamedPair]
    name: _Key
    pair: NamedPair | None
    entry: CacheEntry
    key: CacheIndex | BlocksCacheKey | BlockLease
    lease: BlockLease | None
    src_rows: Blocks
    dst_rows: Blocks
    num_tokens: int | None
    src_token: int
    dst_token: int

    @property
    def kind(self) -> Kind:
        """Whether blocks or slots are read and written."""
        return self.name[1]

    @property
    def by_tokens(self) -> bool:
        """Whether the request counts tokens, or moves whole rows."""
        return self.name[-2]

    def keep(self, pairs: dict[_Key, NamedPair], rows: RowPair, theirs: PeerMemory) -> None:
        """Remember the pair in `pairs`, if the peer's memory is mapped here."""
        ours = self.entry.memory
        if theirs.guard is None or type(ours) is not HostMemory or not ours.held:
            return
        guard = None if self.pulls else theirs.write_guard
        if len(pairs) >= _MAX_PAIRS:
            pairs.clear()
        pairs[self.name] = NamedPair(ref(self.entry), theirs, rows, *theirs.guard, guard)


class Moved(msgspec.Struct):
    """A request that has moved inline, as an `Ended` for recordings."""

    name: str
    tag: str
    started: float
    plan: Plan
    cache_id: int
    link: PeerLink
    leases: tuple[int, ...]


def find_request(engine: Engine, transfer: Transfer, *, by_layer: bool = False) -> Request | None:
    """Look up the names of a transfer; None: the transfer is unusual or wrong."""
    src, dst = transfer.src, transfer.dst
    if (
        OBSERVERS
        or type(src) is not Rows
        or type(dst) is not Rows
        or transfer.nbytes is not None
        or transfer.reinterpret is not False
        or engine.reinterpret
        or transfer.coalesce is not DEFAULT_COALESCE
        or transfer.rank is not None
        or type(src.first_token) is not int
        or type(dst.first_token) is not int
        or type(src.offset) is not int
        or type(dst.offset) is not int
        or src.offset
        or dst.offset
    ):
        return None
    layers = transfer.layers
    if layers is not ALL_LAYERS and not are_plain(layers):
        return None
    pulls = type(dst.cache) is Cache
    here, there = (dst, src) if pulls else (src, dst)
    cache, key = here.cache, there.cache
    if type(cache) is not Cache:
        return None
    src_rows, dst_rows, num_tokens = src.blocks, dst.blocks, transfer.num_tokens
    named: int | tuple[int]
    slot, lease = 0, None
    if type(key) is CacheIndex:
        named, slot = key.cache_id, key.batch_index
    elif type(key) is BlocksCacheKey:
        named = (key.model_id,)
    elif type(key) is BlockLease and key.paged:
        named, lease = key.cache_id, key
        if here.blocks is None:
            return None
        try:
            blocks, num_tokens = key.request("blocks", there.blocks, num_tokens, there.first_token)
        except (LLMException, TypeError):
            return None
        src_rows, dst_rows = (blocks, dst_rows) if pulls else (src_rows, blocks)
    else:
        return None
    by_tokens = num_tokens is not None or src.first_token != 0 or dst.first_token != 0
    kind: Kind
    if src_rows is not None and dst_rows is not None:
        kind = "B2B"
        if slot or here.slot is not None or there.slot is not None:
            return None
    elif src_rows is None and dst_rows is None and type(key) is CacheIndex:
        kind = "C2C"
        if there.slot not in (None, slot):
            return None
        own_slot = 0 if here.slot is None else here.slot
        src_rows, dst_rows = ((slot,), (own_slot,)) if pulls else ((own_slot,), (slot,))
    elif src_rows is None and dst_rows is not None:
        kind = "C2B"
        if dst.slot is not None or there.slot not in (None, slot):
            return None
        if type(key) is not CacheIndex if pulls else slot:
            return None
        src_rows = (slot if pulls else 0 if src.slot is None else src.slot,)
    else:
        return None
    if by_tokens and not are_tokens(kind, num_tokens, src.first_token, dst.first_token):
        return None
    link = engine.links.peers.get(key.cluster_id)
    entry = engine.living.get(cache.cache_id)
    if link is None or entry is None or (entry.cache is not cache and entry.cache != cache):
        return None
    pairs = link.pairs  # before the state: each change of either replaces the dict
    if link.state is not _LINKED or (lease is not None and lease.instance != link.instance):
        return None
    plain_layers = None if layers is ALL_LAYERS else layers
    name: _Key = (pulls, kind, named, cache.cache_id, plain_layers, by_tokens, by_layer)
    pair = pairs.get(name)
    if pair is not None and pair.entry() is not entry:
        pair = None
    return Request(
        pulls, link, pairs, name, pair, entry, key, lease, src_rows, dst_rows,
        num_tokens, src.first_token, dst.first_token,
    )  # fmt: skip


def move_now(
    engine: Engine, request: Request, started: float, tag: str, notify: bytes | None
) -> bool:
    """Move a small request between two mapped memories; False: nothing has moved."""
    pair = request.pair
    if pair is None or not engine.moves_small or logger.logger.isEnabledFor(logging.INFO):
        return False
    words, lease, entry, rows = pair.words, request.lease, request.entry, pair.rows
    cut = rows.cuts[0]
    if lease is not None:
        word = lease.packed_word(_TRANSPORT)
        if word is None:
            return False
        words += word
    try:
        nbytes = cut.rows.move_now(
            pair.peer,
            words,
            pair.guard,
            engine.living,
            entry.cache.cache_id,
            entry,
            request.src_rows,
            request.dst_rows,
            engine.transfers.small_nbytes,
            request.num_tokens or 0,
            request.src_token,
            request.dst_token,
        )
    except ValueError:  # the link is closed
        return False
    if nbytes == 0:
        return False
    link = request.link
    if notify is not None:
        try:
            link.notify(notify)
        except LLMException as error:
            with Operation(engine, rows.operation, tag=tag) as operation:
                operation.hold(link)
                raise operation.undelivered(error) from None
    ended = None
    if (recorder := engine.recorder) is not None and not recorder.ended:
        part = rows.part(
            cut, nbytes, request.src_rows, request.dst_rows, request.num_tokens, request.src_token,
            request.dst_token,
        )  # fmt: skip
        leases = () if lease is None else (lease.lease_id,)
        plan, cache_id = Plan.made(part), entry.cache.cache_id
        ended = Moved(rows.operation, tag, started, plan, cache_id, link, leases)
    seconds = perf_counter() - started
    conclude(engine, rows.operation, ended, _SUCCESS, nbytes, seconds)
    if request.pulls:
        link.traffic.add(1, nbytes)
    else:
        link.traffic.add(1, 0, nbytes)
    return True
