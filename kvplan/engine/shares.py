"""The pairs of caches that a transfer names, shared out to the peers that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from kvplan.lease import BlockLease
from kvplan.planning.blocks import RequestBlocks
from kvplan.planning.invariants import check_invariants
from kvplan.planning.part import Operation, Part
from kvplan.planning.plan import Plan
from kvplan.planning.planner import VERBS, Local, check_sources, of_part
from kvplan.planning.transfer import PeerTensors, Planned, Rows, Transfer
from kvplan.status import LLMException, invalid
from kvplan.types import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from kvplan.links import PeerLink
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.gather import Taken
    from kvplan.planning.side import Side

    Links = Mapping[int, PeerLink]

PEERS: Final = (CacheKeyByIdAndIndex, BlocksCacheKey, CacheKey, BlockLease, PeerTensors)
"""Types that name a cache of a peer."""


class Pair(NamedTuple):
    """Rows of two caches, between which one operation moves bytes.

    Attributes:
        name: the caller's name of the pair; empty: the transfer has only one destination.
        transfer: of that name.
        src, dst: the rows of the pair.
        source: the place of `src` among the sources of a gather; None: the transfer is none.
        taken: what a gather takes from the source, once it is known.
    """

    name: str
    transfer: Transfer | Planned
    src: Rows
    dst: Rows
    source: int | None = None
    taken: Taken | None = None

    def argument(self, field: str) -> str:
        """Return the name of a field in errors: as the caller gave it."""
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
                src = followed(self.argument("src"), self.src, links)
                return self._replace(src=src, dst=followed("dst", self.dst, links))
            transfer = with_lease_tables(self.transfer, links)
        except (LLMException, TypeError) as error:
            raise of_part(self.name, error) from None
        return Pair(self.name, transfer, cast(Rows, transfer.src), transfer.dst)


class Shares(NamedTuple):
    """The pairs of caches of a transfer, by the operation that moves them.

    Attributes:
        name: name of the operation.
        is_gather: whether a transfer has a sequence of sources.
        is_copy: whether all caches are of this process.
        pairs: the pairs of each peer, in the order of the transfer; layer by layer, each pair has
            an operation of its own.
    """

    name: str
    is_gather: bool
    is_copy: bool
    pairs: list[list[Pair]]


def shares_of(transfers: Mapping[str, Transfer | Planned], *, by_layer: bool) -> Shares:
    """Return the pairs of a transfer, shared out to their peers."""
    peers: dict[object, list[Pair]] = {}
    directions: dict[str, str] = {}
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
    if len(directions) > 1:
        raise invalid(f"transfer: {directions} are of several directions; one has one")
    gathers = any(map(is_gather, transfers.values()))
    verb = VERBS[next(iter(directions))]
    operation = f"{verb}_layers" if by_layer else f"{verb}_groups"
    if gathers and not by_layer:
        operation = "gather_blocks" if "" in transfers else "gather_groups"
    return Shares(operation, gathers, "both" in directions, [*peers.values()])


def local_of(src: Rows, dst: Rows) -> Local:
    """Return which side of a transfer is this process's."""
    if type(src) is not Rows or type(dst) is not Rows:
        check_type("src", src, Rows)
        check_type("dst", dst, Rows)
    from_peer, to_peer = isinstance(src.cache, PEERS), isinstance(dst.cache, PEERS)
    if from_peer and to_peer:
        raise invalid(
            f"src={shown(src.cache)} and dst={shown(dst.cache)} are both of peers; one side of a "
            "transfer is this process's"
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
    """Whether a transfer is a gather, from a sequence of sources."""
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


def followed(argument: str, rows: Rows, links: Links) -> Rows:
    """Return rows with the latest value of their lease, if its owner has moved blocks."""
    lease = rows.cache
    if not isinstance(lease, BlockLease) or (link := links.get(lease.cluster_id)) is None:
        return rows
    if not link.has_moved_leases or (latest := link.latest(lease)) is lease:
        return rows
    blocks = latest.places_of(f"{argument}.blocks", lease, rows.blocks)
    slot = latest.blocks[0] if lease.blocks == (rows.slot,) else rows.slot
    return Rows(latest, blocks, slot, rows.first_token, rows.offset)


def with_lease_tables(transfer: Transfer, links: Links) -> Transfer:
    """Return a transfer with the latest values of its leases, and the tables that they name."""
    src, dst = transfer.src, transfer.dst
    named_rows = (
        {"src.blocks": src}
        if isinstance(src, Rows)
        else {f"src[{index}].blocks": rows for index, rows in enumerate(src)}
    )
    named_rows["dst.blocks"] = dst
    named_rows = {
        argument: followed(argument.removesuffix(".blocks"), rows, links)
        for argument, rows in named_rows.items()
    }
    leased = [rows for rows in named_rows.values() if _is_leased(rows)]
    num_tokens = _num_tokens(leased, transfer.num_tokens) if leased else transfer.num_tokens
    *sources, dst = [
        _with_table(argument, rows, num_tokens) if _is_leased(rows) else rows
        for argument, rows in named_rows.items()
    ]
    return Transfer(
        sources[0] if isinstance(src, Rows) else sources, dst, num_tokens, transfer.nbytes,
        transfer.layers, transfer.reinterpret, transfer.coalesce, transfer.rank,
    )  # fmt: skip


def _is_leased(rows: Rows) -> bool:
    """Whether a lease of blocks names the rows."""
    return isinstance(rows.cache, BlockLease) and rows.cache.paged


def _with_table(argument: str, rows: Rows, num_tokens: int | None) -> Rows:
    lease = cast(BlockLease, rows.cache)
    if rows.blocks is None and num_tokens is not None:
        blocks: Blocks = RequestBlocks(lease.blocks)
    else:
        blocks = lease.named(argument, rows.blocks)
    return Rows(lease, blocks, rows.slot, rows.first_token, rows.offset)


def _num_tokens(rows: Sequence[Rows], given: int | None) -> int | None:
    """Return the tokens of a request: as given, or as leases of all its blocks say."""
    said = {
        lease.num_tokens("num_tokens", given, its.first_token)
        for its in rows
        if (lease := cast(BlockLease, its.cache)).tokens is not None and its.blocks is None
    }
    if len(said) > 1:
        raise invalid(
            f"num_tokens=None, and the leases are of requests of unequal length: "
            f"{sorted(filter(None, said))} tokens"
        )
    return said.pop() if said else given


def check_plan(plan: object) -> Part:
    """Return the part of the plan of a `Planned`."""
    parts = check_type("plan", plan, Plan).parts
    if len(parts) > 1:
        raise invalid(
            f"plan={plan!r} has {len(parts)} parts; they move by a mapping of names to Planned, of "
            "each part its plan in plan.by_part()"
        )
    return parts[0]


def fitted(planned: Planned, source: Side, target: Side, local: Local, *, by_layer: bool) -> Part:
    """Return the part that is planned, with the names of the caches that it is executed between."""
    part = check_plan(planned.plan)
    if part.local != local:
        needed = f'kvplan.plan(..., local="{local}")'
        raise invalid(
            f"src={shown(planned.src)} and dst={shown(planned.dst)} make a {VERBS[local]}, and "
            f"the plan is of {part.operation}; {needed} plans a {VERBS[local]}"
        )
    for name, then, now in (("src", part.src, source), ("dst", part.dst, target)):
        if then != now:
            from kvplan.inspection.diff import side_changes

            changes = "; ".join(side_changes(name, then, now))
            raise invalid(
                f"{name}={shown(getattr(planned, name))} is not as planned: {changes}; plan again"
            )
        if by_layer and "layer" not in part.split and now.extent("layer") > 1:
            raise invalid(
                f"{name}: the plan moves tensors of {now.extent('layer')} layers whole; "
                "kvplan.plan(..., by_layer=True) plans each layer by itself"
            )
    check_invariants(part)
    for name in ("src", "dst"):
        lease = getattr(planned, name)
        if isinstance(lease, BlockLease) and lease.paged:
            lease.named(f"plan {name} blocks", rows_of(part, name))
    return replace(part, src=source, dst=target)


def rows_of(part: Part, name: str) -> list[int]:
    """Return the blocks or slots of a side that a plan moves, each once, ascending."""
    runs = part.segments.expanded()
    side: Side = getattr(part, name)
    offsets = runs.src_offsets if name == "src" else runs.dst_offsets
    return cast("list[int]", side.rows_of(offsets, runs.nbytes).tolist())


def check_slot(planned: Planned, name: str, slot: int) -> None:
    """Refuse a key of another slot than the plan moves."""
    rows = rows_of(check_plan(planned.plan), name)
    if rows not in ([], [slot]):
        key = shown(getattr(planned, name))
        raise invalid(f"{name}={key} names slot {slot}, and the plan moves slot {rows[0]}")
