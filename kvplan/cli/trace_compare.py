"""`kvplan trace --compare`: the differences between transfers of requests, rows or FILEs."""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click

from kvplan.cli.common import ExitCode, write_json, write_plain
from kvplan.cli.trace_plan import transfer_at
from kvplan.inspection.compare import compare as compare_plans
from kvplan.planning.texts import fit, plural
from kvplan.recording.records import Recording, TransferRecord, select

if TYPE_CHECKING:
    from collections.abc import Sequence


def compare(recordings: Sequence[Recording], asked: tuple[str, str], *, as_json: bool) -> ExitCode:
    """Print the differences between the transfers of A and of B, which are paired in order."""
    if asked[0] != asked[1]:  # two requests: FILEs of passive ends may be given too
        recordings = [
            recording for recording in recordings if any(_moved(recording, name) for name in asked)
        ] or recordings
    if len(recordings) > 2:
        raise click.UsageError("--compare needs one FILE, or two: of A and of B")
    found = [
        _transfers(recording, name, recordings)
        for recording, name in zip((recordings[0], recordings[-1]), asked, strict=True)
    ]
    pairs = [_pair(a, b) for a, b in zip_longest(*found)]
    differs = any(pair["differences"] for pair in pairs)
    if as_json:
        write_json({"transfers": pairs, "different": differs})
    else:
        for name, transfers, recording in zip(
            "AB", found, (recordings[0], recordings[-1]), strict=True
        ):
            write_plain(f"{name}: {_summary(transfers)}, in {recording.path}")
        for pair in pairs:
            write_plain(f"A {_number(pair['a'])}, B {_number(pair['b'])}")
            for text in pair["differences"] or ["same runs in the same order"]:
                write_plain(*(f"  {line}" for line in fit(text)))
    return ExitCode.DIFFERENT if differs else ExitCode.OK


def _transfers(
    recording: Recording, name: str, recordings: Sequence[Recording]
) -> list[TransferRecord]:
    """Return the transfers of a request, or the transfer of a row (`#7`)."""
    if row := re.fullmatch(r"#(\d{1,18})", name):
        return [transfer_at(recording, int(row[1]))]
    found = _moved(recording, name)
    if not found:
        here = recording.header.cluster_id
        passive = any(row.peer == here for other in recordings for row in _moved(other, name))
        raise click.UsageError(
            f"--compare {name}: {recording.path} has no transfer of that tag"
            + "; it recorded their passive end: compare both ends with --sums" * passive
        )
    return found


def _moved(recording: Recording, tag: str) -> list[TransferRecord]:
    """Return the transfers of a request."""
    return [row for row in select(recording, tag=tag) if isinstance(row, TransferRecord)]


def _pair(a: TransferRecord | None, b: TransferRecord | None) -> dict[str, Any]:
    """Return the numbers of two transfers, and their differences."""
    differences: list[str] = []
    if a is None or b is None:
        differences.append(f"only {'B' if a is None else 'A'} has this transfer")
    else:
        for what, ours, theirs in (
            ("operation", a.operation, b.operation),
            ("outcome", a.error or "done", b.error or "done"),
        ):
            if ours != theirs:
                differences.append(f"{what}: {ours} in A, and {theirs} in B")
        if a.plan is None or b.plan is None:
            if a.plan is not b.plan:
                differences.append(f"plan: only {'B' if a.plan is None else 'A'} has one")
        else:
            differences += compare_plans(a.plan, b.plan)
    numbers = {name: None if row is None else row.number for name, row in (("a", a), ("b", b))}
    return {**numbers, "differences": differences}


def _number(number: int | None) -> str:
    return "-" if number is None else f"#{number}"


def _summary(transfers: list[TransferRecord]) -> str:
    tags = ", ".join(dict.fromkeys(transfer.tag for transfer in transfers if transfer.tag))
    return f"{plural(len(transfers), 'transfer')} of {tags or 'no tag'}"
