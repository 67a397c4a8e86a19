"""What a picture of a plan says, in words and numbers; `page` and `svg` draw it."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from kvplan.inspection.bands import NEW, OLD, SAME, Bands, Drawn, bands_of
from kvplan.inspection.contents import kv_of, layers_text, tokens_moved
from kvplan.inspection.diff import OTHER_BYTES, table_change, verdict
from kvplan.inspection.oddities import oddities
from kvplan.inspection.units import nbytes_text, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvplan.inspection.bands import Numbers
    from kvplan.planning.part import Part
    from kvplan.planning.plan import Plan
    from kvplan.planning.side import Side

RAMP: Final = (
    (59, 76, 192), (35, 116, 184), (14, 130, 126), (58, 126, 52), (160, 106, 0), (190, 66, 18),
)  # fmt: skip
"""Colours of the place in the request, first to last: white text is readable on each."""

MOST_SIZES: Final = 8
"""Rows of the histogram; where there are more sizes, it counts by powers of two."""

MOST_VIEWS: Final = 4
"""Tensors of a layer that are named before the rest is only counted."""

_VERBS: Final = {"pull": "Pulls", "push": "Pushes", "copy": "Copies", "swap": "Swaps"}


class Version(NamedTuple):
    """A side as one of the plans has it.

    Attributes:
        mark: "old" or "new", where two plans differ in it.
        data_type: its name, or what is known of rows that have none; and whether the other side
            has the same.
        axes: name and length of each axis of a tensor, outermost first, and whether the other side
            has it so, too; names are empty where there is no layout.
        facts: shard, number of tensors, where it is and how it is reached.
    """

    mark: str
    data_type: str
    same_type: bool
    axes: tuple[tuple[str, int, bool], ...]
    facts: tuple[str, ...]


class PictureSide(NamedTuple):
    """One of the two sides: its title, the word for a row, and what it is."""

    title: str
    name: str
    owner: str
    row: str
    versions: tuple[Version, ...]


class Size(NamedTuple):
    """A row of the histogram: descriptors of a size, of each plan in words and as a share.

    Attributes:
        shares: the count of each plan as a part of the largest count there is.
    """

    label: str
    counts: tuple[str, ...]
    shares: tuple[float, ...]


class Picture(NamedTuple):
    """Everything that is drawn of one plan, or of two that are compared.

    Attributes:
        name: of the group; empty: the plan has none.
        summary: what the plan does, in a sentence.
        verdict: of the comparison; empty: nothing is compared.
        layers: of each step of the slider, the layer and its tensors in words.
        alike: in how many layers the bands are the same, in words; empty: there is one.
        notes: what is odd, in sentences.
        entries: how many the destination's block table has; 0: not known.
        order: what says the place in the request: "entry" of the block table, "token", or nothing.
        length: how many of these there are; of nothing, bands.
        amounts: bytes and descriptors in words; `amount_of` has which of them each band has.
    """

    name: str
    summary: str
    verdict: str
    sides: tuple[PictureSide, PictureSide]
    layers: tuple[tuple[str, str], ...]
    alike: str
    notes: tuple[str, ...]
    sizes: tuple[Size, ...]
    drawn: Drawn
    entries: int
    order: Literal["entry", "token", ""]
    length: int
    amounts: tuple[str, ...]
    amount_of: list[int]


def pictures(plan: Plan, other: Plan | None = None) -> list[Picture]:
    """Return the picture of a plan, or of each of its groups.

    Args:
        other: what it is compared with, as by `plan.diff(other)`; of the same kind.
    """
    old, new = ({it.label: it for it in whole.parts} if whole else {} for whole in (plan, other))
    names = dict.fromkeys([*old, *new])
    return [_picture(it, old.get(it), new.get(it), other is not None) for it in names]


def tint(place: float) -> tuple[int, ...]:
    """The colour of a place in the request, from 0, the first, to 1."""
    at = min(max(place, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(at), len(RAMP) - 2)
    ends = zip(RAMP[low], RAMP[low + 1], strict=True)
    return tuple(round(a + (b - a) * (at - low)) for a, b in ends)


def headline(made: Sequence[Picture]) -> str:
    """What a comparison comes to: the verdict of the plan, or of each group that differs."""
    if len(made) == 1 and not made[0].name:
        return made[0].verdict
    odd = [f"group {it.name}: {it.verdict}" for it in made if it.verdict != "identical"]
    return "; ".join(odd) or "identical"


def _picture(name: str, old: Part | None, new: Part | None, compared: bool) -> Picture:
    plans = [it for it in (old, new) if it is not None]
    drawn, said = bands_of(plans[-1]), ""
    if old is None or new is None:
        if compared:
            state, word = (NEW, "new") if old is None else (OLD, "old")
            drawn, said = bands_of(plans[-1], _all(plans[-1], state)), f"only in the {word} plan"
    else:
        drawn, said = _compared(old, new), verdict(old, new)
        if said.startswith(OTHER_BYTES) and (cause := table_change(old, new)):
            said = f"{said}: {cause}"
    marks = ("old", "new") if len(plans) == 2 else ("",)
    amounts, amount_of = _amounts(drawn.bands, plans)
    entries = max((len(it.tables.dst) for it in plans if it.tables is not None), default=0)
    order, length = _order(drawn.bands, entries)
    return Picture(
        name,
        _summary(plans[-1]),
        said,
        (_side("src", plans, marks), _side("dst", plans, marks)),
        tuple(_layers(plans, marks)),
        _alike(plans, marks),
        tuple(_notes(plans, drawn)),
        tuple(_sizes(plans)),
        drawn,
        entries,
        order,
        length,
        amounts,
        amount_of,
    )


def _order(bands: Bands, entries: int) -> tuple[Literal["entry", "token", ""], int]:
    """What tells the bands apart best, and how many of it there are."""
    first, tokens = bands.entry_first, bands.token_first
    if (
        len(first)
        and first.min() >= 0
        and (len(np.unique(first)) == len(first) or bands.state.any())
    ):
        return "entry", entries
    if len(first) and tokens.min() >= 0:
        return "token", int(bands.token_last.max()) + 1
    return "", len(first)


def _all(plan: Part, state: int) -> Numbers:
    return np.full(len(plan.segments), state)


def _compared(old: Part, new: Part) -> Drawn:
    """The bands of both: those that are the same once, as the new plan has them."""
    alike = all(
        (a.stride, a.count, a.paged) == (b.stride, b.count, b.paged)
        for a, b in ((old.src, new.src), (old.dst, new.dst))
    )
    keys = [_keys(it) for it in (old, new)]
    states = [
        np.array([SAME if alike and it in other else odd for it in own], np.int64)
        for own, other, odd in ((keys[0], {*keys[1]}, OLD), (keys[1], {*keys[0]}, NEW))
    ]
    before, after = bands_of(old, states[0]), bands_of(new, states[1])
    gone = np.flatnonzero(before.bands.state == OLD)
    scales = [
        [math.lcm(*pair) // it for it in pair]
        for pair in zip(before.parts, after.parts, strict=True)
    ]
    rows = [
        _scaled(it.bands, scales[0][index], scales[1][index])
        for index, it in enumerate((before, after))
    ]
    rows[0] = Bands(*(it[gone] for it in rows[0]))
    both = Bands(*map(np.concatenate, zip(*rows, strict=True)))
    order = np.lexsort((both.state, both.dst_first, both.entry_first, both.token_first))
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    # Where each band of a plan is among those of both.
    of_old = dict(zip(gone.tolist(), places[: len(gone)].tolist(), strict=True))
    of_new = dict(enumerate(places[len(gone) :].tolist()))
    texts = [
        {
            of[it]: text
            for of, drawn in ((of_old, before), (of_new, after))
            for it, text in getattr(drawn, name).items()
            if it in of
        }
        for name in ("entries", "tokens")
    ]
    parts = [math.lcm(*pair) for pair in zip(before.parts, after.parts, strict=True)]
    return Drawn(
        Bands(*(it[order] for it in both)),
        (parts[0], parts[1]),
        texts[0],
        texts[1],
        max(before.joined, after.joined),
        _drawn_at(before, after, gone, order),
    )


def _drawn_at(
    before: Drawn, after: Drawn, gone: Numbers, order: Numbers
) -> tuple[Numbers, Numbers] | None:
    """Where bands are drawn, if those of one of the plans were joined."""
    if before.at is after.at is None:
        return None
    src, dst = (
        np.concatenate([_at(before, which)[gone], _at(after, which)])[order] for which in (0, 1)
    )
    return src, dst


def _at(drawn: Drawn, which: int) -> Numbers:
    return (
        (drawn.bands.src_first, drawn.bands.dst_first)[which]
        if drawn.at is None
        else drawn.at[which]
    )


def _scaled(bands: Bands, src: int, dst: int) -> Bands:
    return bands._replace(
        src_from=bands.src_from * src,
        src_to=bands.src_to * src,
        dst_from=bands.dst_from * dst,
        dst_to=bands.dst_to * dst,
    )


def _keys(plan: Part) -> list[tuple[int, ...]]:
    """Each segment as a value; those of two plans are equal where they copy the same bytes."""
    segments = plan.segments
    columns = [getattr(segments, it).tolist() for it in segments.columns()]
    columns += [it.counts.tolist() for it in segments.repeats]
    strides = [stride for it in segments.repeats for stride in it[1:]]
    return [(*it, *strides) for it in zip(*columns, strict=True)]


def _summary(plan: Part) -> str:
    """One sentence: `Pulls 3 blocks of a peer into 3 blocks, in 2 layers: 384 KiB in ...`."""
    tables, tokens = plan.tables, tokens_moved(plan)
    of_src, of_dst = (
        (" of a peer", "") if plan.local == "dst" else ("", " of a peer" * (plan.local == "src"))
    )
    count = plan.num_slices if plan.kind == "B2B" else 1
    if tables is not None:
        count = len(np.unique(tables.src)) if plan.local == "both" else len(tables.src)
    src = plural(count, plan.src.row) + of_src
    written = 1 if plan.kind == "C2C" else plan.num_slices
    dst = plural(written if tables is None else len(tables.dst), plan.dst.row) + of_dst
    rows = f"{src} into {dst}"
    if tokens is not None:
        rows = f"{plural(tokens, 'token')}, {rows}"
    layers = len(plan.dst_layers) * (1 if "layer" in plan.split else plan.dst.extent("layer"))
    verb = _VERBS[plan.operation.partition("_")[0]]
    return (
        f"{verb} {rows}, in {plural(layers, 'layer')}: {nbytes_text(plan.nbytes)} in "
        f"{plural(plan.num_descriptors, 'descriptor')}."
    )


def _side(name: str, plans: Sequence[Part], marks: Sequence[str]) -> PictureSide:
    other = "dst" if name == "src" else "src"
    versions = [_version(getattr(it, name), getattr(it, other)) for it in plans]
    if len({*versions}) == 1:
        versions = versions[:1]
    else:
        versions = [it._replace(mark=mark) for it, mark in zip(versions, marks, strict=True)]
    shown = plans[-1]
    own = shown.local in (name, "both")
    side: Side = getattr(shown, name)
    return PictureSide(
        "Source" if name == "src" else "Destination",
        side.name,
        "of this process" if own else "of a peer",
        side.row if len({getattr(it, name).row for it in plans}) == 1 else "row",
        tuple(versions),
    )


def _version(side: Side, other: Side) -> Version:
    axes = side.layout.axes if side.layout is not None else ("",) * len(side.shape)
    own, theirs = _axes(side), _axes(other)
    # An axis stands in another place if its place among those of both sides is another one.
    places = [[name for name in it if name in own and name in theirs] for it in (own, theirs)]
    alike = [
        not name
        or (
            name in theirs
            and places[0].index(name) == places[1].index(name)
            and (name == "row" or own[name] == theirs[name])
        )
        for name in own or axes
    ]
    facts = [str(side.shard) if side.shard is not None else "", side.label or ""]
    facts += [plural(side.num_tensors, "tensor"), f"on {side.placement.name.lower()}"]
    facts += [f"over {side.way}" if side.way else ""]
    return Version(
        "",
        f"rows of {side.stride} bytes" if side.data_type is None else side.data_type.name,
        side.data_type == other.data_type,
        tuple(zip(axes, side.shape, alike, strict=True)),
        tuple(filter(None, facts)),
    )


def _axes(side: Side) -> dict[str, int]:
    """Lengths of the axes by name, outermost first, where there is a layout; rows are "row"."""
    if side.layout is None:
        return {}
    names = ["row" if name in ("block", "slot") else name for name in side.layout.axes]
    return dict(zip(names, side.shape, strict=True))


def _layers(plans: Sequence[Part], marks: Sequence[str]) -> Iterator[tuple[str, str]]:
    texts = [[*_layers_of(it)] for it in plans]
    for several in zip_longest(*texts):
        if len({*several}) == 1:
            yield several[0]
            continue
        said = [
            (f"{mark}: {it[0]}", f"{mark}: {it[1]}") if it else (f"{mark}: no layer", "")
            for mark, it in zip(marks, several, strict=True)
        ]
        yield " | ".join(it[0] for it in said), " | ".join(filter(None, (it[1] for it in said)))


def _alike(plans: Sequence[Part], marks: Sequence[str]) -> str:
    """`same bands in all 61`, or how many layers each of the plans has."""
    counts = [len(it.src_layers) for it in plans]
    if max(counts) < 2:
        return ""
    if min(counts) == max(counts):
        return f"same bands in all {counts[0]}"
    each = [plural(count, f"{mark} layer") for mark, count in zip(marks, counts, strict=True)]
    return f"same bands in {' and '.join(each)}"


def _layers_of(plan: Part) -> Iterator[tuple[str, str]]:
    """`layer 4 → 0`, `tensors 8 → 0 K, 9 → 1 V`."""
    named = "kv" in plan.split or plan.tensors_per_layer == 2
    per_layer = plan.tensors_per_layer
    places = []
    for side, views in ((plan.src, plan.src_tensors), (plan.dst, plan.dst_tensors)):
        where = side.locate(views, plan.split, per_layer)[0].tolist() if plan.split else [*views]
        places.append(where)
    for layer in range(len(plan.src_layers)):
        first = layer * per_layer
        part = slice(first, first + per_layer)
        pairs = [
            f"{src} → {dst}{f' {kv_of(plan, view, 0, 0)}' if named else ''}".rstrip()
            for src, dst, view in zip(
                *(it[part] for it in places), plan.dst_tensors[part], strict=True
            )
        ]
        hidden = len(pairs) - MOST_VIEWS
        tail = f", and {hidden} more" if hidden > 0 else ""
        text = f"tensor{'s' if len(pairs) > 1 else ''} {', '.join(pairs[:MOST_VIEWS])}{tail}"
        yield layers_text(plan, slice(layer, layer + 1)).replace("->", "→"), text


def _notes(plans: Sequence[Part], drawn: Drawn) -> Iterator[str]:
    if drawn.joined:
        yield (
            f"{drawn.joined:,} runs are too many to draw each: neighbours in the request's order "
            "are one mark, which is drawn where the first of them is."
        )
    new = oddities(plans[-1])
    if len(plans) == 1:
        yield from new
        return
    old = oddities(plans[0])
    yield from new
    yield from (f"No longer so: {it}" for it in old if it not in new)


def _sizes(plans: Sequence[Part]) -> Iterator[Size]:
    """Descriptors by size, of each plan."""
    sizes = [it.segments.nbytes.astype(np.int64) for it in plans]
    weights = [it.segments.runs().astype(np.int64) for it in plans]
    distinct = np.unique(np.concatenate(sizes))
    edges = [(int(it), int(it)) for it in distinct]
    if len(distinct) > MOST_SIZES:
        powers = range(int(distinct[0]).bit_length() - 1, int(distinct[-1]).bit_length())
        edges = [(1 << it, (2 << it) - 1) for it in powers]
    counts = [
        [
            int(weight[(size >= low) & (size <= high)].sum()) * plan.num_tensor_pairs
            for low, high in edges
        ]
        for plan, size, weight in zip(plans, sizes, weights, strict=True)
    ]
    largest = max((max(it) for it in counts if it), default=1)
    for (low, high), *row in zip(edges, *counts, strict=True):
        if any(row):
            exact = low == high
            label = nbytes_text(low) if exact else f"{nbytes_text(low)} to {nbytes_text(high + 1)}"
            yield Size(
                label,
                tuple(f"{it:,}" for it in row),
                tuple(max(it / largest, 0.005 * bool(it)) for it in row),
            )


def _amounts(bands: Bands, plans: Sequence[Part]) -> tuple[tuple[str, ...], list[int]]:
    """Bytes and descriptors of each band in words, which few of them differ in."""
    found: dict[tuple[int, int, int, int, int], int] = {}
    pairs = np.where(bands.state == OLD, plans[0].num_tensor_pairs, plans[-1].num_tensor_pairs)
    columns = zip(
        bands.runs.tolist(), bands.nbytes.tolist(), bands.least.tolist(), bands.most.tolist(),
        pairs.tolist(), strict=True,
    )  # fmt: skip
    amount_of = [found.setdefault(it, len(found)) for it in columns]
    return tuple(_amount_text(*it) for it in found), amount_of


def _amount_text(runs: int, nbytes: int, least: int, most: int, pairs: int) -> str:
    of = "" if runs == 1 else f" of {nbytes_text(least)}"
    if least != most:
        of += f" to {nbytes_text(most)}"
    text = f"{nbytes_text(nbytes)} in {plural(runs, 'descriptor')}{of}"
    if pairs == 1:
        return text
    return f"{text}, in each of {pairs:,} tensors: {nbytes_text(nbytes * pairs)} in all"
