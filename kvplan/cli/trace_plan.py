"""The plan of a recorded transfer: explained, saved, and compared with a block table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import numpy as np

from kvplan.inspection.diff import changed_table
from kvplan.planning.part import label_of
from kvplan.planning.schema import save
from kvplan.planning.texts import fit
from kvplan.recording.records import TransferRecord
from kvplan.status import invalid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvplan.recording.records import Recording

_MAX_ENTRIES: Final = 1 << 20  # of an expected table


class Expected(NamedTuple):
    """An expected block table: `dst:7,8,2`, or `src:4..5,9`."""

    side: str
    blocks: tuple[int, ...]

    @classmethod
    def read(
        cls, _context: click.Context, _parameter: click.Parameter, text: str | None
    ) -> Expected | None:
        """Parse the value of `--expect`."""
        if text is None:
            return None
        side, _, table = text.partition(":")
        spans = re.findall(r"(\d{1,18})(?:\.\.(\d{1,18}))?(?:,|$)", table)
        ranges = [range(int(first), int(last or first) + 1) for first, last in spans]
        whole = ",".join(f"{first}..{last}" if last else first for first, last in spans)
        if side not in ("src", "dst") or not spans or whole != table or not all(ranges):
            raise click.BadParameter(f"{text} must be SIDE:TABLE, such as dst:7,8,2 or src:4..5,9")
        if sum(map(len, ranges)) > _MAX_ENTRIES:
            raise click.BadParameter(f"{text}: a table may have at most {_MAX_ENTRIES:,} entries")
        return cls(side, tuple(block for blocks in ranges for block in blocks))

    def difference(self, transfer: TransferRecord) -> str:
        """Return how the recorded table differs, in words; empty if it does not."""
        tables = block_tables(transfer)
        if len(tables) != 1:
            raise invalid(
                f"transfer {transfer.number} has {len(tables)} pairs of block tables; --expect "
                "needs a transfer of one cache"
            )
        found = np.array(tables[0][self.side], np.int64)
        expected = np.array(self.blocks, np.int64)
        if np.array_equal(found, expected):
            return ""
        name = f"{self.side}_blocks"
        if len(found) != len(expected):
            return f"{name} has {len(found):,} entries; {len(expected):,} were expected"
        odd = np.flatnonzero(found != expected)
        first = int(odd[0])
        text = (
            f"{len(odd):,} of {len(found):,} entries of {name} differ; the first is "
            f"{name}[{first}]: {int(found[first])}, expected {int(expected[first])}"
        )
        cause = changed_table(self.side, expected, found) if len(odd) > 1 else ""
        return f"{text}; {cause}" if cause else text


def transfer_at(recording: Recording, number: int) -> TransferRecord:
    """Return the transfer in a row of a recording; other rows raise LLM_PARAM_INVALID."""
    found = recording.rows[number] if number < len(recording) else None
    if not isinstance(found, TransferRecord):
        raise invalid(
            f"{recording.path}: row {number} is not a transfer; the rows are [0, {len(recording)})"
        )
    return found


def save_plan(transfer: TransferRecord, path: Path) -> str:
    """Write the plan of a transfer to a file; return a line about it."""
    plan = transfer.plan
    if plan is None:
        raise invalid(f"transfer {transfer.number} has no plan: it failed before planning")
    save(plan, path)
    return f"{path}: {plan!r}"


def block_tables(transfer: TransferRecord) -> list[dict[str, Any]]:
    """Return the block tables of each part of a transfer, in the order of the request."""
    return [
        {"part": label_of(part.name, part.source)}
        | {
            side: np.frombuffer(table, "<i8").tolist()
            for side, table in (("src", part.src), ("dst", part.dst))
        }
        for part in transfer.parts
        if part.src or part.dst
    ]


def plan_lines(transfer: TransferRecord) -> Iterator[str]:
    """Yield the plan as text, followed by its block tables."""
    plan = transfer.plan
    if plan is None:
        yield "no plan: the transfer failed before planning"
        return
    yield from plan.explain_lines(limit=16)
    for tables in block_tables(transfer):
        label = f"part {tables['part']}, " if tables["part"] else ""
        for side in ("src", "dst"):
            text = ",".join(map(str, tables[side]))
            yield from fit(f"{label}{side}_blocks: {text.replace(',', ', ')}")
