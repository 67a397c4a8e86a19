"""`kvplan trace --sums`: blocks whose sums at the two ends of a transfer differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import click

from kvplan.cli.common import ExitCode, write_json, write_plain
from kvplan.inspection.compare import Runs, place_text, run_text
from kvplan.planning.plan import Plan
from kvplan.planning.texts import fit, plural
from kvplan.recording.records import Event, Recording, TransferRecord, select

MAX_LISTED: Final = 8  # wrong runs of a transfer


class _Sums(NamedTuple):
    """Recorded sums of a request."""

    recording: Recording
    row: Event
    values: list[str]  # the sum of each descriptor, in the order of the transfer
    transfer: TransferRecord | None  # that moved the bytes; None: the program asked for the sums


def compare_sums(recordings: Sequence[Recording], tag: str | None, *, as_json: bool) -> ExitCode:
    """Print the runs of each transfer whose sums differ from those that the peer recorded."""
    found = [sums for recording in recordings for sums in _sums_of(recording)]
    asked = {id(row) for recording in recordings for row in select(recording, tag=tag)}
    moved = [sums for sums in found if sums.transfer is not None]
    if not moved:
        raise click.UsageError(
            "--sums: no transfer has sums; record them with KVPLAN_OBSERVE=nixl,sums"
        )
    moved = [sums for sums in moved if id(sums.row) in asked]
    if not moved:
        raise click.UsageError(f"--sums: no transfer of {tag} has sums")
    documents = [
        _compared(sums, found) | {"read_before": text}
        for sums, text in zip(moved, _read_before(moved), strict=True)
    ]
    if as_json:
        write_json({"transfers": documents})
    else:
        for document in documents:
            name = f"transfer #{document['number']} of {document['recording']}"
            write_plain(f"{document['tag'] or 'no tag'}: {name}: {document['verdict']}")
            lines = [*_lines(document["wrong"])]
            for text in lines[:MAX_LISTED]:
                write_plain(*(f"  {line}" for line in fit(text)))
            if (more := len(lines) - MAX_LISTED) > 0:
                write_plain(f"  ... {more:,} more")
            if document["read_before"] and document["wrong"]:
                write_plain(f"  {document['read_before']}")
    return ExitCode.DIFFERENT if any(document["wrong"] for document in documents) else ExitCode.OK


def _lines(wrong: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each wrong run, but only once for tensors with the same wrong runs."""
    tensors: dict[int, list[dict[str, Any]]] = {}
    for run in wrong:
        tensors.setdefault(run.get("tensor", 0), []).append(run)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for tensor, runs in tensors.items():
        alike.setdefault(tuple(run.get("pattern", run["index"]) for run in runs), []).append(tensor)
    for same in alike.values():
        yield from (run["text"] for run in tensors[same[0]])
        if len(same) > 1:
            yield f"the same in {len(same) - 1:,} more, up to {tensors[same[-1]][0]['where']}"


def _read_before(moved: Sequence[_Sums]) -> Iterator[str]:
    """Yield for each transfer a text about its last pull of the same blocks, or an empty one."""
    last: dict[tuple[Any, ...], TransferRecord] = {}
    for sums in moved:
        transfer, text = sums.transfer, ""
        if transfer is not None and (blocks := _pulled_blocks(transfer)) is not None:
            key = sums.recording.path, transfer.tag, transfer.peer, blocks
            if (other := last.get(key)) is not None:
                seconds = transfer.time - other.time
                text = f"transfer #{other.number} had read the same blocks {seconds:.1f} s before"
            last[key] = transfer
        yield text


def _pulled_blocks(transfer: TransferRecord) -> bytes | None:
    """Return the peer's block table of a pull of whole blocks, as bytes to compare."""
    if transfer.verb != "pull" or (plan := transfer.plan) is None or len(plan.parts) != 1:
        return None
    tables = plan.parts[0].tables
    return None if tables is None else tables.src.tobytes()


def _sums_of(recording: Recording) -> Iterator[_Sums]:
    """Yield the sums of a recording, each with its transfer: the last pull or next push."""
    last: dict[tuple[str, str], TransferRecord] = {}
    ahead: dict[tuple[str, str], _Sums] = {}  # sums of pushes, which precede their transfer
    for row in recording.rows:
        if isinstance(row, TransferRecord):
            key = row.tag, row.operation
            last[key] = row
            if key in ahead:
                yield ahead.pop(key)._replace(transfer=row)
        elif isinstance(row, Event) and row.operation == "sums":
            values = row.fields.get("sums")
            texts = [*map(str, values)] if isinstance(values, list) else []
            sums = _Sums(recording, row, texts, None)
            key = str(row.fields.get("tag", "")), str(row.fields.get("transfer", ""))
            if not key[1]:
                yield sums
            elif key[1].startswith("push"):
                ahead[key] = sums
            else:
                yield sums._replace(transfer=last.get(key))


def _compared(moved: _Sums, found: Sequence[_Sums]) -> dict[str, Any]:
    """Compare the sums of a transfer with those that its peer recorded; return the document."""
    transfer = moved.transfer
    assert transfer is not None
    of_peer = [sums for sums in found if sums.recording.header.cluster_id == transfer.peer]
    owners = [
        sums
        for sums in of_peer
        if sums.transfer is None and sums.row.fields.get("tag") == transfer.tag
    ]
    owners = [sums for sums in owners if len(sums.values) == len(moved.values)] or owners
    document: dict[str, Any] = {
        "tag": transfer.tag,
        "number": transfer.number,
        "recording": str(moved.recording.path),
        "wrong": [],
    }
    if not owners:
        missing = f"cluster {transfer.peer} has no sums of this tag in these FILEs"
        return document | {"verdict": f"nothing to compare with: {missing}"}
    owner = _nearest(transfer, owners)
    where = f"{owner.recording.path} row {owner.row.number}"
    if len(owner.values) != len(moved.values):
        numbers = f"{plural(len(moved.values), 'sum')} here, and {len(owner.values):,} in {where}"
        wrong = [{"index": min(len(owner.values), len(moved.values)), "text": numbers}]
        return document | {"verdict": "another number of runs", "wrong": wrong}
    senders = found if transfer.verb == "push" else of_peer
    wrong = [*_wrong(transfer, moved.values, owner.values, _others(moved, senders))]
    count = plural(len(moved.values), "sum")
    verdict = (
        f"{len(wrong):,} of {count} differ from {where}" if wrong else f"{count} equal {where}"
    )
    return document | {"verdict": verdict, "wrong": wrong}


def _others(moved: _Sums, senders: Sequence[_Sums]) -> dict[str, str]:
    """Return texts about other requests' bytes in the sender's memory, keyed by their sums."""
    transfer = moved.transfer
    assert transfer is not None
    end, texts = transfer.time + transfer.seconds, {}
    for sums in senders:
        if sums.row.fields.get("tag") in (transfer.tag, "") or (
            (sums.recording is moved.recording) != (transfer.verb == "push")
        ):
            continue
        seconds = end - sums.row.time
        when = f"{abs(seconds):.1f} s {'before' if seconds >= 0 else 'after'} the end"
        for index, value in enumerate(sums.values):
            text = f"sum {index} of {sums.row.fields['tag']}, row {sums.row.number}, {when}"
            texts[value] = f"no bytes of this request, but of another: {text}"
    return texts


def _nearest(transfer: TransferRecord, owners: Sequence[_Sums]) -> _Sums:
    """Return the first sums after a push, the last before the end of a pull: a tag may recur."""
    end = transfer.time + transfer.seconds
    before = [sums for sums in owners if sums.row.time <= end]
    after = [sums for sums in owners if sums.row.time > end]
    if transfer.verb == "push":  # the receiver sums the bytes later
        return after[0] if after else before[-1]
    return before[-1] if before else after[0]


def _wrong(
    transfer: TransferRecord, here: Sequence[str], there: Sequence[str], others: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the runs whose sums differ `here`, in the process of the transfer, and at the peer."""
    plan = transfer.plan
    runs = None if plan is None else Runs.of(plan)
    pushed = transfer.verb == "push"
    src, dst = (here, there) if pushed else (there, here)
    origins = {value: index for index, value in reversed([*enumerate(src)])}

    def name(index: int, text: Callable[[Plan, Runs, int], str]) -> str:
        known = plan is not None and runs is not None and len(runs.number) == len(here)
        return text(plan, runs, index) if plan and runs and known else f"descriptor {index}"

    for index, (sent, arrived) in enumerate(zip(src, dst, strict=True)):
        if sent == arrived:
            continue
        origin = origins.get(arrived)
        bytes_of = others.get(arrived, "no bytes of this request")
        if origin is not None:
            bytes_of = f"the bytes of {name(origin, place_text)}"
        text = f"{name(index, run_text)}: {sent} was handed over, {arrived} arrived: {bytes_of}"
        wrong = {"index": index, "src": sent, "dst": arrived, "origin": origin, "text": text}
        if runs is not None and len(runs.number) == len(here):
            tensor, run = int(runs.dst_tensor[index]), int(runs.number[index])
            came = None
            if origin is not None:
                came = int(runs.dst_tensor[origin]) - tensor, int(runs.number[origin])
            where = name(index, place_text).rpartition(", ")[0]
            wrong |= {"tensor": tensor, "where": where, "pattern": (run, came)}
        yield wrong
