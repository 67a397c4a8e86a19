"""Colours of the texts that `explain` and `diff` give: by what a line begins with, no more."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvplan.cli.common import console
from kvplan.validation import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

_STYLES: Final = tuple(
    (re.compile(pattern), style)
    for pattern, style in (
        (r"\s*(verdict: )?(group \S+: )?identical\b", "green"),
        (r"\s*verdict: equivalent", "green"),
        (r"\s*verdict: ", "bold red"),
        (r"\s*group .*: different", "red"),
        (r"\s*[-]  ", "red"),
        (r"\s*[+]  ", "green"),
        (r".*\b(transposing|REINTERPRETED)\b", "yellow"),
        (r"\s*over ", "cyan"),
        (r"\s*(group|plan) ", "bold"),
        (r"[a-z_]+  .*plan [0-9a-f]{6}$", "bold"),
        (r"\s*#  ", "bold"),
    )
)
"""The first that fits counts."""


def write_lines(lines: Iterable[str]) -> None:
    """Print each line when it comes, with colours on a terminal.

    Names in plans are whatever a file says.
    """
    out, lines = console(), map(printable, lines)
    if not out.is_terminal or out.no_color:
        out.file.writelines(f"{line}\n" for line in lines)
        return
    for line in lines:
        style = next((style for pattern, style in _STYLES if pattern.match(line)), "")
        out.print(line, style=style, overflow="ignore", crop=False, no_wrap=True)
