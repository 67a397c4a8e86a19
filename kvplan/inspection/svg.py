"""A picture of a plan as SVG, for documents: no script, readable on white and on black."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvplan.inspection.contents import to_text
from kvplan.inspection.picture import Picture, PictureSide, pictures, tint

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from kvplan.planning.plan import Plan

WIDTH: Final = 960
MARGIN: Final = 24
TRACK: Final = 28
SPAN: Final = 150
ROW: Final = 88
"""Pixels of a block, where there is room, and of what is between the tracks."""

MOST: Final = 512
"""Bands that are drawn as wide as they are; more are lines."""

MOST_NOTES: Final = 4

# Every colour is of the picture's own ground, which a viewer's theme chooses, not the page's.
_STYLE: Final = """
.ground{fill:#fff;stroke:#d9d9d3}.bed{fill:#eeeeea;stroke:#dcdcd6}
.ink{fill:#1b1d20}.soft{fill:#5f636b}.odd{fill:#8a5300}
.tick{stroke:#fff;stroke-opacity:.75;fill:none}.line{fill:none;stroke-opacity:.3}
.ribbon{fill-opacity:.4;stroke-opacity:.8;stroke-width:.8}
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
.head{font-size:16px;font-weight:600}.bold{font-weight:600}
.end{fill:#fff;font-weight:600;font-size:11px;paint-order:stroke;stroke-width:4px}
@media (prefers-color-scheme:dark){
.ground{fill:#191c1f;stroke:#2d3136}.bed{fill:#262a2e;stroke:#33383d}
.ink{fill:#eceef0}.soft{fill:#a3a9b0}.odd{fill:#f0bb62}
.tick{stroke:#191c1f}.ribbon{fill-opacity:.55}}
"""


def to_svg(plan: Plan, path: str | os.PathLike[str] | None = None) -> str:
    """Return a plan, or the groups of one below one another, as SVG; write it to `path`."""
    lines: list[str] = []
    y: float = MARGIN
    title = f"{plan.operation} · {plan.kind} · plan {plan.fingerprint[:6]}"
    for picture in pictures(plan):
        drawing = _Drawing(picture, y)
        drawing.draw(title if not picture.name else f"{title} · group {picture.name}")
        lines += drawing.lines
        y = drawing.y + MARGIN
    height = round(y)
    text = "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" aria-label="{_clean(repr(plan))}">',
            f"<title>{_clean(repr(plan))}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" '
            'rx="10"/>',
            *lines,
            "</svg>\n",
        ]
    )
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


class _Axis:
    """Where the rows of a side are: those that are used, in order, with gaps between."""

    def __init__(self, spans: Sequence[tuple[int, int]], parts: int) -> None:
        extents: list[list[int]] = []
        for low, high in sorted(spans):
            if extents and low <= extents[-1][1] + 1:
                extents[-1][1] = max(extents[-1][1], high)
            else:
                extents.append([low, high])
        gaps = len(extents) - 1
        rows = sum(high - low + 1 for low, high in extents)
        used = min(WIDTH - 2 * MARGIN, max(rows * ROW + gaps * 16, 300))
        self.gap = min(16.0, 0.35 * used / gaps) if gaps else 0.0
        self.size = (used - self.gap * gaps) / max(rows, 1)
        self.parts = parts
        self.extents: list[tuple[int, int, float]] = []
        x = (WIDTH - used) / 2
        for low, high in extents:
            self.extents.append((low, high, x))
            x += (high - low + 1) * self.size + self.gap
        self._lows = [low for low, _, _ in self.extents]

    def at(self, row: int, part: int = 0) -> float:
        """The left edge of a row, or of a part of it."""
        low, _, x = self.extents[bisect_right(self._lows, row) - 1]
        return x + (row - low + part / self.parts) * self.size


Place = tuple[float, float]


class _Drawing:
    """One picture, from `y` on down."""

    def __init__(self, picture: Picture, y: float) -> None:
        self.picture, self.y = picture, y
        self.lines: list[str] = []
        bands = picture.drawn.bands
        self.count = len(bands.state)
        self.order = bands.entry_first if picture.order == "entry" else bands.token_first
        self.places = []
        self.axes: list[_Axis] = []
        for name, parts in zip(("src", "dst"), picture.drawn.parts, strict=True):
            first, last, begin, end = (
                getattr(bands, f"{name}_{it}").tolist() for it in ("first", "last", "from", "to")
            )
            if picture.drawn.at is not None:
                first = last = picture.drawn.at[len(self.axes)].tolist()
            axis = _Axis([*zip(first, last, strict=True)], parts)
            self.axes.append(axis)
            self.places.append(
                _side_by_side(
                    [
                        (axis.at(a, c), axis.at(b, d))
                        for a, b, c, d in zip(first, last, begin, end, strict=True)
                    ]
                )
            )

    def draw(self, title: str) -> None:
        """Everything, of which `lines` and `y` are kept."""
        picture = self.picture
        self._text(MARGIN, 6, title, "soft")
        self._text(MARGIN, 28, picture.summary, "ink head")
        self.y += 42
        for side in picture.sides:
            self._side(side)
        self.y += 12
        self._tracks()
        place = {"entry": "entry of the block table", "token": "tokens of the request"}
        self._text(
            MARGIN, 6, f"colour and number in a box: {place.get(picture.order, 'order')}", "soft"
        )
        layers = len(picture.layers)
        alike = f", the same in all {layers}" if layers > 1 else ""
        self._text(WIDTH - MARGIN, 6, f"{picture.layers[0][0]}{alike}", "soft", "end")
        self.y += 10
        for note in _shortened(picture.notes):
            self.y += 18
            self._text(MARGIN, 6, note, "odd")
        self.y += 12

    def _side(self, side: PictureSide) -> None:
        version = side.versions[-1]
        axes = ", ".join(f"{name} {length}".strip() for name, length, _ in version.axes)
        name = f" {side.name}" if side.name else ""
        said = " · ".join([f"{version.data_type} ({axes})", *version.facts])
        text = f'<tspan class="bold">{side.title}</tspan> {_clean(f"{side.owner}{name}: {said}")}'
        self.lines.append(f'<text class="soft" x="{MARGIN}" y="{_n(self.y + 8)}">{text}</text>')
        self.y += 18

    def _tracks(self) -> None:
        src, dst = self.picture.sides
        self.y += 16
        self._text(MARGIN, 0, f"Source {src.row}s", "ink bold")
        self.y += 20
        self._numbers(0, 0)
        top = self.y + 8
        bottom = top + TRACK + SPAN
        for axis, y in zip(self.axes, (top, bottom), strict=True):
            self._bed(axis, y)
        if self.count <= MOST:
            self._ribbons(top, bottom)
        else:
            self._many_lines(top, bottom)
        self.y = bottom + TRACK + 16
        self._numbers(1, 0)
        self.y += 18
        self._text(MARGIN, 0, f"Destination {dst.row}s", "ink bold")
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
        for index in range(self.count):
            (a, b), (c, d) = (_at_least(it[index], 2) for it in self.places)
            paint = self._paint(index)
            self.lines.append(
                f'<path class="ribbon" fill="{paint}" stroke="{paint}" d="M{_n(a)} {_n(edge)}'
                f"C{_n(a)} {_n(middle)} {_n(c)} {_n(middle)} {_n(c)} {_n(bottom)}H{_n(d)}"
                f'C{_n(d)} {_n(middle)} {_n(b)} {_n(middle)} {_n(b)} {_n(edge)}Z"/>'
                f'<path fill="{paint}" d="M{_n(a)} {_n(top)}H{_n(b)}V{_n(edge)}H{_n(a)}Z'
                f'M{_n(c)} {_n(bottom)}H{_n(d)}V{_n(bottom + TRACK)}H{_n(c)}Z"/>'
            )
            label = self._label(index)
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
        """A line for each band, and those of neighbours in the request in one path."""
        size = -(-self.count // 160)
        edge, middle = top + TRACK, (top + TRACK + bottom) / 2
        for start in range(0, self.count, size):
            path, boxes = [], []
            for index in range(start, min(start + size, self.count)):
                (a, b), (c, d) = (it[index] for it in self.places)
                x, to = _n((a + b) / 2), _n((c + d) / 2)
                path.append(f"M{x} {_n(edge)}C{x} {_n(middle)} {to} {_n(middle)} {to} {_n(bottom)}")
                boxes.append(f"M{x} {_n(top)}v{TRACK}M{to} {_n(bottom)}v{TRACK}")
            paint = self._paint(min(start + size // 2, self.count - 1))
            width = max(0.5, min(axis.size for axis in self.axes))
            self.lines.append(
                f'<path class="line" stroke="{paint}" stroke-width="0.6" d="{"".join(path)}"/>'
                f'<path stroke="{paint}" stroke-width="{_n(width)}" d="{"".join(boxes)}"/>'
            )

    def _paint(self, index: int) -> str:
        at = int(self.order[index]) if self.picture.order else index
        return "#{:02x}{:02x}{:02x}".format(*tint(at / max(self._last(), 1)))

    def _last(self) -> int:
        return int(self.order.max()) if self.picture.order == "token" else self.picture.length - 1

    def _label(self, index: int) -> str:
        picture = self.picture
        if not picture.order:
            return str(index) if self.count > 1 else ""
        texts = picture.drawn.entries if picture.order == "entry" else picture.drawn.tokens
        last = getattr(picture.drawn.bands, f"{picture.order}_last")
        said = to_text(int(self.order[index]), int(last[index])).replace("..", "–")
        return texts.get(index, said)

    def _numbers(self, which: int, below: float) -> None:
        """Numbers of rows, or of runs of rows where they are narrow, as far as they have room."""
        axis, free = self.axes[which], 0.0
        for low, high, x in axis.extents:
            each = axis.size >= 30
            for row in range(low, high + 1) if each else (low,):
                text = str(row) if each else to_text(low, high).replace("..", "–")
                end = axis.at(row) if each else x
                width = axis.size if each else (high - low + 1) * axis.size
                half = len(text) * 3.6 + 3
                middle = min(max(end + width / 2, MARGIN + half), WIDTH - MARGIN - half)
                if middle - half >= free:
                    free = middle + half
                    self._text(middle, below, text, "soft", "middle")

    def _text(self, x: float, y: float, text: str, style: str, anchor: str = "") -> None:
        anchored = f' text-anchor="{anchor}"' if anchor else ""
        self.lines.append(
            f'<text class="{style}" x="{_n(x)}" y="{_n(self.y + y)}"{anchored}>'
            f"{_clean(text)}</text>"
        )


def _side_by_side(places: list[Place]) -> list[Place]:
    """Bands from, or to, the very same place stand side by side in it."""
    counts = Counter(places)
    seen: Counter[Place] = Counter()
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


def _shortened(notes: Sequence[str]) -> Iterator[str]:
    """The first notes, each on a line: SVG does not break them."""
    for note in notes[:MOST_NOTES]:
        yield note if len(note) <= 140 else f"{note[:139].rstrip()}…"
    if (hidden := len(notes) - MOST_NOTES) > 0:
        yield f"… and {hidden} more"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _clean(text: str) -> str:
    """Escaped, and without what XML does not allow."""
    return escape("".join(it if it.isprintable() else "�" for it in text))
