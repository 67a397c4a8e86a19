"""Planning functions: a `Transfer` of cache descriptions in, a plan out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias, cast

import numpy as np

from kvplan.planning.gather import plan_gather, refuse_bytes
from kvplan.planning.kinds import plan_slot_to_slot, plan_to_blocks
from kvplan.planning.part import Operation, Part
from kvplan.planning.plan import Plan, check_name
from kvplan.planning.segments import first_overlapped
from kvplan.planning.side import Described, Side, is_same_cache, slot_index
from kvplan.planning.transfer import AnyTransfer, Rows, Transfer
from kvplan.status import LLMException, invalid, within
from kvplan.types import Cache, CacheDesc, Placement, RemoteCache
from kvplan.validation import check_mapping, check_type, mismatch, shown

Local: TypeAlias = Literal["src", "dst", "both"]
"""The side of this process: "src" for a push, "dst" for a pull, "both" for a copy."""

_DESCRIBED = (CacheDesc, Cache, RemoteCache, Side)
VERBS: Final = {"dst": "pull", "src": "push", "both": "copy"}
"""The verb of a transfer, by the side of this process."""


def plan(transfer: AnyTransfer, *, local: Local | None = None, by_layer: bool = False) -> Plan:
    """Plan a transfer from descriptions of its caches. No engine is needed and no byte moves.

    Args:
        transfer: rows to move, whose caches are `CacheDesc`, `Cache` or `RemoteCache`.
        local: the side of this process: "dst" plans a pull, "src" a push, "both" a copy. None:
            "dst" for a gather, otherwise the side that is not a `RemoteCache`, or both.
        by_layer: True if each layer is to move by itself, as `LlmDataDist.layered` moves it.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a number of tokens of block tables, or a rank, outside [0, 2**63).
        LLMException: LLM_PARAM_INVALID: a block, slot, token, byte or layer out of range; tables of
            unequal length, or of different requests; a destination block named twice; a copy inside
            one cache that reads what it writes; caches that cannot match; a layer, head or token
            that dst needs and no source has; no transfer, or an invalid name; another `local`.
    """
    if local is not None and local not in ("src", "dst", "both"):
        raise invalid(f"local={shown(local)} must be 'src', 'dst', 'both' or None")
    check_type("by_layer", by_layer, bool)
    if isinstance(transfer, Transfer):
        return Plan.made(*_plan_one("", transfer, local, by_layer))
    check_mapping("transfer", transfer)
    check_transfers(transfer)
    parts = [
        part for name, each in transfer.items() for part in _plan_one(name, each, local, by_layer)
    ]
    check_direction({part.local: part.label for part in parts})
    return Plan.made(*parts)


def check_direction(names: Mapping[Local, str]) -> None:
    """Refuse several directions; `names` has a transfer of each, by the side of this process."""
    if len(names) > 1:
        listed = ", ".join(f"{shown(name)} is a {VERBS[side]}" for side, name in names.items())
        raise invalid(f"transfer: {listed}; one transfer has one direction")


def _plan_one(name: str, transfer: Transfer, local: Local | None, by_layer: bool) -> list[Part]:
    """Return the parts of one transfer: one, or one for each contributing source of a gather."""
    src, dst = transfer.src, transfer.dst
    try:
        target = _described("dst", dst)
        if isinstance(src, Rows):
            source = _described("src", src)
            local = _local_of(source, target, local)
            return [plan_pair(transfer, source, target, local, by_layer=by_layer).labelled(name)]
        check_sources(src)
        if local not in (None, "dst"):
            raise invalid(f"local={shown(local)} of a gather must be 'dst' or None: it pulls")
        if isinstance(target, RemoteCache):
            raise invalid(f"dst={target.key} is remote; a gather writes a cache of this process")
        sources = [_described(f"src[{i}]", rows) for i, rows in enumerate(src)]
        made = plan_gather(transfer, sources, target, by_layer=by_layer)
    except (LLMException, TypeError) as error:
        raise of_part(name, error) from None
    return [part.labelled(name, index) for index, part in enumerate(made) if part is not None]


def _local_of(source: Described, target: Described, local: Local | None) -> Local:
    """Return `local` if given, else the side that is not a `RemoteCache`, or "both"."""
    from_peer, to_peer = (isinstance(cache, RemoteCache) for cache in (source, target))
    if from_peer and to_peer:
        raise invalid("src and dst are both remote; one must be of this process")
    found: Local = "dst" if from_peer else "src" if to_peer else "both"
    if local is None or found in ("both", local):
        return local or found
    remote = "src" if from_peer else "dst"
    raise invalid(f"local={shown(local)} must be {shown(found)} or None: {remote} is a RemoteCache")


def plan_pair(
    transfer: Transfer,
    source: Described,
    target: Described,
    local: Local,
    *,
    by_layer: bool = False,
) -> Part:
    """Plan rows of one cache to rows of another; `transfer` has the rows."""
    src, dst = cast(Rows, transfer.src), transfer.dst
    if transfer.reinterpret is not False:
        check_type("reinterpret", transfer.reinterpret, bool)
    if transfer.rank is not None:
        raise invalid(f"rank={transfer.rank} must be None: only a gather has several sources")
    verb = VERBS[local]
    if dst.blocks is None:
        if src.blocks is not None:
            raise invalid(f"src.blocks={shown(src.blocks)} go to blocks; dst.blocks must name them")
        if src.first_token != 0 or dst.first_token != 0:
            raise invalid(
                f"src.first_token={shown(src.first_token)} and "
                f"dst.first_token={shown(dst.first_token)} skip tokens of block tables; a slot "
                "begins at its first token"
            )
        made = plan_slot_to_slot(
            cast(Operation, f"{verb}_cache"), source, target, src.slot, dst.slot,
            transfer.nbytes, src.offset, dst.offset, transfer.num_tokens, transfer.layers,
            transfer.coalesce, transfer.reinterpret, by_layer,
        )  # fmt: skip
    else:
        made = _plan_blocks(transfer, source, target, verb, by_layer=by_layer)
    if local == "both" and _is_one_cache(source, target):
        _refuse_read_and_written(made)
    return made


def _plan_blocks(
    transfer: Transfer, source: Described, target: Described, verb: str, *, by_layer: bool
) -> Part:
    """Plan rows of one cache to blocks of another."""
    src, dst = cast(Rows, transfer.src), transfer.dst
    assert dst.blocks is not None
    are_plain = type(src.offset) is type(dst.offset) is int
    if not are_plain or src.offset or dst.offset or transfer.nbytes is not None:
        refuse_bytes(transfer.nbytes, {"src": src, "dst": dst})
    if verb == "copy" and _is_swap(source, target):
        verb = "swap"
    made = plan_to_blocks(
        cast(Operation, f"{verb}_blocks"), source, target, src.blocks, dst.blocks, src.slot,
        transfer.num_tokens, src.first_token, dst.first_token, transfer.layers, transfer.coalesce,
        transfer.reinterpret, by_layer,
    )  # fmt: skip
    if dst.slot is not None:
        slot_index("dst.slot", dst.slot, target, made.dst)
    return made


def of_part(name: str, error: LLMException | TypeError) -> LLMException | TypeError:
    """Return `error` with the name of the refused transfer before its message."""
    if not name:
        return error
    if isinstance(error, LLMException):
        return within(f"part {name}", error)
    return TypeError(f"part {name}: {error.args[0]}")


def check_transfers(transfers: Mapping[str, object], kinds: tuple[type, ...] = (Transfer,)) -> None:
    """Refuse a mapping that is empty, or that does not map names to transfers.

    Args:
        transfers: by name.
        kinds: allowed classes of transfers.
    """
    if not transfers:
        raise invalid("transfer is empty; it must name at least one Transfer")
    for name, transfer in transfers.items():
        check_name(name)
        if not isinstance(transfer, kinds):
            raise TypeError(
                f"transfer[{shown(name)}]={shown(transfer)} must be {mismatch(transfer, *kinds)}"
            )


def check_sources(sources: object) -> None:
    """Refuse a gather whose sources are not a sequence of `Rows`."""
    if isinstance(sources, str | bytes) or not isinstance(sources, Sequence):
        raise TypeError(f"src={shown(sources)} must be Rows, or a sequence of Rows")
    if not sources:
        raise invalid("src is empty; a gather needs at least one source")
    for index, rows in enumerate(sources):
        check_type(f"src[{index}]", rows, Rows)


def _described(argument: str, rows: object) -> Described:
    cache = check_type(argument, rows, Rows).cache
    if not isinstance(cache, _DESCRIBED):
        raise TypeError(
            f"{argument}={shown(cache)} must be {mismatch(cache, *_DESCRIBED[:3])}; "
            "LlmDataDist.plan takes keys and leases"
        )
    return cache


def _is_swap(source: Described, target: Described) -> bool:
    return {_placement(source), _placement(target)} == {Placement.HOST, Placement.DEVICE}


def _placement(cache: Described) -> Placement:
    if isinstance(cache, Cache | RemoteCache):
        return cache.cache_desc.placement
    return cache.placement


def _is_one_cache(source: Described, target: Described) -> bool:
    """Return True if both are certainly one cache; equal descriptions do not prove that."""
    return is_same_cache(source, target) and not isinstance(source, CacheDesc | RemoteCache)


def _refuse_read_and_written(part: Part) -> None:
    """Refuse a copy inside one cache whose result depends on the order of its segments."""
    shift = part.dst_tensors.start - part.src_tensors.start
    if abs(shift) >= len(part.src_tensors):  # no tensor is both read and written
        return
    segments = part.segments.expanded()
    src, dst, nbytes = segments.src_offsets, segments.dst_offsets, segments.nbytes
    # Bytes that are copied to themselves do not change, so no read of them can come too late.
    writers = np.arange(len(dst)) if shift else np.flatnonzero(src != dst)
    writers = writers[np.argsort(dst[writers])]
    ends = dst[writers] + nbytes[writers]
    reader = first_overlapped(src, src + nbytes, dst[writers], ends)
    if reader is None:
        return
    writer = writers[np.searchsorted(ends, src[reader], side="right")]
    row, _ = part.dst.rows(int(max(src[reader], dst[writer])), 1)
    raise invalid(
        f"{part.dst.row} {row} is both read and written by this copy inside one cache; "
        "the result would depend on the order: copy in two steps"
    )
