"""How numbers are written for people."""

from __future__ import annotations


def nbytes_text(nbytes: int) -> str:
    """`512 B`, `256 KiB`, `1.5 MiB`: whole KiB where they are whole, else one decimal."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value, unit = nbytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB", "PiB", "EiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "KiB" and value == int(value) else f"{value:.1f} {unit}"


def span(rows: tuple[int, int]) -> str:
    """`4-5` for rows 4 to 5, `9` for row 9 alone."""
    first, last = rows
    return str(first) if first == last else f"{first}-{last}"


def place(rows: tuple[int, int], offset: int, stride: int) -> str:
    """`9`, or `9+0x40` for bytes that begin 64 into row 9: the rows of a segment."""
    inside = offset % stride
    return span(rows) + (f"+{inside:#x}" if inside else "")


def plural(count: int, word: str) -> str:
    """`1 block`, `3 blocks`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
