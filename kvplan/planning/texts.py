"""Numbers, byte counts, rows and stretches as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from textwrap import wrap
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike

Span = tuple[int, int]
"""First and last of a stretch of numbers."""

Format = Literal["tree", "table"]
"""The formats of `explain`."""

DEFAULT_LIMIT: Final = 16
"""Shown rows of a list; a longer list shows its first and last rows around a summary."""

WIDTH: Final = 118
"""Columns of a line, without the indentation of a part."""

MIN_SUMMARY: Final = 8
"""Minimum limit for showing the last rows and a summary of a longer list."""


def nbytes_text(nbytes: int) -> str:
    """Return `512 B`, `256 KiB` or `1.5 MiB`: no decimal for whole KiB, otherwise one."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value, unit = nbytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB", "PiB", "EiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "KiB" and value == int(value) else f"{value:.1f} {unit}"


def span(rows: tuple[int, int]) -> str:
    """Return `4-5` for rows 4 to 5, `9` for row 9."""
    first, last = rows
    return str(first) if first == last else f"{first}-{last}"


def place(rows: tuple[int, int], offset: int, stride: int) -> str:
    """Return `9`, or `9+0x40` for bytes that begin 64 bytes into row 9."""
    inside = offset % stride
    return span(rows) + (f"+{inside:#x}" if inside else "")


_FIELD: Final = re.compile(r"\b(src|dst)\.(blocks|slot|first_token|offset)\b|\bnbytes(?==)")


def rename(error: Exception, names: Mapping[str, str]) -> None:
    """Replace the names of fields in an error's message by those that the caller has used.

    Args:
        error: an error of a transfer; its message names fields of `Rows`, such as "src.blocks".
        names: other names of fields, or of a side ("src").
    """

    def named(field: re.Match[str]) -> str:
        side, inner = field[1], field[2]
        return names.get(field[0]) or (f"{names[side]}.{inner}" if side in names else field[0])

    if error.args and isinstance(error.args[0], str):
        error.args = (_FIELD.sub(named, error.args[0]), *error.args[1:])


def plural(count: int, word: str) -> str:
    """Return a number with its noun: `1 block`, `3 blocks`, `3 launches`, `3 copies`."""
    if count != 1:
        word = (
            f"{word[:-1]}ies"
            if word.endswith("py")
            else word + ("es" if word[-2:] == "ch" else "s")
        )
    return f"{count:,} {word}"


def shown_rows(total: int, limit: int | None) -> tuple[int, int]:
    """Return how many rows of a list are shown at its beginning and at its end.

    A list that is cut shows fewer than `limit`, to leave room for its summary.
    """
    if limit is None or total <= limit:
        return total, 0
    return (limit, 0) if limit < MIN_SUMMARY else (limit // 2, limit // 4)


def fit(text: str, width: int = WIDTH, indent: str = "    ") -> list[str]:
    """Return `text` in lines of at most `width` columns; all but the first are indented."""
    if len(text) <= width:
        return [text]
    lead = text[: len(text) - len(text.lstrip())]
    return wrap(
        text, width, subsequent_indent=lead + indent, break_on_hyphens=False, drop_whitespace=True
    )


def spans_of(numbers: ArrayLike) -> list[Span]:
    """Return first and last of each stretch of consecutive numbers."""
    found = np.asarray(numbers, np.int64)
    if not len(found):
        return []
    # A stretch ends if the next number does not follow.
    ends = np.flatnonzero(np.diff(found) != 1)
    first = found[np.concatenate(([0], ends + 1))].tolist()
    last = found[np.concatenate((ends, [len(found) - 1]))].tolist()
    return [*zip(first, last, strict=True)]


def to_text(first: int, last: int) -> str:
    """Return `5`, or `5..9`."""
    return f"{first}" if first == last else f"{first}..{last}"


def spans_text(word: str, spans: list[Span]) -> str:
    """Return `token 5`, `tokens 32..47`, or `tokens 16..31, 0..15` for several stretches."""
    if not spans:
        return ""
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return f"{word} {spans[0][0]}"
    shown = ", ".join(to_text(*ends) for ends in spans[:3])
    return f"{word}s {shown}{', ...' if len(spans) > 3 else ''}"
