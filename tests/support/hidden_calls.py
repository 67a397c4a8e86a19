"""Copies of libraries that lack some of their calls, as those of other versions do."""

from __future__ import annotations

from pathlib import Path

__all__ = ["hide_calls"]


def hide_calls(source: Path, target: Path, *names: str) -> None:
    """Copy the libraries of a folder to another one, where no name of `names` is found in them."""
    target.mkdir(parents=True)
    for file in source.glob("*.so*"):
        content = file.read_bytes()
        for name in map(str.encode, names):
            content = content.replace(b"\0" + name + b"\0", b"\0" + name[:-1] + b"?\0")
        (target / file.name).write_bytes(content)
