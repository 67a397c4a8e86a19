"""One request from several caches: each byte of the destination comes from exactly one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Final, NamedTuple, cast

import numpy as np
from msgspec.structs import replace

from kvplan.layout import Layers, consecutive, numbers_text
from kvplan.planning.axes import Share, heads_of
from kvplan.planning.blocks import block_table, check_table
from kvplan.planning.kinds import plan_to_blocks
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.part import Part
from kvplan.planning.side import Described, Side, side
from kvplan.planning.texts import rename, spans_of, spans_text
from kvplan.planning.tokens import Mask, fewest, room
from kvplan.planning.transfer import Rows, Transfer
from kvplan.status import LLMException, invalid
from kvplan.types import KvCacheExtParam
from kvplan.validation import INT64_MAX, as_int, check_type, check_width

_MAX_DIVISIONS: Final = 256
"""Number of remembered divisions of a request among caches."""


class _Part(NamedTuple):
    """Layers, KV heads and tokens of the model (None: all tokens that both sides have).

    Layers are positions among the layer numbers of all caches. If all caches have ranges of layers,
    position and number are equal.
    """

    layers: range
    heads: range
    tokens: Mask | None = None


class _Tokens(NamedTuple):
    """The tokens that move, and the caches that hold them.

    Attributes:
        needed: tokens of the destination.
        held: tokens of each source.
        first: the number of the first token at the destination.
    """

    needed: Mask
    held: list[Mask]
    first: int


class Taken(NamedTuple):
    """The layers, heads and tokens that a gather takes from one of its sources.

    Attributes:
        layers: the layers at the source, and the same layers at the destination.
        heads: KV heads of the model; None: all that both sides have.
        tokens: the tokens to take; None: all that both sides have.
    """

    layers: KvCacheExtParam
    heads: range | None
    tokens: Mask | None = None


def plan_gather(
    transfer: Transfer,
    sources: Sequence[Described],
    dst: Described,
    *,
    by_layer: bool = False,
) -> list[Part | None]:
    """Plan pulls of one request from several caches, each of which has a part of the model.

    Together the parts write each byte of the request in `dst` exactly once: layer by layer, head by
    head and token by token from one of the sources that have it. A source's part is None if nothing
    is taken from it: for example, it is a replica or holds no token of the request.

    Args:
        transfer: the rows of each source and of `dst`; see `Transfer`.
        sources: the caches. Their `Shard` names layers, heads and tokens; a cache without a shard
            has everything.
        dst: the local paged cache.
        by_layer: True if each layer is to move by itself.
    """
    check_gather(transfer)
    sides = [side(f"sources[{i}]", cache, paged=True) for i, cache in enumerate(sources)]
    target = side("dst", dst, paged=True)
    taken, transfer = divide(transfer, sides, target)
    rows = cast("Sequence[Rows]", transfer.src)
    return [
        share
        and plan_taken(transfer, index, rows[index], sides[index], target, share, by_layer=by_layer)
        for index, share in enumerate(taken)
    ]


def check_gather(transfer: Transfer) -> None:
    """Refuse rows and options that a gather does not support."""
    sources = {f"src[{i}]": rows for i, rows in enumerate(cast("Sequence[Rows]", transfer.src))}
    for name, rows in sources.items():
        if rows.blocks is None:
            raise invalid(f"{name}.blocks is None; it must name blocks")
        check_table(f"{name}.blocks", rows.blocks)
    if transfer.dst.blocks is None:
        raise invalid("dst.blocks is None; a gather needs the blocks that it writes")
    if transfer.dst.slot is not None and as_int("dst.slot", transfer.dst.slot) != 0:
        raise invalid(f"dst.slot={transfer.dst.slot} must be None or 0: a gather writes blocks")
    refuse_bytes(transfer.nbytes, sources | {"dst": transfer.dst})
    if check_type("reinterpret", transfer.reinterpret, bool):
        raise invalid("reinterpret=True must be False: a gather needs the meaning of its rows")
    if transfer.layers is not ALL_LAYERS and transfer.layers != ALL_LAYERS:
        raise invalid(
            f"layers={transfer.layers} must be left out: a gather moves all layers that dst has; "
            "give dst a Shard that names the layers"
        )


def refuse_bytes(nbytes: int | None, named_rows: Mapping[str, Rows]) -> None:
    """Refuse a number of bytes, and an offset of rows: blocks are cut by tokens."""
    offsets = ((f"{name}.offset", rows.offset, 0) for name, rows in named_rows.items())
    for name, value, unset in (("nbytes", nbytes, None), *offsets):
        if value is not unset and as_int(name, cast(int, value)) != unset:
            raise invalid(f"{name}={value} must be {unset}: blocks are cut by num_tokens")


def divide(
    transfer: Transfer, sides: Sequence[Side], target: Side
) -> tuple[Sequence[Taken | None], Transfer]:
    """Return the share of each source of a checked gather, and the transfer to be planned."""
    if transfer.rank is not None:
        check_width("rank", check_type("rank", transfer.rank, int), 0, INT64_MAX)
    if target.has_all_tokens and all(cache.has_all_tokens for cache in sides):
        return _divided_whole(tuple(sides), target, transfer.rank), transfer
    parts, wanted, numbers = _held_parts(sides, target)
    num_tokens, tokens = _held_tokens(transfer, sides, target)
    taken = _taken(target, parts, wanted, numbers, transfer.rank, tokens)
    return taken, replace(transfer, num_tokens=num_tokens)


@lru_cache(maxsize=_MAX_DIVISIONS)
def _divided_whole(
    sides: tuple[Side, ...], target: Side, rank: int | None
) -> tuple[Taken | None, ...]:
    """Divide requests of sides that have all tokens: cached, because blocks do not matter."""
    return _taken(target, *_held_parts(sides, target), rank)


def plan_taken(
    transfer: Transfer,
    index: int,
    rows: Rows,
    source: Side,
    target: Side,
    taken: Taken,
    *,
    by_layer: bool,
) -> Part:
    """Plan the share of the source at this index; `rows` are its latest."""
    assert transfer.dst.blocks is not None
    layers, heads, tokens = taken
    try:
        return plan_to_blocks(
            "pull_blocks", source, target, rows.blocks, transfer.dst.blocks, rows.slot,
            transfer.num_tokens, rows.first_token, transfer.dst.first_token, layers,
            transfer.coalesce, False, by_layer,
            None if heads is None and tokens is None else Share(heads, tokens),
        )  # fmt: skip
    except (LLMException, TypeError, ValueError) as error:
        rename(error, {"src": f"src[{index}]"})
        raise


def _held_parts(sides: Sequence[Side], target: Side) -> tuple[list[_Part], _Part, Layers]:
    """Return the parts of the model in each source and in `target`, and the layers' numbers."""
    caches = {"dst": target} | {f"sources[{i}]": cache for i, cache in enumerate(sides)}
    held = {name: _layers_of(name, cache) for name, cache in caches.items()}
    numbers = _numbers_of(held.values())
    wanted, *parts = [
        _Part(_positions(name, held[name], numbers), heads_of(cache)[0])
        for name, cache in caches.items()
    ]
    for index, (source, piece) in enumerate(zip(sides, parts, strict=True)):
        totals = [_num_layers(cache, own) for cache, own in ((source, piece), (target, wanted))]
        if totals[0] != totals[1]:
            raise invalid(
                f"sources[{index}] and dst differ in the number of the model's layers, {totals[0]} "
                f"and {totals[1]}: sources[{index}] is {source}; dst is {target}"
            )
    return parts, wanted, numbers


def _taken(
    target: Side,
    parts: list[_Part],
    wanted: _Part,
    numbers: Layers,
    rank: int | None,
    tokens: _Tokens | None = None,
) -> tuple[Taken | None, ...]:
    """Return the share of each source; None: nothing is taken from it."""
    if rank is None:
        rank = wanted.heads.start // len(wanted.heads)
    has_heads = target.layout is not None and "head" in target.layout.axes
    taken: list[Taken | None] = []
    for share, own in zip(_shares(parts, wanted, rank, numbers, tokens), parts, strict=True):
        if share is None:
            taken.append(None)
            continue
        layers = ALL_LAYERS
        if not own.layers == share.layers == wanted.layers:
            layers = KvCacheExtParam(
                _shifted(share.layers, -own.layers.start),
                _shifted(share.layers, -wanted.layers.start),
            )
        is_common = share.heads == _overlap(own.heads, wanted.heads)
        heads = share.heads if has_heads and not is_common else None
        taken.append(Taken(layers, heads, share.tokens))
    return tuple(taken)


def _layers_of(name: str, cache: Side) -> Layers:
    if cache.layout is None:
        raise invalid(
            f"{name} has no layout, so its part of the model is unknown: {cache}; give its "
            "CacheDesc a kv_tensor_format such as 'block token head dim'"
        )
    layers = cache.shard.layers if cache.shard is not None else None
    if layers is None:
        layers = range(cache.num_tensors * cache.extent("layer") // cache.usual_tensors_per_layer)
    return layers


def _numbers_of(several: Iterable[Layers]) -> Layers:
    """Return the layer numbers that any cache has; all from 0 on if each cache has a range."""
    held = list(several)
    if all(isinstance(layers, range) for layers in held):
        return range(max(layers[-1] for layers in held) + 1)
    return tuple(sorted({*chain(*held)}))


def _positions(name: str, layers: Layers, numbers: Layers) -> range:
    first = numbers.index(layers[0])
    if consecutive(numbers[first : first + len(layers)]) != layers:
        raise invalid(
            f"{name} has layers {numbers_text(layers)} of the model, and other caches have layers "
            "in between; use one gather for each group of caches with equal layers"
        )
    return range(first, first + len(layers))


def _num_layers(cache: Side, piece: _Part) -> int:
    """Return the number of the model's layers; a cache without a shard has all."""
    known = cache.shard.num_layers if cache.shard is not None else None
    return len(piece.layers) if known is None else known


def _held_tokens(transfer: Transfer, sources: Sequence[Side], target: Side) -> tuple[int, _Tokens]:
    """Return the number of tokens that move, and which of them dst and each source have."""
    dst, rows = transfer.dst, cast("Sequence[Rows]", transfer.src)
    assert dst.blocks is not None
    first, *firsts = (
        check_width(f"{name}.first_token", as_int(f"{name}.first_token", given), 0, INT64_MAX)
        for name, given in (
            ("dst", dst.first_token),
            *((f"src[{index}]", source.first_token) for index, source in enumerate(rows)),
        )
    )
    num_tokens = transfer.num_tokens
    num_blocks = len(block_table("dst.blocks", dst.blocks))
    most = room(target, num_blocks, first)
    if num_tokens is None:
        num_tokens = max(fewest(target, num_blocks, first), 0)
    elif not 0 <= (num_tokens := as_int("num_tokens", num_tokens)) <= most:
        raise invalid(
            f"num_tokens={num_tokens} is out of range [1, {max(most, 0)}], the room in the dst "
            f"rows from dst.first_token={first} on"
        )
    request = np.arange(num_tokens)
    masks: dict[object, Mask] = {}  # replicas share a mask
    held = []
    for cache, skipped in zip(sources, firsts, strict=True):
        key = cache.spread, skipped
        if key not in masks:
            masks[key] = key[0].owns(request + skipped)
        held.append(masks[key])
    return num_tokens, _Tokens(target.spread.owns(request + first), held, first)


def _shares(
    parts: list[_Part], wanted: _Part, rank: int, numbers: Layers, tokens: _Tokens | None
) -> list[_Part | None]:
    """Divide `wanted` among the sources: each layer, head and token comes from exactly one."""
    cells: list[set[tuple[int, int]]] = [set() for _ in parts]
    # For each source: the mask of its tokens, by the sources that share them.
    taken: list[dict[tuple[int, ...], Mask]] = [{} for _ in parts]
    layers = _pieces([part.layers for part in parts], wanted.layers)
    heads = _pieces([part.heads for part in parts], wanted.heads)
    for i, some_layers in enumerate(layers):
        for j, some_heads in enumerate(heads):
            having = tuple(
                index
                for index, piece in enumerate(parts)
                if some_layers.start in piece.layers and some_heads.start in piece.heads
            )
            if not having:
                raise invalid(
                    f"no source has {_text(_Part(some_layers, some_heads), numbers, ', ')} of the "
                    f"model, which dst needs; the sources have {_texts(parts, numbers)}"
                )
            if tokens is None:
                cells[having[rank % len(having)]].add((i, j))
                continue
            is_empty = not tokens.needed.any()  # then one source gets an empty part
            for index, mask in zip(having, _divided(tokens, having, rank), strict=True):
                if mask.any() or (is_empty and index == having[rank % len(having)]):
                    cells[index].add((i, j))
                    taken[index][having] = mask
            missing = tokens.needed & ~np.logical_or.reduce(
                [tokens.held[index] for index in having]
            )
            if missing.any():
                text = _text(_Part(some_layers, some_heads), numbers, ", ")
                raise invalid(
                    f"no source has {_tokens_text(missing, tokens.first)} of the request in {text} "
                    f"of the model, which dst needs; the sources that have these layers and heads "
                    f"are {', '.join(f'sources[{index}]' for index in having)}"
                )
    shares: list[_Part | None] = []
    for index, own in enumerate(cells):
        if not own:
            shares.append(None)
            continue
        rows, columns = sorted({i for i, _ in own}), sorted({j for _, j in own})
        is_range = all(b == a + 1 for indices in (rows, columns) for a, b in pairwise(indices))
        masks = [*taken[index].values()]
        is_same = all(np.array_equal(masks[0], mask) for mask in masks[1:])
        if len(own) != len(rows) * len(columns) or not is_range or not is_same:
            raise invalid(
                f"sources[{index}] overlaps others so that its share is not one range of layers "
                f"and heads; the sources have {_texts(parts, numbers)}: give sources whose parts "
                "are equal or disjoint"
            )
        share: Mask | None = None
        if tokens is not None:
            both = tokens.held[index] & tokens.needed
            share = None if np.array_equal(masks[0], both) else masks[0]
        shares.append(
            _Part(
                range(layers[rows[0]].start, layers[rows[-1]].stop),
                range(heads[columns[0]].start, heads[columns[-1]].stop),
                share,
            )
        )
    return shares


def _divided(tokens: _Tokens, having: tuple[int, ...], rank: int) -> list[Mask]:
    """Return the tokens to take from each source, so that each token comes from one source."""
    held = [tokens.held[index] for index in having]
    counts = sum(mask.astype(np.int32) for mask in held)
    left = rank % np.maximum(counts, 1)  # sources to skip before the one that gives
    masks = []
    for mask in held:
        masks.append(tokens.needed & mask & (left == 0))
        left = left - mask
    return masks


def _tokens_text(missing: Mask, first: int) -> str:
    """Return `tokens 16..31, 48..63, ...`, numbered as at the destination."""
    return spans_text("token", spans_of(np.flatnonzero(missing) + first))


def _pieces(parts: list[range], whole: range) -> list[range]:
    """Return `whole`, cut at every boundary of `parts`."""
    edges = {whole.start, whole.stop}
    edges |= {edge for piece in parts for edge in (piece.start, piece.stop) if edge in whole}
    return [range(*ends) for ends in pairwise(sorted(edges))]


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _shifted(piece: range, by: int) -> range:
    return range(piece.start + by, piece.stop + by)


def _text(piece: _Part, numbers: Layers, between: str = " ") -> str:
    layers = consecutive(numbers[piece.layers.start : piece.layers.stop])
    text = numbers_text(layers) if isinstance(layers, tuple) else f"{layers[0]}..{layers[-1]}"
    return f"layers {text}{between}heads {piece.heads.start}..{piece.heads.stop - 1}"


def _texts(parts: list[_Part], numbers: Layers) -> str:
    return ", ".join(_text(part, numbers) for part in parts)
