"""Numbers, byte counts, rows, stretches and origins of descriptors as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from textwrap import wrap
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

Span = tuple[int, int]
"""First and last of a stretch of numbers."""

Format = Literal["tree", "table"]
"""The formats of `explain`."""

DEFAULT_LIMIT: Final = 16
"""Rows shown of a list; a longer list shows its first and last rows around a summary."""

WIDTH: Final = 118
"""Columns of a line, without the indentation of a part."""

MIN_SUMMARY: Final = 8
"""Minimum limit with which a longer list shows its last rows and a summary."""


def nbytes_text(nbytes: int) -> str:
    """Return `512 B`, `256 KiB` or `1.5 MiB`: no decimal for B and whole KiB, otherwise one."""
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
    """Replace the names of fields in an error's message with the caller's names.

    Args:
        error: an error of a transfer; its message names fields, such as "src.blocks" or "nbytes".
        names: the caller's names by field, or by side ("src").
    """

    def named(field: re.Match[str]) -> str:
        side, inner = field[1], field[2]
        return names.get(field[0]) or (f"{names[side]}.{inner}" if side in names else field[0])

    if error.args and isinstance(error.args[0], str):
        error.args = (_FIELD.sub(named, error.args[0]), *error.args[1:])


def plural(count: int, word: str) -> str:
    """Return a number with its noun: `1 block`, `3 blocks`, `3 copies`."""
    if count != 1:
        word = f"{word[:-1]}ies" if word.endswith("py") else f"{word}s"
    return f"{count:,} {word}"


def shown_rows(total: int, limit: int | None) -> tuple[int, int]:
    """Return how many rows of a list are shown at its beginning and at its end.

    A list with a summary shows fewer than `limit`, to leave room for it.
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


class Origin(NamedTuple):
    """The origin of a descriptor: layers, tensors, and first and last row on each side.

    Attributes:
        src_layer, dst_layer: the layer, or the first of `num_layers`, counted from the cache's
            first.
        src_tensor, dst_tensor: the tensor, counted from 0.
        src_rows, dst_rows: first and last block or slot.
        src_row, dst_row: the word for these: "block" or "slot".
        kv: "K", "V" or "K+V"; empty: unknown.
        heads: first and last KV head of the model; None if the layout has no such axis.
        tokens: tokens of the request, each stretch as (first, last); empty if they are unknown.
        num_layers: number of layers; above 1 if a tensor that is moved whole holds several.
        model_layer: the model's number of the first layer; None if no shard names layers.
        part: the label of the part; empty without one.
    """

    src_layer: int
    dst_layer: int
    src_tensor: int
    dst_tensor: int
    src_rows: tuple[int, int]
    dst_rows: tuple[int, int]
    src_row: str
    dst_row: str
    kv: str = ""
    heads: tuple[int, int] | None = None
    tokens: tuple[tuple[int, int], ...] = ()
    num_layers: int = 1
    model_layer: int | None = None
    part: str = ""

    def __str__(self) -> str:
        more = self.num_layers - 1
        src, dst = (to_text(first, first + more) for first in (self.src_layer, self.dst_layer))
        layers = f"layer{'s' if more else ''} {src}>{dst}"
        number = self.model_layer
        if number is not None and not self.src_layer == self.dst_layer == number:
            layers += f" ({to_text(number, number + more)} of the model)"
        src, dst = (span(rows) for rows in (self.src_rows, self.dst_rows))
        words = self.src_row if self.src_row == self.dst_row else f"{self.src_row}>{self.dst_row}"
        held = [
            self.kv,
            spans_text("head", [self.heads] if self.heads else []),
            spans_text("token", [*self.tokens]),
        ]
        return " ".join(
            [
                *([f"{self.part}:"] if self.part else []),
                f"{layers} tensor {self.src_tensor}>{self.dst_tensor} {words} {src}>{dst}",
                *filter(None, held),
            ]
        )
