"""Write the tables of options into the documentation: `make options`.

    python tools/option_tables.py [--check]

A page has a table between `<!-- options: NAME -->` and `<!-- end of options -->`; NAME is a key of
TABLES. --check writes nothing, and exits with 1 if a page is out of date.
"""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Iterator
from pathlib import Path

from kvplan.engine.option_kinds import Row, rows_of
from kvplan.engine.option_rows import ROWS, WITHOUT_MEANING
from kvplan.hixl.options import OwnOptions
from kvplan.serving import ExchangeOptions
from kvplan.vllm.options import ConnectorOptions

ROOT = Path(__file__).resolve().parents[1]
TABLES = {
    "engine": ROWS,
    "hixl": rows_of(OwnOptions),
    "exchange": rows_of(ExchangeOptions),
    "vllm": rows_of(ConnectorOptions),
}
PAGES = {
    ROOT / "docs" / page: names
    for page, names in {
        "reference/options.md": ["engine", "without-meaning", "hixl"],
        "how-to/serving.md": ["exchange"],
        "how-to/vllm.md": ["vllm"],
    }.items()
}


def table(name: str, page: Path) -> Iterator[str]:
    """Yield the lines of a table in Markdown, without the column of fields if they are the keys."""
    if name == "without-meaning":
        yield f"{', '.join(f'`{key}`' for key in sorted(WITHOUT_MEANING))}, `ge.*`"
        return
    rows = TABLES[name]
    has_fields = any(row.keys != (row.field,) for row in rows)
    field = " field of `Options` |" if name == "engine" else " field |"
    yield f"| key |{field if has_fields else ''} default | values | meaning |"
    yield f"| --- |{' --- |' if has_fields else ''} --- | --- | --- |"
    for row in rows:
        keys = ", ".join(f"`{key}`" for key in row.keys)
        cells = [keys, *([f"`{row.field}`"] if has_fields else []), default_of(row)]
        cells += [f"{row.kind.values} {row.unit}".strip(), meaning_of(row, page)]
        yield f"| {' | '.join(cells)} |"


def default_of(row: Row) -> str:
    if isinstance(row.default, bool):
        return str(int(row.default)) if row.kind.values == "0, 1" else str(row.default).lower()
    if row.default is None:
        return "none"
    if row.default == "":
        return "empty"
    return f"`{row.default}`" if isinstance(row.default, str) else str(row.default)


def meaning_of(row: Row, page: Path) -> str:
    over = f"Only over {' and '.join(f'`{name}`' for name in row.over)}. " if row.over else ""
    if not row.see:
        return over + row.text
    path, hash_, anchor = row.see.partition("#")
    target = posixpath.relpath(posixpath.join("reference", path), page.parent.name)
    return f"{over}{row.text} ([more]({target}{hash_}{anchor}))"


def written(page: Path, text: str) -> str:
    """Return the text of a page with regenerated tables."""
    for name in PAGES[page]:
        begin, end = f"<!-- options: {name} -->\n", "<!-- end of options -->"
        lines = "\n".join(table(name, page))
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(f"\n{end}")
        text = f"{head}{begin}\n{lines}\n{closed}{tail}"
        if not found or not closed:
            raise SystemExit(f"{page} has no table between {begin!r} and {end!r}")
    return text


def main() -> int:
    wrong = []
    for page in PAGES:
        text = page.read_text()
        if (right := written(page, text)) != text:
            wrong.append(page)
            if "--check" not in sys.argv[1:]:
                page.write_text(right)
    for page in wrong:
        print(f"{page.relative_to(ROOT)}: {'differs' if '--check' in sys.argv[1:] else 'written'}")
    return int(bool(wrong) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
