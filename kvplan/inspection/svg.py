"""A picture of a plan as SVG: rows of both sides, and a band for each run between them.

A browser shows the title of the band under the pointer.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final

import numpy as np

from kvplan.inspection.bands import Bands, Places
from kvplan.inspection.explain import oddities
from kvplan.planning.contents import kv_of, layers_text, tokens_moved
from kvplan.planning.part import Part
from kvplan.planning.plan import Plan
from kvplan.planning.side import Side
from kvplan.planning.texts import fit, nbytes_text, plural, to_text
from kvplan.types import Placement

WIDTH: Final = 960
MARGIN: Final = 24
TRACK: Final = 28
SPAN: Final = 150
MAX_ROW: Final = 88  # width of a row; three or fewer rows may be wider

MAX_RIBBONS: Final = 512
"""Maximum bands that are drawn to scale; more are drawn as lines, and neighbours share a mark."""

MAX_MARKS: Final = 160
MAX_LINES: Final = 4096
"""Maximum lines; of more bands, only every second, third, ... is drawn."""

MAX_NOTES: Final = 4
MAX_TENSORS: Final = 4  # of a layer; the others are counted

RAMP: Final = (
    (59, 76, 192), (35, 116, 184), (14, 130, 126), (58, 126, 52), (160, 106, 0), (190, 66, 18),
)  # fmt: skip
"""Colours of the order in the request, first to last. White text is readable on each of them."""

_VERBS: Final = {"pull": "Pulls", "push": "Pushes", "copy": "Copies", "swap": "Swaps"}
_LABELS: Final = {"entry": "entry of the block table", "token": "tokens of the request"}

# Colours suit the picture's own background, which follows the viewer's theme, not the page's.
_STYLE: Final = """
.ground{fill:#fff;stroke:#d9d9d3}.bed{fill:#eeeeea;stroke:#dcdcd6}
.ink{fill:#1b1d20}.soft{fill:#5f636b}.odd{fill:#8a5300}
.tick{stroke:#fff;stroke-opacity:.75;fill:none}.line{fill:none;stroke-opacity:.3}
.ribbon{fill-opacity:.4;stroke-opacity:.8;stroke-width:.8}
.band{outline:none}.band:hover .ribbon,.band:focus .ribbon{fill-opacity:.85}
.band:hover .line,.band:focus .line{stroke-opacity:1;stroke-width:1.6}
svg:has(.band:hover) .band:not(:hover),svg:has(.band:focus) .band:not(:hover,:focus){opacity:.2}
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
.head{font-size:16px;font-weight:600}.bold{font-weight:600}
.end{fill:#fff;font-weight:600;font-size:11px;paint-order:stroke;stroke-width:4px}
.end,.tick{pointer-events:none}
@media (prefers-color-scheme:dark){
.ground{fill:#191c1f;stroke:#2d3136}.bed{fill:#262a2e;stroke:#33383d}
.ink{fill:#eceef0}.soft{fill:#a3a9b0}.odd{fill:#f0bb62}
.tick{stroke:#191c1f}.ribbon{fill-opacity:.55}}
"""

Place = tuple[float, float]
"""Left and right edge."""


def to_svg(plan: Plan, path: str | os.PathLike[str] | None = None) -> str:
    """Return a plan, its parts below one another, as SVG; write it to `path`."""
    text = picture(plan, plan.parts)
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def picture(plan: Plan, parts: Sequence[Part]) -> str:
    """Return the SVG of some parts of a plan."""
    lines: list[str] = []
    y: float = MARGIN
    title = f"{plan.operation} · {plan.kind} · plan {plan.fingerprint[:6]}"
    for part in parts:
        drawing = _Drawing(part, y)
        drawing.draw(f"{title} · part {part.label}" if part.label else title)
        lines += drawing.lines
        y = drawing.y + MARGIN
    height, name = round(y), _clean(repr(plan))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="group" aria-label="{name}">',
            f"<title>{name}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" '
            'rx="10"/>',
            *lines,
            "</svg>\n",
        ]
    )


def layer_texts(part: Part) -> list[str]:
    """Return a text for each layer: `layer 4 → 0: tensors 8 → 0 K, 9 → 1 V`."""
    per_layer = part.tensors_per_layer
    places = []
    for side, views in ((part.src, part.src_tensors), (part.dst, part.dst_tensors)):
        located = side.locate(views, part.split, per_layer)[0].tolist() if part.split else [*views]
        places.append(located)
    texts = []
    for layer in range(len(part.src_layers)):
        piece = slice(layer * per_layer, (layer + 1) * per_layer)
        views = part.dst_tensors[piece]
        pairs = [
            f"{src} → {dst} {kv_of(part, view, 0, 0) if per_layer == 2 else ''}".rstrip()
            for src, dst, view in zip(*(column[piece] for column in places), views, strict=True)
        ]
        hidden = len(pairs) - MAX_TENSORS
        pairs[MAX_TENSORS:] = [f"and {hidden} more"] if hidden > 0 else []
        word = "tensor" if len(views) == 1 else "tensors"
        name = layers_text(part, slice(layer, layer + 1)).replace("->", "→")
        texts.append(f"{name}: {word} {', '.join(pairs)}")
    return texts


def summary_text(part: Part) -> str:
    """Return one sentence: `Pulls 3 blocks of a peer into 3 blocks, in 2 layers: 384 KiB ...`."""
    tables, tokens = part.tables, tokens_moved(part)
    owners = ["" if part.local in (name, "both") else " of a peer" for name in ("src", "dst")]
    count = part.num_slices if part.kind == "B2B" else 1
    written = 1 if part.kind == "C2C" else part.num_slices
    if tables is not None:
        count = len(np.unique(tables.src)) if part.local == "both" else len(tables.src)
        written = len(tables.dst)
    rows = f"{plural(count, part.src.row)}{owners[0]} into {plural(written, part.dst.row)}"
    if tokens is not None:
        rows = f"{plural(tokens, 'token')}, {rows}"
    layers = len(part.dst_layers) * (1 if "layer" in part.split else part.dst.extent("layer"))
    return (
        f"{_VERBS[part.operation.partition('_')[0]]} {rows}{owners[1]}, in "
        f"{plural(layers, 'layer')}: {nbytes_text(part.nbytes)} in "
        f"{plural(part.num_descriptors, 'descriptor')}."
    )


class _Axis:
    """The places of a side's used rows, in order, with gaps in between."""

    def __init__(self, side: Places, parts: int, drawn: slice) -> None:
        extents: list[list[int]] = []
        pairs = zip(side.first[drawn].tolist(), side.last[drawn].tolist(), strict=True)
        for low, high in sorted(pairs):
            if extents and low <= extents[-1][1] + 1:
                extents[-1][1] = max(extents[-1][1], high)
            else:
                extents.append([low, high])
        gaps = len(extents) - 1
        rows = sum(high - low + 1 for low, high in extents)
        used = min(WIDTH - 2 * MARGIN, max(rows * MAX_ROW + gaps * 16, 300))
        self.gap = min(16.0, 0.35 * used / gaps) if gaps > 0 else 0.0
        self.size = (used - self.gap * gaps) / max(rows, 1)
        self.extents: list[tuple[int, int, float]] = []
        x = (WIDTH - used) / 2
        for low, high in extents:
            self.extents.append((low, high, x))
            x += (high - low + 1) * self.size + self.gap
        self._lows = [low for low, _, _ in self.extents]
        columns = (column[drawn].tolist() for column in side)
        self.places = _side_by_side(
            [
                (self.at(first, begin / parts), self.at(last, end / parts))
                for first, last, begin, end in zip(*columns, strict=True)
            ]
        )

    def at(self, row: int, piece: float = 0) -> float:
        """Return the left edge of a row, or of a piece of it."""
        low, _, x = self.extents[bisect_right(self._lows, row) - 1]
        return x + (row - low + piece) * self.size


class _Drawing:
    """The picture of one part, from `y` downwards. `draw` sets `y` to its lower end."""

    def __init__(self, part: Part, y: float) -> None:
        self.part, self.y = part, y
        self.lines: list[str] = []
        self.bands = Bands(part)
        self.has_boxes = len(self.bands) <= MAX_RIBBONS
        self.step = -(-len(self.bands) // MAX_LINES) or 1
        self.axes = [
            _Axis(side, parts, slice(None, None, self.step))
            for side, parts in zip((self.bands.src, self.bands.dst), self.bands.parts, strict=True)
        ]

    def draw(self, title: str) -> None:
        """Draw the part, below `title`."""
        part = self.part
        self._text(MARGIN, 6, title, "soft")
        self._text(MARGIN, 28, summary_text(part), "ink head")
        self.y += 42
        self._side("Source", part.src, part.dst, part.local in ("src", "both"))
        self._side("Destination", part.dst, part.src, part.local in ("dst", "both"))
        self.y += 12
        self._tracks()
        label = _LABELS.get(self.bands.labelled_by, "order")
        legend = (
            f"and number in a box: {label}" if self.has_boxes else "from blue to red: the request"
        )
        self._text(MARGIN, 6, f"colour {legend}", "soft")
        if part.src_layers:
            count = len(part.src_layers)
            alike = f", the same in all {count}" if count > 1 else ""
            layer = layers_text(part, slice(1)).replace("->", "→")
            self._text(WIDTH - MARGIN, 6, f"{layer}{alike}", "soft", "end")
        self.y += 10
        for note in self._notes():
            self.y += 18
            self._text(MARGIN, 6, note, "odd")
        self.y += 12

    def _notes(self) -> Iterator[str]:
        """Yield the lines of the oddities, since SVG does not wrap text."""
        if self.step > 1:
            yield f"Only one of {self.step} runs is drawn: there are {len(self.bands):,}."
        found = oddities(self.part)
        for note in found[:MAX_NOTES]:
            yield from fit(note, 140)
        if (hidden := len(found) - MAX_NOTES) > 0:
            yield f"… and {hidden} more"

    def _side(self, title: str, side: Side, other: Side, is_own: bool) -> None:
        """Draw one line: data type, axes, shard, and where the tensors are."""
        owner = "of this process" if is_own else "of a peer"
        facts = [str(side.shard) if side.shard is not None else "", side.label or ""]
        facts.append(plural(side.num_tensors, "tensor"))
        # DEVICE is the default of descriptions: without an accelerator it may mean host memory.
        if {side.placement, other.placement} != {Placement.DEVICE}:
            facts.append(f"on {side.placement.name.lower()}")
        facts.append(f"over {side.way}" if side.way else "")
        name = f" {side.name}" if side.name else ""
        kind = f"rows of {side.stride} bytes" if side.data_type is None else side.data_type.name
        axes = ", ".join(
            f'<tspan class="odd">≠ {_clean(text)}</tspan>' if is_odd else _clean(text)
            for text, is_odd in _axes(side, other)
        )
        if side.data_type != other.data_type:
            kind = f'<tspan class="odd">≠ {kind}</tspan>'
        more = "".join(f" · {_clean(fact)}" for fact in facts if fact)
        self.lines.append(
            f'<text class="soft" x="{MARGIN}" y="{_n(self.y + 8)}"><tspan class="bold">{title}'
            f"</tspan> {_clean(f'{owner}{name}')}: {kind} ({axes}){more}</text>"
        )
        self.y += 18

    def _tracks(self) -> None:
        self.y += 16
        self._text(MARGIN, 0, f"Source {self.part.src.row}s", "ink bold")
        self.y += 20
        self._numbers(self.axes[0])
        top = self.y + 8
        bottom = top + TRACK + SPAN
        for axis, y in zip(self.axes, (top, bottom), strict=True):
            self._bed(axis, y)
        if self.has_boxes:
            self._ribbons(top, bottom)
        else:
            self._many_lines(top, bottom)
        self.y = bottom + TRACK + 16
        self._numbers(self.axes[1])
        self.y += 18
        self._text(MARGIN, 0, f"Destination {self.part.dst.row}s", "ink bold")
        self.y += 16

    def _bed(self, axis: _Axis, y: float) -> None:
        boxes = "".join(
            f"M{_n(x)} {_n(y)}h{_n((high - low + 1) * axis.size)}v{TRACK}H{_n(x)}Z"
            for low, high, x in axis.extents
        )
        self.lines.append(f'<path class="bed" d="{boxes}"/>')
        if axis.gap >= 12:
            for _, _, x in axis.extents[1:]:
                self._text(x - axis.gap / 2, y + TRACK / 2 + 3 - self.y, "⋯", "soft", "middle")

    def _ribbons(self, top: float, bottom: float) -> None:
        texts = []
        edge, middle = top + TRACK, (top + TRACK + bottom) / 2
        for index in range(len(self.bands)):
            (a, b), (c, d) = (_at_least(axis.places[index], 2) for axis in self.axes)
            paint = self._paint(index)
            self._mark(
                range(index, index + 1),
                f'<path class="ribbon" fill="{paint}" stroke="{paint}" d="M{_n(a)} {_n(edge)}'
                f"C{_n(a)} {_n(middle)} {_n(c)} {_n(middle)} {_n(c)} {_n(bottom)}H{_n(d)}"
                f'C{_n(d)} {_n(middle)} {_n(b)} {_n(middle)} {_n(b)} {_n(edge)}Z"/>'
                f'<path fill="{paint}" d="M{_n(a)} {_n(top)}H{_n(b)}V{_n(edge)}H{_n(a)}Z'
                f'M{_n(c)} {_n(bottom)}H{_n(d)}V{_n(bottom + TRACK)}H{_n(c)}Z"/>',
            )
            label = self.bands.label(index)
            for (left, right), y in (((a, b), top), ((c, d), bottom)):
                if label and right - left > len(label) * 6.6 + 6:
                    texts.append(
                        f'<text class="end" stroke="{paint}" x="{_n((left + right) / 2)}" '
                        f'y="{_n(y + TRACK / 2 + 4)}" text-anchor="middle">{_clean(label)}</text>'
                    )
        for axis, y in zip(self.axes, (top, bottom), strict=True):
            if axis.size >= 5:
                marks = "".join(
                    f"M{_n(axis.at(row))} {_n(y)}v{TRACK}"
                    for low, high, _ in axis.extents
                    for row in range(low + 1, high + 1)
                )
                self.lines += [f'<path class="tick" d="{marks}"/>'] if marks else []
        self.lines += texts

    def _many_lines(self, top: float, bottom: float) -> None:
        """Draw a line for each band, or each `step`-th; neighbours in the request share a mark."""
        size = -(-len(self.bands) // MAX_MARKS)
        edge, middle = top + TRACK, (top + TRACK + bottom) / 2
        width = max(0.5, min(axis.size for axis in self.axes))
        src, dst = (axis.places for axis in self.axes)
        for start in range(0, len(self.bands), size):
            stop = min(start + size, len(self.bands))
            path, boxes = [], []
            for index in range(-(-start // self.step), -(-stop // self.step)):
                x, to = (_n(sum(side[index]) / 2) for side in (src, dst))
                path.append(f"M{x} {_n(edge)}C{x} {_n(middle)} {to} {_n(middle)} {to} {_n(bottom)}")
                boxes.append(f"M{x} {_n(top)}v{TRACK}M{to} {_n(bottom)}v{TRACK}")
            paint = self._paint((start + stop) // 2)
            self._mark(
                range(start, stop),
                f'<path class="line" stroke="{paint}" stroke-width="0.6" d="{"".join(path)}"/>'
                f'<path stroke="{paint}" stroke-width="{_n(width)}" d="{"".join(boxes)}"/>',
            )

    def _mark(self, bands: range, drawn: str) -> None:
        title = _clean(self.bands.text(bands))
        self.lines.append(f'<g class="band"><title>{title}</title>{drawn}</g>')

    def _paint(self, index: int) -> str:
        """Return the colour of a band, by its place in the request."""
        at = index / max(len(self.bands) - 1, 1) * (len(RAMP) - 1)
        low = min(int(at), len(RAMP) - 2)
        ends = zip(RAMP[low], RAMP[low + 1], strict=True)
        return "#{:02x}{:02x}{:02x}".format(*(round(a + (b - a) * (at - low)) for a, b in ends))

    def _numbers(self, axis: _Axis) -> None:
        """Draw numbers of rows, or of runs of narrow rows, where they have room."""
        free = 0.0
        for low, high, x in axis.extents:
            each = axis.size >= 30
            for row in range(low, high + 1) if each else (low,):
                text = str(row) if each else to_text(low, high).replace("..", "–")
                left = axis.at(row) if each else x
                width = axis.size if each else (high - low + 1) * axis.size
                half = len(text) * 3.6 + 3
                middle = min(max(left + width / 2, MARGIN + half), WIDTH - MARGIN - half)
                if middle - half >= free:
                    free = middle + half
                    self._text(middle, 0, text, "soft", "middle")

    def _text(self, x: float, y: float, text: str, style: str, anchor: str = "") -> None:
        anchored = f' text-anchor="{anchor}"' if anchor else ""
        self.lines.append(
            f'<text class="{style}" x="{_n(x)}" y="{_n(self.y + y)}"{anchored}>'
            f"{_clean(text)}</text>"
        )


def _axes(side: Side, other: Side) -> Iterator[tuple[str, bool]]:
    """Yield each axis of a side as text, and True if the other side differs in it."""
    if side.layout is None:
        yield from ((f"{length}", False) for length in side.shape)
        return
    own, theirs = _lengths(side), _lengths(other)
    shared = [[name for name in names if name in own and name in theirs] for names in (own, theirs)]
    for (name, length), axis in zip(own.items(), side.layout.axes, strict=True):
        is_alike = not theirs or (
            name in theirs
            and shared[0].index(name) == shared[1].index(name)
            and (name == "row" or length == theirs[name])
        )
        yield f"{axis} {length}", not is_alike


def _lengths(side: Side) -> dict[str, int]:
    """Return the lengths of the axes by name, outermost first; blocks and slots are rows."""
    if side.layout is None:
        return {}
    names = ["row" if name in ("block", "slot") else name for name in side.layout.axes]
    return dict(zip(names, side.shape, strict=True))


def _side_by_side(places: list[Place]) -> list[Place]:
    """Split a place that several bands share into one place for each of them."""
    counts, seen = Counter(places), Counter[Place]()
    found = []
    for place in places:
        (low, high), number = place, seen[place]
        step = (high - low) / counts[place]
        found.append((low + number * step, low + (number + 1) * step))
        seen[place] += 1
    return found


def _at_least(place: Place, width: float) -> Place:
    more = max(width - place[1] + place[0], 0) / 2
    return place[0] - more, place[1] + more


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _clean(text: str) -> str:
    """Escape text, and replace characters that XML does not allow."""
    return escape("".join(char if char.isprintable() else "�" for char in text))
