"""The generator of docs/reference/llm_datadist-differences.md: rows that differ, and defects."""

from __future__ import annotations

from pathlib import Path

from tests.llm_datadist.validation.defects import DEFECTS
from tests.llm_datadist.validation.others import OTHERS
from tests.llm_datadist.validation.table import ROWS

PAGE = Path(__file__).parents[3] / "docs/reference/llm_datadist-differences.md"

HEAD = """\
# Where kvplan.llm_datadist differs from the official package

This page is for users of the official `llm_datadist` who want to know what changes under kvplan.

Each case on this page is a test: `tests/llm_datadist/validation/` has every case that was measured
with the official library (`hicann/hixl` at 9ed283b). The tests compare the outcome, not the text:
the type of an exception, the status of an LLMException, and the value if one was recorded. This
page is generated: run `python -m tests.llm_datadist.validation` to write it again.

Of {measured} cases, {same} have the official outcome and {different} differ.

## Cases that differ

| case | official | kvplan | why |
| --- | --- | --- | --- |
{rows}

## Defects of the official engine that are not copied

| | official | kvplan |
| --- | --- | --- |
{defects}

## Differences that no measured case shows

| official | kvplan |
| --- | --- |
{others}

[differences.md](differences.md) lists how the engine itself differs: links, options, ownership.
"""


def render() -> str:
    different = [row for row in ROWS if row.ours is not None]
    return HEAD.format(
        measured=len(ROWS),
        same=len(ROWS) - len(different),
        different=len(different),
        rows="\n".join(
            f"| `{row.case}` | {row.official} | {row.expected} | {row.why} |" for row in different
        ),
        defects="\n".join(
            f"| {number} | {defect.official} | {defect.here} |"
            for number, defect in enumerate(DEFECTS, start=1)
        ),
        others="\n".join(f"| {other.official} | {other.here} |" for other in OTHERS),
    )


def write() -> None:
    PAGE.write_text(render())
