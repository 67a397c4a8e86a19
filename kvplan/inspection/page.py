"""A picture of a plan as one HTML document that asks for nothing else, and as a notebook's cell."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvplan.inspection.bands import Bands
from kvplan.inspection.picture import RAMP, Picture, headline, pictures
from kvplan.inspection.units import nbytes_text, plural
from kvplan.validation import check_type

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from kvplan.planning.plan import Plan

CELL_HEIGHT: Final = 740
"""Pixels of a notebook's cell; the document scrolls inside of it."""


def to_html(
    plan: Plan,
    path: str | os.PathLike[str] | None = None,
    *,
    other: Plan | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Return the document of a plan, or of what changes from it to `other`; write it to `path`."""
    for note in notes:
        check_type("notes[]", note, str)
    made = pictures(plan, other)
    document = _document(plan, made, other, notes)
    if path is not None:
        # A name that was read may have half a surrogate pair.
        Path(path).write_text(document, encoding="utf-8", errors="replace")
    return document


def cell(plan: Plan) -> str:
    """Return the document as a frame, in which it shares nothing with the page around it."""
    return (
        f'<iframe title="{escape(repr(plan))}" sandbox="allow-scripts" loading="lazy" '
        f'style="width:100%;height:{CELL_HEIGHT}px;border:0" '
        f'srcdoc="{escape(to_html(plan))}"></iframe>'
    )


def _document(plan: Plan, made: Sequence[Picture], other: Plan | None, notes: Sequence[str]) -> str:
    frame, css, script = _files()
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    shown = plan if other is None else other
    prints = plan.fingerprint[:6] + ("" if other is None else f" → {other.fingerprint[:6]}")
    one = made[0] if len(made) == 1 else None
    heading = one.summary if one else _summary(shown, len(made))
    named = f"group {one.name} · " if one and one.name else ""
    verdict = ""
    if other is not None:
        said = headline(made)
        verdict = f'<p class="verdict {said.split()[0]}" id="verdict">{escape(said)}</p>\n'
    data = {
        "compared": other is not None,
        "ramp": RAMP,
        "pictures": [_values(it, notes) for it in made],
    }
    # Nothing that a name may contain ends the element, or begins a comment.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return frame.format(
        hash=f"sha256-{digest}",
        title=escape(f"{'Difference of ' if other is not None else ''}{shown!r}"),
        css=css,
        eyebrow=escape(f"{named}{shown.operation} · {shown.kind} · plan {prints}"),
        heading=escape(heading),
        verdict=verdict,
        data=text,
        script=script,
    )


def _summary(plan: Plan, groups: int) -> str:
    return (
        f"{plural(groups, 'group')} in one transfer: {nbytes_text(plan.nbytes)} in "
        f"{plural(plan.num_descriptors, 'descriptor')}."
    )


@cache
def _files() -> list[str]:
    """The document, its style sheet and its script, which stand beside this file."""
    here = Path(__file__)
    suffixes = (".html", ".css", ".js")
    return [here.with_suffix(it).read_text(encoding="utf-8") for it in suffixes]


def _values(picture: Picture, notes: Sequence[str]) -> dict[str, Any]:
    """A picture as plain JSON values."""
    drawn = picture.drawn
    columns = {name: it.tolist() for name, it in drawn.bands._asdict().items() if name in _COLUMNS}
    columns["amount"] = picture.amount_of
    if drawn.at is not None:
        columns["src_at"], columns["dst_at"] = (it.tolist() for it in drawn.at)
    return {
        "name": picture.name,
        "summary": picture.summary,
        "verdict": picture.verdict,
        "sides": [{**it._asdict(), "versions": it.versions} for it in picture.sides],
        "layers": picture.layers,
        "alike": picture.alike,
        "notes": [*picture.notes, *notes],
        "sizes": [
            [it.label, it.counts, [round(share, 4) for share in it.shares]] for it in picture.sizes
        ],
        "count": len(drawn.bands.state),
        "joined": drawn.joined,
        "parts": drawn.parts,
        "entries": picture.entries,
        "order": picture.order,
        "length": picture.length,
        "entry_texts": drawn.entries,
        "token_texts": drawn.tokens,
        "amounts": picture.amounts,
        "columns": _packed(columns),
    }


_COLUMNS: Final = {*Bands._fields} - {"least", "most", "nbytes", "runs", "segments"}
"""Those that are drawn or said; of the amounts there is the text."""


def _packed(columns: dict[str, list[int]]) -> dict[str, list[int] | int | str]:
    """Columns of one number as that number, those that are equal to another as its name."""
    packed: dict[str, list[int] | int | str] = {}
    for name, column in columns.items():
        if not any(it != column[0] for it in column):
            packed[name] = column[0] if column else 0
            continue
        like = next((it for it, other in packed.items() if other == column), None)
        packed[name] = column if like is None else like
    return packed
