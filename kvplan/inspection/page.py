"""The picture of a plan as one self-contained HTML document, and as a notebook's cell.

The document has the SVG, a slider for the layers, and the title of the band under the pointer.
"""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Final

from kvplan.inspection.svg import layer_texts, picture
from kvplan.planning.plan import Plan
from kvplan.validation import check_type

CELL_HEIGHT: Final = 620
"""Pixels of a notebook's cell; the document scrolls inside the cell."""

_HINT: Final = "Point at a band to read what it moves, or press Tab and then the arrow keys."


def to_html(
    plan: Plan,
    path: str | os.PathLike[str] | None = None,
    *,
    other: Plan | None = None,
    difference: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Return the document of a plan, or of the change from `plan` to `other`; write it to `path`.

    `difference` is the text of `plan.diff(other)`.
    """
    for note in notes:
        check_type("notes[]", note, str)
    lines = [f"<p>{escape(note)}</p>" for note in notes]
    if other is None:
        lines += _sections(plan)
        title = repr(plan)
    else:
        title = f"Difference of {other!r}"
        verdict = " ".join(difference[difference.rindex("verdict: ") :].split())
        lines = [f"<h1>{escape(verdict)}</h1>", *lines, f"<pre>{escape(difference)}</pre>"]
        lines += ["<h2>Old plan</h2>", *_sections(plan), "<h2>New plan</h2>", *_sections(other)]
    frame, script = _files()
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    document = frame.format(
        hash=f"sha256-{digest}", title=escape(title), body="\n".join(lines), script=script
    )
    # A name that was read from a file may contain half a surrogate pair.
    document = document.encode(errors="replace").decode()
    if path is not None:
        Path(path).write_text(document, encoding="utf-8")
    return document


def cell(plan: Plan) -> str:
    """Return the document as a frame that shares nothing with the page around it."""
    return (
        f'<iframe title="{escape(repr(plan))}" sandbox="allow-scripts" loading="lazy" '
        f'style="width:100%;height:{CELL_HEIGHT}px;border:0" '
        f'srcdoc="{escape(to_html(plan))}"></iframe>'
    )


def _sections(plan: Plan) -> Iterator[str]:
    """Yield the picture of each part of a plan, with its controls."""
    for part in plan.parts:
        layers = layer_texts(part)
        slider = (
            f'<input type="range" min="0" max="{len(layers) - 1}" value="0" aria-label="Layer" '
            f'data-layers="{escape(json.dumps(layers, ensure_ascii=False))}">'
        )
        yield (
            f'<section>\n<div class="bar">{slider if len(layers) > 1 else ""}'
            f"<output>{escape(layers[0] if layers else '')}</output></div>\n"
            f'<div class="picture">{picture(plan, [part])}</div>\n'
            f'<p class="detail" role="status">{_HINT}</p>\n</section>'
        )


@cache
def _files() -> list[str]:
    """Return the frame and its script, which are files beside this one."""
    here = Path(__file__)
    return [here.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".html", ".js")]
