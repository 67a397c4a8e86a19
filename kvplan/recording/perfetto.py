"""Recordings as a trace that ui.perfetto.dev and chrome://tracing open: JSON of trace events.

The format is that of
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event
Format): slices (`X`), instants (`i`), asynchronous spans (`b`, `e`), flows (`s`, `f`) and names
(`M`). Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, Final

from kvplan.recording.records import AnyRecord, Dropped, Event, Recording, TransferRecord

_EVENTS: Final = 1  # the track of links, leases and caches


def trace_of(recordings: Sequence[tuple[Recording, Sequence[AnyRecord]]]) -> dict[str, Any]:
    """Return the trace of the given records of each recording.

    A track shows one peer and operation; overlapping transfers get further tracks. Arrows lead
    from a transfer to the next one with the same tag, even in another recording. A lease is a span.
    """
    records = [record for _, chosen in recordings for record in chosen]
    origin = min((record.time for record in records), default=0.0)
    pids = _pids([recording for recording, _ in recordings])
    events: list[dict[str, Any]] = []
    slices: list[tuple[TransferRecord, dict[str, Any]]] = []
    for (recording, chosen), pid in zip(recordings, pids, strict=True):
        head = recording.header
        title = f"cluster {head.cluster_id} ({head.role}) pid {head.pid} on {head.host}"
        events.append(_name("process_name", pid, 0, title))
        events.append(_name("thread_name", pid, _EVENTS, "links, leases, caches"))
        found = [
            *_slices([each for each in chosen if isinstance(each, TransferRecord)], pid, origin)
        ]
        events += [event for _, event in found]
        slices += [(transfer, event) for transfer, event in found if transfer is not None]
        events += _others(chosen, pid, origin)
    events += _flows(slices)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"began": origin, "written_by": "kvplan trace --perfetto"},
    }


def _pids(recordings: Sequence[Recording]) -> list[int]:
    """Return the pids of the processes, or 1, 2, ... if two are equal."""
    pids = [recording.header.pid for recording in recordings]
    return pids if len(set(pids)) == len(pids) else [*range(1, len(pids) + 1)]


def _slices(
    transfers: list[TransferRecord], pid: int, origin: float
) -> Iterator[tuple[TransferRecord | None, dict[str, Any]]]:
    """Yield a slice for each transfer, and the names of the tracks."""
    for index, (name, lane) in enumerate(lanes(transfers), _EVENTS + 1):
        yield None, _name("thread_name", pid, index, name)
        for transfer in lane:
            yield transfer, _slice(transfer, pid, index, origin)


def _slice(transfer: TransferRecord, pid: int, tid: int, origin: float) -> dict[str, Any]:
    label = f"{transfer.operation} {transfer.tag}" if transfer.tag else transfer.operation
    args = {
        "number": transfer.number,
        "tag": transfer.tag,
        "peer": transfer.peer,
        "cache": transfer.cache_id,
        "blocks": transfer.blocks,
        "bytes": transfer.nbytes,
        "leases": [*transfer.leases],
        "status": transfer.status.name,
    }
    if transfer.error:
        args["error"] = transfer.error
    return {
        "name": label,
        "cat": "failed" if transfer.failed else transfer.verb,
        "ph": "X",
        "ts": _us(transfer.time - origin),
        "dur": _us(transfer.seconds),
        "pid": pid,
        "tid": tid,
        "args": args,
    } | ({"cname": "terrible"} if transfer.failed else {})


def lanes(transfers: Iterable[TransferRecord]) -> list[tuple[str, list[TransferRecord]]]:
    """Return tracks of one peer and operation each, in which no two transfers overlap."""
    tracks: dict[tuple[int, str], list[list[TransferRecord]]] = {}
    ends: dict[tuple[int, str], list[tuple[float, int]]] = {}  # heaps of ends, each with its track
    for transfer in sorted(transfers, key=lambda transfer: transfer.time):
        key = -1 if transfer.peer is None else transfer.peer, transfer.operation
        of_kind, busy = tracks.setdefault(key, []), ends.setdefault(key, [])
        if busy and busy[0][0] <= transfer.time:
            number = heappop(busy)[1]
        else:
            number = len(of_kind)
            of_kind.append([])
        of_kind[number].append(transfer)
        heappush(busy, (transfer.time + transfer.seconds, number))
    named = []
    for (peer, operation), of_kind in sorted(tracks.items()):
        where = "this process" if peer < 0 else f"cluster {peer}"
        for number, lane in enumerate(of_kind, 1):
            named.append((f"{where}: {operation}" + (f" ({number})" if number > 1 else ""), lane))
    return named


def _others(records: Iterable[AnyRecord], pid: int, origin: float) -> Iterator[dict[str, Any]]:
    """Yield instants, and spans of leases."""
    open_leases: set[int] = set()
    for record in records:
        base = {"ts": _us(record.time - origin), "pid": pid, "tid": _EVENTS}
        if isinstance(record, Dropped):
            yield base | {"name": "rows are missing", "ph": "i", "s": "p", "cat": "failed"}
        elif isinstance(record, Event):
            lease = record.fields.get("lease")
            if record.operation in ("lease", "release") and isinstance(lease, int):
                begins = record.operation == "lease"
                if begins:
                    open_leases.add(lease)
                elif lease not in open_leases:
                    continue  # its begin is not among the records
                tag = record.fields.get("tag")
                yield base | {
                    "name": f"lease {lease}{f' of {tag}' if tag else ''}",
                    "cat": "lease",
                    "ph": "b" if begins else "e",
                    "id": f"{pid}.{lease}",
                    "args": {**record.fields} if begins else {},
                }
                continue
            yield base | {
                "name": _event_name(record),
                "cat": "failed" if record.failed else "engine",
                "ph": "i",
                "s": "t",
                "args": {**record.fields} | {"status": record.status.name, "error": record.error},
            }


def _event_name(event: Event) -> str:
    if event.operation == "link_state":
        return f"cluster {event.fields.get('peer')} {event.fields.get('state')}"
    return event.operation


def _flows(slices: list[tuple[TransferRecord, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the arrows between transfers of one tag."""
    last: dict[str, dict[str, Any]] = {}
    number = 0
    for transfer, event in sorted(
        slices, key=lambda entry: (entry[1]["ts"], entry[1]["pid"], entry[1]["tid"])
    ):
        if not transfer.tag:
            continue
        before = last.get(transfer.tag)
        if before is not None:
            number += 1
            flow = {"name": "request", "cat": "request", "id": number}
            for phase, at in (("s", before), ("f", event)):
                place = {name: at[name] for name in ("pid", "tid", "ts")}
                yield flow | place | {"ph": phase} | ({"bp": "e"} if phase == "f" else {})
        last[transfer.tag] = event


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
