"""`kvplan trace`: list recordings, find the transfers that wrote a block, export to Perfetto."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from msgspec import structs

from kvplan.cli.common import ExitCode, json_option, write_json, write_plain
from kvplan.cli.trace_compare import compare
from kvplan.cli.trace_plan import Expected, block_tables, plan_lines, save_plan, transfer_at
from kvplan.cli.trace_sums import compare_sums
from kvplan.planning.contents import local_layers
from kvplan.planning.texts import nbytes_text, plural, span
from kvplan.recording.reader import read
from kvplan.recording.records import (
    OPERATIONS,
    PUSHES,
    AnyRecord,
    Dropped,
    Event,
    Recording,
    TransferRecord,
    Write,
    select,
    who_wrote,
)
from kvplan.status import LLMException, LLMStatusCode
from kvplan.validation import write_file

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TOGETHER: Final = {("--sums", "--tag"), ("--plan", "--save-plan")}
_Found = list[tuple[Recording, list[AnyRecord]]]


@click.command(
    "trace",
    epilog="Examples: kvplan trace decode.kvrec --failed; kvplan trace decode.kvrec "
    "prefill.kvrec --block 3:417",
)
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--tag",
    "--request",
    "tag",
    metavar="TAG",
    help="Only this request; TAG* for all that begin with TAG.",
)
@click.option("--cluster", metavar="ID", type=click.IntRange(min=0), help="Only this peer.")
@click.option(
    "--operation",
    metavar="NAME",
    help="Only this operation, such as pull_blocks; pull stands for all pulls.",
)
@click.option("--failed", is_flag=True, help="Only failures.")
@click.option(
    "--since",
    metavar="WHEN",
    help="Only since 10m ago (s, m, h, d), 18:30, or an ISO time.",
)
@click.option(
    "--block",
    metavar="CACHE:BLOCK",
    help="List what wrote this block or slot; the column cache has the number of the cache. The "
    "first FILE is of its engine, others of peers.",
)
@click.option(
    "--plan", "explained", metavar="N", type=click.IntRange(min=0), help="Explain transfer N."
)
@click.option(
    "--expect",
    "expected",
    metavar="SIDE:TABLE",
    callback=Expected.read,
    help="With --plan: compare its block table with this, such as dst:7,8,2 or src:4..5,9. Exits "
    "with 1 if it differs.",
)
@click.option(
    "--compare",
    "compared",
    metavar="A B",
    nargs=2,
    help="Compare the transfers of two requests, or of two rows (#7 #9). Of two FILEs, the first "
    "has A and the second has B. Exits with 1 if they differ.",
)
@click.option(
    "--sums",
    is_flag=True,
    help="Compare sums of blocks at both ends, whose FILEs are given. Exits with 1 if they differ.",
)
@click.option(
    "--save-plan",
    "saved",
    metavar="N OUT.json",
    type=(click.IntRange(min=0), click.Path(path_type=Path)),
    help="Write the plan of row N to a file.",
)
@click.option(
    "--perfetto",
    metavar="OUT.json",
    type=click.Path(path_type=Path),
    help="Write a trace for ui.perfetto.dev and chrome://tracing.",
)
@json_option
def trace(
    files: tuple[Path, ...],
    *,
    tag: str | None,
    cluster: int | None,
    operation: str | None,
    failed: bool,
    since: str | None,
    block: str | None,
    explained: int | None,
    expected: Expected | None,
    saved: tuple[int, Path] | None,
    compared: tuple[str, str] | None,
    sums: bool,
    perfetto: Path | None,
    as_json: bool,
) -> ExitCode:
    """List the transfers in recordings of engines.

    See docs/how-to/recording.md. A FILE may still be growing; its older parts (FILE.1 and so on)
    are read too. A folder stands for all recordings in it, for example those of KVPLAN_RECORD.
    Exits with 2 if a FILE cannot be read.
    """
    chosen = {"--tag": tag, "--cluster": cluster, "--operation": operation, "--since": since}
    chosen |= {"--failed": failed or None}
    modes: dict[str, object] = {"--compare": compared, "--sums": sums or None, "--plan": explained}
    modes |= {"--save-plan": saved, "--block": block}
    _check_combined(modes, chosen | {"--perfetto": perfetto})
    files = tuple(_recordings_of(files))
    recordings = [read(path) for path in files]
    if operation is not None:
        _check_operation(operation, recordings)
    if expected is not None and explained is None:
        raise click.UsageError("--expect needs --plan N")
    if compared is not None:
        return compare(recordings, compared, as_json=as_json)
    if sums:
        return compare_sums(recordings, tag, as_json=as_json)
    if explained is not None or saved is not None:
        return _one_plan(recordings, explained, saved, expected, as_json=as_json)
    if block is not None:
        return _block(recordings, block, as_json=as_json)
    found: _Found = [(one, one.rows) for one in recordings]
    if any(given is not None for given in chosen.values()):
        rows_of = partial(select, tag=tag, cluster=cluster, operation=operation, failed=failed)
        begins = [
            None if since is None else _moment(since, one.header.started) for one in recordings
        ]
        found = [
            (one, [*rows_of(one, since=begin)])
            for one, begin in zip(recordings, begins, strict=True)
        ]
    if perfetto is not None:
        return _export(found, perfetto, as_json=as_json)
    if as_json:
        documents = [
            {**structs.asdict(one.header), "complete": one.complete, "dropped": one.dropped}
            | {"rows": [_document(row) for row in rows]}
            for one, rows in found
        ]
        write_json({"recordings": documents})
        return ExitCode.OK
    for recording, rows in found:
        _list(recording, rows)
    return ExitCode.OK


def _check_combined(modes: Mapping[str, object], chosen: Mapping[str, object]) -> None:
    """Refuse a second mode, and options of the list of rows, beside a mode."""
    mode = next((name for name, given in modes.items() if given is not None), None)
    for name, given in {**modes, **chosen}.items():
        if given is not None and mode not in (None, name) and (mode, name) not in _TOGETHER:
            raise click.UsageError(f"{name} has no effect with {mode}")


def _recordings_of(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files, and the recordings in each folder, by name."""
    from kvplan.engine.records import SUFFIX  # slow, and only folders need it

    for path in paths:
        if not path.is_dir():
            yield path
            continue
        files = sorted(path.glob(f"*{SUFFIX}"))  # a new one is empty until its first row
        found = [file for file in files if file.stat().st_size or Path(f"{file}.1").exists()]
        if not found:
            raise click.UsageError(f"{path} has no file *{SUFFIX} with a row")
        yield from found


def _check_operation(name: str, recordings: Sequence[Recording]) -> None:
    """Refuse an operation that neither an engine nor a recording has."""
    known = sorted(
        OPERATIONS.union(
            row.operation
            for recording in recordings
            for row in recording.rows
            if not isinstance(row, Dropped)
        )
    )
    if name not in known:
        near = ", ".join(get_close_matches(name, known, 3) or known)
        raise click.UsageError(f"--operation {name} does not exist; similar: {near}")


def _list(recording: Recording, rows: list[AnyRecord]) -> None:
    write_plain(_title(recording), _HEAD)
    write_plain(*_lines(rows))
    left = len(recording.rows) - len(rows)
    ended = "" if recording.complete else "; the recording was cut off, or is still growing"
    missing = f"; {recording.dropped:,} rows were dropped" if recording.dropped else ""
    hidden = f" of {len(recording.rows):,}" if left else ""
    write_plain(f"{len(rows):,}{hidden} rows{ended}{missing}")


_HEAD: Final = (
    f"{'#':>6}  {'time':<15} {'operation':<21} {'peer':>10} {'cache':>7}  {'tag':<24} "
    f"{'layers':<9} {'blocks':>6} {'bytes':>9} {'ms':>9}  outcome"
)


def _title(recording: Recording) -> str:
    head = recording.header
    when = datetime.fromtimestamp(head.started).astimezone().isoformat(" ", "seconds")
    name = next((row.fields["name"] for row in recording.events if row.operation == "observe"), "")
    role = f"{head.role} {name}".strip()  # an observed agent has a name
    return (
        f"{recording.path}: cluster {head.cluster_id} ({role}), process {head.pid} on "
        f"{head.host}, since {when}, kvplan {head.version}"
    )


def _lines(records: Sequence[AnyRecord]) -> Iterator[str]:
    """Yield a line for each record of a recording. Transfers of one template have equal layers."""
    known: dict[tuple[int, ...], str] = {}
    for record in records:
        layers = ""
        if isinstance(record, TransferRecord):
            key = tuple(part.template for part in record.parts)
            layers = known.get(key) or known.setdefault(key, _layers(record))
        yield _line(record, layers)


def _layers(transfer: TransferRecord) -> str:
    """Return the layers as `0-31`, or `0-1>4-5` if src and dst differ; equal texts occur once."""
    try:
        parts = () if transfer.plan is None else transfer.plan.parts
    except LLMException:
        return "damaged"
    texts = []
    for part in parts:
        src, dst = (span(local_layers(part, side)) for side in ("src", "dst"))
        texts.append(src if src == dst else f"{src}>{dst}")
    return ",".join(dict.fromkeys(texts))


def _line(record: AnyRecord, layers: str) -> str:
    begin = f"{record.number:>6}  {_clock(record.time):<15}"
    if isinstance(record, Dropped):
        what = "a file of the recording" if record.count is None else plural(record.count, "row")
        return f"{begin} -- {what} missing --"
    ms = f"{record.seconds * 1e3:.3f}"
    succeeded = record.status is LLMStatusCode.LLM_SUCCESS
    outcome = "done" if succeeded else f"{record.status.name}: {record.error}"
    if isinstance(record, Event):
        fields = " ".join(
            f"{name}={_short(value)}"
            for name, value in record.fields.items()
            if value not in (None, "") and name != "peer"
        )
        peer = str(record.fields.get("peer", ""))
        note = "" if succeeded else f"{record.status.name}: "
        text = " ".join(
            filter(None, [fields, f"{note}{record.error}" if record.error or note else ""])
        )
        return f"{begin} {record.operation:<21} {peer:>10} {'':>7}  {text}".rstrip()
    peer = "" if record.peer is None else str(record.peer)
    blocks = str(record.blocks or "")
    nbytes = nbytes_text(record.nbytes)
    written = ",".join(map(str, dict.fromkeys(dst for _, dst in record.caches if dst >= 0)))
    return (
        f"{begin} {record.operation:<21} {peer:>10} {written:>7}  {record.tag:<24} {layers:<9} "
        f"{blocks:>6} {nbytes:>9} {ms:>9}  {outcome}"
    )


def _short(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = text if len(text) <= 40 else text[:37] + "..."
    return f'"{text}"' if " " in text else text


def _document(record: AnyRecord) -> dict[str, Any]:
    place = {"number": record.number, "time": record.time}
    if isinstance(record, Dropped):
        return {"kind": "dropped", **place, "count": record.count}
    common = {
        **place,
        "ms": record.seconds * 1e3,
        "operation": record.operation,
        "status": record.status.name,
        "error": record.error,
    }
    if isinstance(record, Event):
        return {"kind": "event", **common, "fields": record.fields}
    names = ("peer", "caches", "tag", "leases", "blocks", "nbytes")
    fields = {name: getattr(record, name) for name in names}
    return {"kind": "transfer", **common, "cache": record.cache_id, **fields}


def _block(recordings: list[Recording], given: str, *, as_json: bool) -> ExitCode:
    if (asked := re.fullmatch(r"(\d{1,18}):(\d{1,18})", given)) is None:
        raise click.UsageError(f"--block {given}: write CACHE:BLOCK, such as 3:417")
    cache, block = map(int, asked.groups())
    recording, *others = recordings
    writes = who_wrote(recording, cache, block, others)
    if as_json:
        document = {"cache": cache, "block": block, "writes": [_write(write) for write in writes]}
        write_json(document)
        return ExitCode.OK
    here = recording.header.cluster_id
    where = f"wrote block {block} of cache {cache} of cluster {here}"
    some = f"{plural(len(writes), 'transfer')} {where}, oldest first"
    write_plain(some if writes else f"no recorded transfer {where}")
    write_plain(*(f"{_clock(one.transfer.time + one.transfer.seconds)}  {one}" for one in writes))
    own = (one for one in recording.transfers if one.verb != PUSHES)
    caches = {dst for one in own for _, dst in one.caches}
    if caches and cache not in caches:
        names = ", ".join(map(str, sorted(caches)))
        write_plain(f"caches that its transfers wrote: {names}")
    peers = sorted({one.peer for one in recording.transfers if one.peer is not None})
    linked = [one.fields.get("peer") for one in recording.events if one.operation == "link_state"]
    known = {one.header.cluster_id for one in others}
    unknown = sorted({*peers, *(peer for peer in linked if isinstance(peer, int))} - known)
    if unknown:
        names = ", ".join(map(str, unknown))
        write_plain(f"pushes of these peers are only in their own recordings: clusters {names}")
    return ExitCode.OK


def _write(write: Write) -> dict[str, Any]:
    return {
        "transfer": _document(write.transfer),
        "cluster": write.transfer.cluster_id,
        "part": write.label,
        "source": write.source,
        "src_cache": write.src_cache,
        "src_rows": write.src_rows,
        "partial": write.partial,
    }


def _one_plan(
    recordings: list[Recording],
    explained: int | None,
    saved: tuple[int, Path] | None,
    expected: Expected | None,
    *,
    as_json: bool,
) -> ExitCode:
    if len(recordings) > 1:
        raise click.UsageError("--plan and --save-plan need one FILE, as each counts its own rows")
    (recording,) = recordings
    written: dict[str, Any] = {}
    if saved is not None:
        number, path = saved
        text = save_plan(transfer_at(recording, number), path)
        if as_json:
            written["saved"] = str(path)
        else:
            write_plain(text)
    if explained is None:
        if as_json:
            write_json(written)
        return ExitCode.OK
    transfer = transfer_at(recording, explained)
    wrong = "" if expected is None else expected.difference(transfer)
    if as_json:
        plan = None if transfer.plan is None else transfer.plan.to_dict()
        tables = {"block_tables": block_tables(transfer), "unexpected": wrong}
        write_json(written | {"plan": plan} | tables | _document(transfer))
    else:
        write_plain(_HEAD, *_lines([transfer]), *plan_lines(transfer))
        if expected is not None:
            write_plain(wrong or f"{expected.side}_blocks is as expected")
    return ExitCode.DIFFERENT if wrong else ExitCode.OK


def _export(found: _Found, perfetto: Path, *, as_json: bool) -> ExitCode:
    from kvplan.recording.perfetto import trace_of

    document = trace_of(found)
    write_file(perfetto, json.dumps(document) + "\n")
    count = len(document["traceEvents"])
    if as_json:
        write_json({"saved": str(perfetto), "events": count})
    else:
        write_plain(f"{perfetto}: {plural(count, 'event')}; open it in https://ui.perfetto.dev")
    return ExitCode.OK


def _clock(when: float) -> str:
    return datetime.fromtimestamp(when).strftime("%H:%M:%S.%f")


def _moment(text: str, began: float) -> float:
    """Return the time of `--since`. A time without a date is on the day of the recording."""
    if (ago := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)) is not None:
        return time.time() - float(ago[1]) * _UNITS[ago[2]]
    if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?", text):
        day = datetime.fromtimestamp(began).date().isoformat()
        text = f"{day}T{text if text.index(':') == 2 else '0' + text}"
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise click.UsageError(
            f"--since {text}: write 90s, 10m, 2h or 1d (ago), 18:30, or an ISO time"
        ) from None
