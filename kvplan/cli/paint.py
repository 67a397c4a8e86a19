"""Colours of the texts that `explain` and `diff` give: by what a line begins with, no more."""

from __future__ import annotations

import re
from typing import Final

from kvplan.cli.common import console

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


def write_text(text: str) -> None:
    """Print `text`, with colours on a terminal."""
    out = console()
    if not out.is_terminal or out.no_color:
        out.file.write(text + "\n")
        return
    for line in text.splitlines():
        style = next((style for pattern, style in _STYLES if pattern.match(line)), "")
        out.print(line, style=style, overflow="ignore", crop=False, no_wrap=True)
