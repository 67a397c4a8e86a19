"""Known pairs of caches: requests that need no lookup, and small ones that move inline.

All requests between two caches share a pair: both sides, their memory, and the lowering of block
tables. The link keeps the pairs of its peer's caches by name. A request with a known pair needs no
lookup, in an operation or in `move_now`.

At most 64 KiB move inline, between memory of this process and mapped memory of a peer, in the
calling thread and with the GIL. No other thread sees such a transfer in flight: a link or a cache
ends before it or after it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, Unpack
from weakref import ref

import msgspec

from kvnative._lower import Descriptors
from kvplan.engine.memory import joined
from kvplan.engine.operation import Operation, RunOptions, notify_moved, refuse_notices
from kvplan.engine.shares import local_of, operation_name
from kvplan.engine.telemetry import logger
from kvplan.execution.binding import join, parts_are_apart
from kvplan.execution.memory import HostMemory
from kvplan.execution.rows import are_plain, counts_tokens
from kvplan.lease import BlockLease
from kvplan.links.values import LinkState
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.plan import OBSERVERS, Plan
from kvplan.planning.planner import VERBS, Local
from kvplan.planning.segments import DEFAULT_COALESCE
from kvplan.planning.transfer import Rows, Transfer
from kvplan.status import LLMException, LLMStatusCode
from kvplan.types import BlocksCacheKey, Cache, CacheIndex

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvnative._process import Peer
    from kvnative._writers import WriteGuard
    from kvplan.engine.engine import Engine
    from kvplan.engine.operation import Prepared
    from kvplan.engine.shares import Pair
    from kvplan.execution.memory import TensorMemory
    from kvplan.execution.rows import RowPair
    from kvplan.links import PeerLink
    from kvplan.links.local_engine import CacheEntry
    from kvplan.links.peer_table import PeerCache
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.part import Kind, Part
    from kvplan.transport.link import PeerMemory
    from kvplan.types import KvCacheExtParam

_LINKED: Final = LinkState.LINKED  # faster than a lookup in the enumeration
_SUCCESS: Final = LLMStatusCode.LLM_SUCCESS

_TRANSPORT: Final = "local"  # the only transport that maps memory of peers
_MAX_PAIRS: Final = 1024  # per link


class NamedPair(NamedTuple):
    """The known pairs of one request, with their rows; keeps no memory of this process alive."""

    entries: tuple[ref[CacheEntry], ...]
    theirs: PeerMemory
    rows: tuple[RowPair, ...]
    peer: Peer | None  # None: not mapped here, so nothing moves inline
    words: bytes
    write_guard: WriteGuard | None
    are_apart: bool  # no two caches share memory


_Key: TypeAlias = "tuple[bool, Kind, int | tuple[int], int, KvCacheExtParam | None, bool, bool]"


class Request(msgspec.Struct):
    """A usual transfer with a peer: the link, the cache of this process, and the rows to move."""

    pulls: bool
    kind: Kind
    link: PeerLink
    pairs: dict[_Key | tuple[_Key, ...], NamedPair]  # of the link; read before its state
    name: _Key  # the key in `pairs`
    pair: NamedPair | None  # made by an earlier request; None: not known
    entry: CacheEntry  # of this process
    key: CacheIndex | BlocksCacheKey | BlockLease
    lease: BlockLease | None  # the key, if it is a lease
    src_rows: Blocks  # for a slot only its index
    dst_rows: Blocks
    num_tokens: int | None
    src_token: int
    dst_token: int


def find_request(engine: Engine, transfer: object, *, by_layer: bool = False) -> Request | None:
    """Look up the names of a transfer; None: the transfer is unusual or wrong."""
    if type(transfer) is not Transfer:
        return None
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
        if here.blocks is None:
            return None
        link, blocks = engine.links.peers.get(key.cluster_id), there.blocks
        try:
            if link is not None and link.moved_leases:
                key, earlier = link.latest(key), key
                if key is not earlier:
                    blocks = key.places_of("blocks", earlier, blocks)
            named, lease = key.cache_id, key
            blocks, num_tokens = key.request("blocks", blocks, num_tokens, there.first_token)
        except (LLMException, TypeError):
            return None
        src_rows, dst_rows = (blocks, dst_rows) if pulls else (src_rows, blocks)
    else:
        return None
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
    by_tokens = num_tokens is not None or src.first_token != 0 or dst.first_token != 0
    if by_tokens and not counts_tokens(kind, num_tokens, src.first_token, dst.first_token):
        return None
    link = engine.links.peers.get(key.cluster_id)
    entry = engine.living.get(cache.cache_id)
    if link is None or entry is None or (entry.cache is not cache and entry.cache != cache):
        return None
    pairs = link.pairs  # before the state: changes of link or caches replace the dict
    if link.state is not _LINKED or (lease is not None and lease.instance != link.instance):
        return None
    plain_layers = None if layers is ALL_LAYERS else layers
    name: _Key = (pulls, kind, named, cache.cache_id, plain_layers, by_tokens, by_layer)
    pair = pairs.get(name)
    if pair is not None and pair.entries[0]() is not entry:
        pair = None
    return Request(
        pulls, kind, link, pairs, name, pair, entry, key, lease, src_rows, dst_rows,
        num_tokens, src.first_token, dst.first_token,
    )  # fmt: skip


class PairOperation(Operation, ABC):
    """An operation between pairs of caches; if all pairs are known, no name is looked up."""

    _local: Local

    def __init__(
        self,
        engine: Engine,
        pairs: list[Pair],
        name: str = "",
        request: Request | None = None,
        *,
        by_layer: bool = False,
        speculative: bool = False,
        **options: Unpack[RunOptions],
    ) -> None:
        first = pairs[0]
        self._is_alone = not first.name and first.source is None
        self.pairs, self.by_layer = pairs, by_layer
        self._requests = [] if request is None else [request]
        if request is not None and request.pair is not None:
            self._local = "dst" if request.pulls else "src"
            name = request.pair.rows[0].operation
        else:
            self._local = local_of(first.src, first.dst)
            if self._local == "both":
                refuse_notices(options)
        if by_layer:
            name = f"{VERBS[self._local]}_layers"
        name = name or operation_name(self._local, first.src, first.dst)
        super().__init__(engine, name, speculative=speculative, **options)

    def prepare(self) -> Prepared:
        """Return the plan, the memories and the descriptors of all pairs."""
        return self.use_known() or self.resolve()

    @abstractmethod
    def resolve(self) -> Prepared:
        """Find the caches of all pairs by their names, and lower or plan each pair."""

    def use_known(self) -> Prepared | None:
        """Prepare the operation from known pairs; None: resolve the names."""
        # Only before the link is held. Checks of the memory find later changes of the peer.
        if not self.moves or self.link is not None:
            return None
        if not self._is_alone:
            self._requests = self._find_requests()
        if not self._requests:
            return None
        first = self._requests[0]
        found = first.pair
        if len(self._requests) > 1:
            found = first.pairs.get(_name_of(self._requests))
        link = first.link
        if found is None or first.pairs is not link.pairs:
            return None
        is_key = False  # a key may name another cache now
        parts, lowered, ours, leases = [], [], [], []
        for request, pair, rows, entry in zip(
            self._requests, self.pairs, found.rows, found.entries, strict=True
        ):
            bound = rows.bind(
                request.src_rows, request.dst_rows, request.num_tokens, request.src_token,
                request.dst_token, pair.name,
            )  # fmt: skip
            if bound is None or entry() is not request.entry or request.pairs is not first.pairs:
                return None
            parts.append(bound[0])
            lowered.append(bound[1])
            ours.append(request.entry.memory)
            is_key = is_key or type(request.key) is BlocksCacheKey
            if request.lease is not None:
                leases.append(request.lease)
        if is_key and not self._speculative:
            return None
        self.hold(link)
        self.speculated, self.cache_id = is_key, first.entry.cache.cache_id
        theirs: TensorMemory = found.theirs
        if leases:
            self.leases = tuple(leases)
            theirs = found.theirs.leased(leases)
        own = ours[0] if len(ours) == 1 else joined(ours)
        src, dst = (theirs, own) if first.pulls else (own, theirs)
        if not found.are_apart:
            return prepare_parts(parts, lowered, src, dst)
        descriptors = lowered[0] if len(lowered) == 1 else Descriptors.joined(lowered)
        return Plan.made(*parts), src, dst, descriptors

    def has_moved(self) -> bool:
        """Return whether the peer has moved blocks of a lease since this operation looked it up."""
        link = self.link
        return link is not None and any(link.latest(lease) is not lease for lease in self.leases)

    def _find_requests(self) -> list[Request]:
        """Look up the names of transfers of blocks; empty: one is unusual or wrong."""
        requests = []
        for pair in self.pairs:
            request = find_request(self.engine, pair.transfer, by_layer=self.by_layer)
            if request is None or request.kind != "B2B":
                return []
            requests.append(request)
        return requests

    def keep(
        self,
        rows: Sequence[RowPair],
        parts: Sequence[Part],
        ours: TensorMemory,
        theirs: TensorMemory,
        caches: Sequence[PeerCache],
    ) -> None:
        """Let later requests find the rows of these caches, unless the peer must be asked first."""
        requests, link = self._requests, self._requests[0].link
        # The kinds differ, for example, if an empty source table means a slot.
        kinds = [(request.kind, pair.kind) for request, pair in zip(requests, rows, strict=True)]
        if self.link is not link or any(asked != found for asked, found in kinds):
            return
        pulls, pairs = requests[0].pulls, requests[0].pairs
        by_key = any(type(request.key) is BlocksCacheKey for request in requests)
        if (by_key or not pulls) and link.asks_before_writes:
            return
        try:
            shared = link.joined_memory(caches, writable=not pulls)  # without leases
        except LLMException:
            return  # freed meanwhile: the transfer itself will raise
        if shared.addresses is not theirs.addresses:
            return
        peer, words, by_address = shared.reader or (None, b"", True)
        if by_address or not (type(ours) is HostMemory and ours.held):
            peer = None
        if len(pairs) >= _MAX_PAIRS:
            pairs.clear()
        src, dst = (shared, ours) if pulls else (ours, shared)
        pairs[_name_of(requests)] = NamedPair(
            tuple([ref(request.entry) for request in requests]), shared, tuple(rows), peer,
            words, None if pulls else shared.write_guard,
            len(parts) == 1 or parts_are_apart(parts, src, dst, one_space=theirs.in_process),
        )  # fmt: skip


def _name_of(requests: Sequence[Request]) -> _Key | tuple[_Key, ...]:
    return requests[0].name if len(requests) == 1 else tuple([each.name for each in requests])


def prepare_parts(
    parts: Sequence[Part], lowered: Sequence[Descriptors], src: TensorMemory, dst: TensorMemory
) -> Prepared:
    """Return the plan of all parts, with one array of descriptors if each part has its own."""
    plan, descriptors = Plan.made(*parts), None
    if len(lowered) == len(parts):
        with suppress(LLMException):  # raised again where the plan is bound
            descriptors = join(plan, lowered, src, dst, one_space=src.in_process and dst.in_process)
    return plan, src, dst, descriptors


def move_now(engine: Engine, request: Request, started: float, options: Mapping[str, Any]) -> bool:
    """Move a small request between two mapped memories; False: an operation must move it."""
    pair = request.pair
    if pair is None or pair.peer is None or not engine.moves_small:
        return False
    if logger.logger.isEnabledFor(logging.INFO):
        return False
    lease, entry, rows = request.lease, request.entry, pair.rows[0]
    cut = rows.cuts[0]
    word = b"" if lease is None else lease.packed_word(_TRANSPORT)
    if word is None:
        return False
    try:
        nbytes = cut.rows.move_now(
            pair.peer,
            pair.words + word,
            pair.write_guard,
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
    if options.get("notify") is not None:
        notify_moved(engine, link, rows.operation, started, options)
    seconds = perf_counter() - started
    if (recorder := engine.recorder) is not None and not recorder.ended:  # before it is counted
        head = (
            started, seconds, rows.operation, 0, "", options.get("tag", ""), link.cluster_id,
            entry.cache.cache_id, () if lease is None else (lease.lease_id,), nbytes,
        )  # fmt: skip
        moved = request.src_rows, request.dst_rows
        make = partial(
            rows.part, cut, nbytes, *moved, request.num_tokens, request.src_token, request.dst_token
        )
        recorder.moved(head, cut.part, moved, nbytes // cut.num_pairs, make)
    engine.metrics.record(rows.operation, _SUCCESS, nbytes, seconds)
    if request.pulls:
        link.traffic.add(1, nbytes)
    else:
        link.traffic.add(1, 0, nbytes)
    return True
