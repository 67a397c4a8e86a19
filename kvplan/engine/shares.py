"""The pairs of caches that a transfer names, grouped by the operations that move them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from kvplan.lease import BlockLease
from kvplan.planning.part import Operation
from kvplan.planning.planned import check_plan
from kvplan.planning.planner import VERBS, Local, check_direction, check_sources, of_part
from kvplan.planning.transfer import PeerTensors, Planned, Rows, Transfer, followed, with_leases
from kvplan.status import LLMException, invalid
from kvplan.types import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from kvplan.links import Links
    from kvplan.planning.gather import Taken

PEERS: Final = (CacheKeyByIdAndIndex, BlocksCacheKey, CacheKey, BlockLease, PeerTensors)
"""Types that name a cache of a peer."""


class Pair(NamedTuple):
    """Rows of two caches, between which one operation moves bytes."""

    name: str  # the caller's; empty: the transfer has only one destination
    transfer: Transfer | Planned
    src: Rows
    dst: Rows
    source: int | None = None  # place of `src` among the sources of a gather
    taken: Taken | None = None  # from the source of a gather, once it is known

    def argument(self, field: str) -> str:
        """Return the caller's name of a field, for errors."""
        place = f"{field}[{self.source}]" if field == "src" and self.source is not None else field
        return f"transfer[{shown(self.name)}].{place}" if self.name else place

    def with_tables(self, links: Links) -> Pair:
        """Return the pair with the latest values of its leases, and their block tables and tokens.

        A gather gets its tables later. A plan keeps its lease, whose blocks it names.
        """
        if type(self.src.cache) is not BlockLease and type(self.dst.cache) is not BlockLease:
            return self
        if isinstance(self.transfer, Planned):
            return self
        try:
            if self.source is not None:
                src = followed(self.argument("src"), self.src, links.latest)
                return self._replace(src=src)
            transfer = with_leases(self.transfer, links.latest)
        except (LLMException, TypeError) as error:
            raise of_part(self.name, error) from None
        return Pair(self.name, transfer, cast(Rows, transfer.src), transfer.dst)


class Shares(NamedTuple):
    """The pairs of a transfer, and what operations do with them."""

    name: str  # of the operation
    is_gather: bool
    is_copy: bool  # inside this process
    # A list for each operation. There is one operation for each peer, and for each further source
    # of a gather in that peer; layer by layer, one for each pair.
    pairs: list[list[Pair]]


def shares_of(transfers: Mapping[str, Transfer | Planned], *, by_layer: bool) -> Shares:
    """Return the pairs of a transfer, grouped by the operations that move them."""
    peers: dict[object, list[Pair]] = {}
    directions: dict[Local, str] = {}
    for name, transfer in transfers.items():
        try:
            single = not is_gather(transfer)
            sources, dst = _rows_of(transfer)
            known: dict[int | None, int] = {}
            for index, rows in enumerate(sources):
                local = local_of(rows, dst)
                if not single and local != "dst":
                    raise invalid(f"src[{index}]={shown(rows.cache)} of a gather must be a peer's")
                directions[local] = name
                key = rows.cache if local == "dst" else dst.cache
                cluster = None if local == "both" else cast(BlockLease, key).cluster_id
                nth = known[cluster] = known.get(cluster, -1) + 1  # caches of one peer
                pair = Pair(name, transfer, rows, dst, None if single else index)
                peer: object = (cluster, nth, name) if by_layer else (cluster, nth)
                peers.setdefault(peer, []).append(pair)
        except (LLMException, TypeError) as error:
            raise of_part(name, error) from None
    check_direction(directions)
    gathers = any(map(is_gather, transfers.values()))
    verb = VERBS[next(iter(directions))]
    operation = f"{verb}_layers" if by_layer else f"{verb}_groups"
    if gathers and not by_layer:
        operation = "gather_blocks" if "" in transfers else "gather_groups"
    return Shares(operation, gathers, "both" in directions, [*peers.values()])


def local_of(src: Rows, dst: Rows) -> Local:
    """Return the side of a transfer that is in this process."""
    if type(src) is not Rows or type(dst) is not Rows:
        check_type("src", src, Rows)
        check_type("dst", dst, Rows)
    from_peer, to_peer = isinstance(src.cache, PEERS), isinstance(dst.cache, PEERS)
    if from_peer and to_peer:
        raise invalid(
            f"src={shown(src.cache)} and dst={shown(dst.cache)} are both of peers; one of them "
            "must be of this process"
        )
    return "dst" if from_peer else "src" if to_peer else "both"


def operation_name(local: Local, src: Rows, dst: Rows) -> Operation:
    """Return the name of a transfer in logs, metrics and recordings, such as "pull_blocks"."""
    verb, cache = VERBS[local], dst.cache
    if dst.blocks is None and not (type(cache) is BlockLease and cache.paged):
        return cast(Operation, f"{verb}_cache")
    if verb == "copy" and type(src.cache) is Cache and type(cache) is Cache:
        placements = {src.cache.cache_desc.placement, cache.cache_desc.placement}
        if len(placements) > 1:
            verb = "swap"
    return cast(Operation, f"{verb}_blocks")


def is_gather(transfer: Transfer | Planned) -> bool:
    """Return whether a transfer is a gather: its source is a sequence of rows."""
    return isinstance(transfer, Transfer) and not isinstance(transfer.src, Rows)


def _rows_of(transfer: Transfer | Planned) -> tuple[Sequence[Rows], Rows]:
    """Return the sources and the destination; of a plan, its caches without tables."""
    if isinstance(transfer, Planned):
        check_plan(transfer.plan)
        return [Rows(transfer.src)], Rows(transfer.dst)
    if isinstance(transfer.src, Rows):
        return [transfer.src], transfer.dst
    check_sources(transfer.src)
    return transfer.src, transfer.dst
