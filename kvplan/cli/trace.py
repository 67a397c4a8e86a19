"""`kvplan trace`: list recordings, find who wrote a block, and export to Perfetto."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from kvplan.cli.common import ExitCode, json_option, write_json
from kvplan.cli.trace_plan import Expected, block_tables, plan_lines, save_plan, transfer_at
from kvplan.planning.contents import local_layers
from kvplan.planning.texts import nbytes_text, plural, span
from kvplan.recording.queries import OPERATIONS, select, who_wrote
from kvplan.recording.reader import follow, read
from kvplan.recording.records import AnyRecord, Dropped, Event, Recording, TransferRecord, Write
from kvplan.status import LLMException, LLMStatusCode
from kvplan.validation import printable

SCHEMA_VERSION: Final = 1
_AGAIN_S: Final = 0.2  # between looks at a file that is followed
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_Found = list[tuple[Recording, list[AnyRecord]]]


class _Filter(NamedTuple):
    """What is asked for: see `select`."""

    tag: str | None
    cluster: int | None
    operation: str | None
    failed: bool
    since: str | None

    def of(self, records: Sequence[AnyRecord], began: float) -> list[AnyRecord]:
        since = None if self.since is None else _moment(self.since, began)
        everything = since is None and not any(self[:4])
        if everything and self.cluster is None:
            return [*records]
        return [
            *select(
                records,
                tag=self.tag,
                cluster=self.cluster,
                operation=self.operation,
                failed=self.failed,
                since=since,
            )
        ]


@click.command(
    "trace",
    epilog="Examples: kvplan trace decode.kvrec --failed; kvplan trace decode.kvrec "
    "prefill.kvrec --block 3:417",
)
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--tag", metavar="TAG", help="Of this request; TAG* for all that begin so.")
@click.option("--cluster", metavar="ID", type=click.IntRange(min=0), help="With this peer.")
@click.option("--operation", metavar="NAME", help="Such as pull_blocks, or pull for all pulls.")
@click.option("--failed", is_flag=True, help="Only what has failed.")
@click.option(
    "--since", metavar="WHEN", help="Begun since 10m ago (s, m, h, d), 18:30, or an ISO time."
)
@click.option(
    "--block",
    metavar="CACHE:BLOCK",
    help="Who wrote this block (or slot) of the first FILE's engine; other FILEs are of its peers.",
)
@click.option("--follow", "-f", "following", is_flag=True, help="Go on with what is written.")
@click.option("--plan", "explained", metavar="N", type=click.IntRange(min=0), help="Explain it.")
@click.option(
    "--expect",
    "expected",
    metavar="SIDE:TABLE",
    callback=Expected.read,
    help="With --plan: compare its block table, such as dst:7,8,2 or src:4..5,9; 1 if it differs.",
)
@click.option(
    "--save-plan",
    "saved",
    metavar="N OUT.json",
    type=(click.IntRange(min=0), click.Path(path_type=Path)),
    help="Write its plan to a file.",
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
    following: bool,
    explained: int | None,
    expected: Expected | None,
    saved: tuple[int, Path] | None,
    perfetto: Path | None,
    as_json: bool,
) -> ExitCode:
    """List the transfers that FILEs have, which engines recorded (see docs/how-to/recording.md).

    A FILE may still be written; its older files (FILE.1 and so on) are read with it. A folder
    stands for all recordings in it, such as those of KVPLAN_RECORD. Exits with 0, or with 2 if a
    FILE cannot be read.
    """
    files = tuple(_recordings_of(files))
    chosen = _Filter(tag, cluster, operation, failed, since)
    if following:
        if len(files) > 1 or block or perfetto or saved or explained is not None:
            raise click.UsageError("--follow takes one FILE, and lists it")
        if operation is not None:
            _check_operation(operation, [])
        _follow(files[0], chosen, as_json=as_json)
        return ExitCode.OK
    recordings = [read(path) for path in files]
    if operation is not None:
        _check_operation(operation, recordings)
    if expected is not None and explained is None:
        raise click.UsageError("--expect needs --plan N")
    if explained is not None or saved is not None:
        return _one_plan(recordings, explained, saved, expected, as_json=as_json)
    if block is not None:
        return _block(recordings, block, as_json=as_json)
    found = [(it, chosen.of(it.rows, it.header.started)) for it in recordings]
    if perfetto is not None:
        return _export(found, perfetto)
    if as_json:
        write_json(
            {
                "schema_version": SCHEMA_VERSION,
                "recordings": [
                    {**vars(it.header), "complete": it.complete, "dropped": it.dropped}
                    | {"rows": [_document(row) for row in rows]}
                    for it, rows in found
                ],
            }
        )
        return ExitCode.OK
    for recording, rows in found:
        _list(recording, rows)
    return ExitCode.OK


def _recordings_of(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files, and for a folder its recordings in the order of their names."""
    from kvplan.engine.records import SUFFIX  # the engine: for a folder only

    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = sorted(path.glob(f"*{SUFFIX}"))
        if not found:
            raise click.UsageError(f"{path}: there is no file *{SUFFIX} in this folder")
        yield from found


def _check_operation(name: str, recordings: Sequence[Recording]) -> None:
    """Refuse an operation that neither engines have nor the recordings."""
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
        raise click.UsageError(f"--operation {name}: there is no such operation; near it: {near}")


def _say(*lines: str) -> None:
    """Print each on a line of its own: tags, names and errors are whatever a file says."""
    sys.stdout.writelines(f"{printable(it)}\n" for it in lines)


def _list(recording: Recording, rows: list[AnyRecord]) -> None:
    _say(_title(recording), _HEAD)
    _say(*map(_Lines().of, rows))
    left = len(recording.rows) - len(rows)
    ended = "" if recording.complete else "; it was cut off, or is still written"
    missing = f"; {recording.dropped:,} rows were dropped" if recording.dropped else ""
    hidden = f" of {len(recording.rows):,}" if left else ""
    _say(f"{len(rows):,}{hidden} rows{ended}{missing}")


def _follow(path: Path, chosen: _Filter, *, as_json: bool) -> None:
    """List what there is, then what comes, until the recording ends or Ctrl-C."""
    began = read(path).header.started

    def idle() -> bool:
        sys.stdout.flush()
        time.sleep(_AGAIN_S)
        return True

    lines = _Lines()
    if not as_json:
        _say(_HEAD)
    for it in follow(path, idle):
        for row in chosen.of([it], began):
            _say(json.dumps(_document(row)) if as_json else lines.of(row))


_HEAD: Final = (
    f"{'#':>6}  {'time':<15} {'operation':<15} {'peer':>6}  {'tag':<24} {'layers':<9} "
    f"{'blocks':>6} {'bytes':>9} {'ms':>9}  outcome"
)


def _title(recording: Recording) -> str:
    head = recording.header
    when = datetime.fromtimestamp(head.started).astimezone().isoformat(" ", "seconds")
    return (
        f"{recording.path}: cluster {head.cluster_id} ({head.role}), process {head.pid} on "
        f"{head.host}, from {when} on, kvplan {head.version}"
    )


class _Lines:
    """Rows of one recording as lines. Transfers of one template have the same layers."""

    def __init__(self) -> None:
        self._layers: dict[tuple[int, ...], str] = {}

    def of(self, record: AnyRecord) -> str:
        """The line of a row."""
        if not isinstance(record, TransferRecord):
            return _line(record, "")
        key = tuple(part.template for part in record.parts)
        if key not in self._layers:
            self._layers[key] = _layers(record)
        return _line(record, self._layers[key])


def _layers(transfer: TransferRecord) -> str:
    """`0-31`, or `0-1>4-5` where layers go to others; of several parts each that differs."""
    try:
        parts = () if transfer.plan is None else transfer.plan.parts
    except LLMException:
        return "damaged"
    said = []
    for part in parts:
        src, dst = (span(local_layers(part, side)) for side in ("src", "dst"))
        said.append(src if src == dst else f"{src}>{dst}")
    return ",".join(dict.fromkeys(said))


def _line(it: AnyRecord, layers: str) -> str:
    begin = f"{it.number:>6}  {_clock(it.time):<15}"
    if isinstance(it, Dropped):
        what = "a file of the recording" if it.count is None else plural(it.count, "row")
        return f"{begin} -- {what} missing --"
    ms = f"{it.seconds * 1e3:.3f}"
    succeeded = it.status is LLMStatusCode.LLM_SUCCESS
    outcome = "done" if succeeded else f"{it.status.name}: {it.error}"
    if isinstance(it, Event):
        fields = " ".join(
            f"{name}={_short(value)}"
            for name, value in it.fields.items()
            if value not in (None, "") and name != "peer"
        )
        peer = str(it.fields.get("peer", ""))
        note = "" if succeeded else f"{it.status.name}: "
        text = " ".join(filter(None, [fields, f"{note}{it.error}" if it.error or note else ""]))
        return f"{begin} {it.operation:<15} {peer:>6}  {text}".rstrip()
    peer = "" if it.peer is None else str(it.peer)
    blocks = str(it.blocks or "")
    nbytes = nbytes_text(it.nbytes)
    return (
        f"{begin} {it.operation:<15} {peer:>6}  {it.tag:<24} {layers:<9} {blocks:>6} {nbytes:>9} "
        f"{ms:>9}  {outcome}"
    )


def _short(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = text if len(text) <= 40 else text[:37] + "..."
    return f'"{text}"' if " " in text else text


def _document(it: AnyRecord) -> dict[str, Any]:
    if isinstance(it, Dropped):
        return {"kind": "dropped", "number": it.number, "time": it.time, "count": it.count}
    common = {
        "number": it.number,
        "time": it.time,
        "ms": it.seconds * 1e3,
        "operation": it.operation,
        "status": it.status.name,
        "error": it.error,
    }
    if isinstance(it, Event):
        return {"kind": "event", **common, "fields": it.fields}
    return {
        "kind": "transfer",
        **common,
        "peer": it.peer,
        "cache": it.cache_id,
        "caches": it.caches,
        "tag": it.tag,
        "leases": it.leases,
        "blocks": it.blocks,
        "nbytes": it.nbytes,
    }


def _block(recordings: list[Recording], given: str, *, as_json: bool) -> ExitCode:
    if (asked := re.fullmatch(r"(\d{1,18}):(\d{1,18})", given)) is None:
        raise click.UsageError(f"--block {given}: it is CACHE:BLOCK, such as 3:417")
    cache, block = map(int, asked.groups())
    recording, *others = recordings
    writes = who_wrote(recording, cache, block, others)
    if as_json:
        document = {"cache": cache, "block": block, "writes": [_write(it) for it in writes]}
        write_json({"schema_version": SCHEMA_VERSION, **document})
        return ExitCode.OK
    here = recording.header.cluster_id
    number = len(writes)
    said = f"{plural(number, 'transfer')} wrote" if number else "no transfer that is recorded wrote"
    _say(f"{said} block {block} of cache {cache} of cluster {here}, oldest first")
    _say(*(f"{_clock(it.transfer.time + it.transfer.seconds)}  {it}" for it in writes))
    peers = sorted({it.peer for it in recording.transfers if it.peer is not None})
    linked = [it.fields.get("peer") for it in recording.events if it.operation == "link_state"]
    known = {it.header.cluster_id for it in others}
    unknown = sorted({*peers, *(it for it in linked if isinstance(it, int))} - known)
    if unknown:
        names = ", ".join(map(str, unknown))
        _say(f"what these peers pushed their recordings say: clusters {names}")
    return ExitCode.OK


def _write(it: Write) -> dict[str, Any]:
    return {
        "transfer": _document(it.transfer),
        "cluster": it.transfer.cluster_id,
        "part": it.label,
        "source": it.source,
        "src_cache": it.src_cache,
        "src_rows": it.src_rows,
        "partial": it.partial,
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
        raise click.UsageError("--plan and --save-plan take one FILE: each counts its own rows")
    (recording,) = recordings
    if saved is not None:
        number, path = saved
        _say(save_plan(transfer_at(recording, number), path))
    if explained is None:
        return ExitCode.OK
    transfer = transfer_at(recording, explained)
    wrong = "" if expected is None else expected.difference(transfer)
    if as_json:
        plan = None if transfer.plan is None else transfer.plan.to_dict()
        tables = {"block_tables": block_tables(transfer), "unexpected": wrong}
        document = {"schema_version": SCHEMA_VERSION, "plan": plan} | tables
        write_json(document | _document(transfer))
    else:
        _say(_HEAD, _Lines().of(transfer), *plan_lines(transfer))
        if expected is not None:
            _say(wrong or f"{expected.side}_blocks is as expected")
    return ExitCode.DIFFERENT if wrong else ExitCode.OK


def _export(found: _Found, perfetto: Path) -> ExitCode:
    from kvplan.recording.perfetto import trace_of

    document = trace_of(found)
    perfetto.write_text(json.dumps(document) + "\n", encoding="utf-8")
    count = plural(len(document["traceEvents"]), "event")
    _say(f"{perfetto}: {count}; open it in https://ui.perfetto.dev")
    return ExitCode.OK


def _clock(when: float) -> str:
    return datetime.fromtimestamp(when).strftime("%H:%M:%S.%f")


def _moment(text: str, began: float) -> float:
    """The time that `--since` means: so long ago, an ISO time, or one of the recording's day."""
    if (ago := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)) is not None:
        return time.time() - float(ago[1]) * _UNITS[ago[2]]
    if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?", text):
        day = datetime.fromtimestamp(began).date().isoformat()
        text = f"{day}T{text if text.index(':') == 2 else '0' + text}"
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise click.UsageError(
            f"--since {text}: it is 90s, 10m, 2h or 1d (ago), 18:30, or an ISO time"
        ) from None
