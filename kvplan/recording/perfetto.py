"""Recordings as a trace that ui.perfetto.dev and chrome://tracing open: JSON of trace events.

The format is that of https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(Trace Event Format): slices (`X`), instants (`i`), asynchronous spans (`b`, `e`), flows (`s`, `f`)
and names (`M`). Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, Final

from kvplan.recording.records import AnyRecord, Dropped, Event, Recording, TransferRecord

_EVENTS: Final = 1  # the track of links, leases and caches


def trace_of(recordings: Sequence[tuple[Recording, Sequence[AnyRecord]]]) -> dict[str, Any]:
    """Return the trace of recordings, of each the records that are given.

    A track for each peer and operation; transfers that overlap get tracks beside it. Arrows lead
    from a transfer to the next with its tag, also in another recording. A lease is a span.
    """
    records = [it for _, its in recordings for it in its]
    origin = min((it.time for it in records), default=0.0)
    pids = _pids([it for it, _ in recordings])
    events: list[dict[str, Any]] = []
    slices: list[tuple[TransferRecord, dict[str, Any]]] = []
    for (recording, its), pid in zip(recordings, pids, strict=True):
        head = recording.header
        title = f"cluster {head.cluster_id} ({head.role}) pid {head.pid} on {head.host}"
        events.append(_name("process_name", pid, 0, title))
        events.append(_name("thread_name", pid, _EVENTS, "links, leases, caches"))
        found = [*_slices([it for it in its if isinstance(it, TransferRecord)], pid, origin)]
        events += [event for _, event in found]
        slices += [(transfer, event) for transfer, event in found if transfer is not None]
        events += _others(its, pid, origin)
    events += _flows(slices)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"began": origin, "written_by": "kvplan trace --perfetto"},
    }


def _pids(recordings: Sequence[Recording]) -> list[int]:
    """The processes' own, where they are different."""
    pids = [it.header.pid for it in recordings]
    return pids if len(set(pids)) == len(pids) else [*range(1, len(pids) + 1)]


def _slices(
    transfers: list[TransferRecord], pid: int, origin: float
) -> Iterator[tuple[TransferRecord | None, dict[str, Any]]]:
    """A slice for each transfer, and the names of their tracks."""
    for index, (name, lane) in enumerate(lanes(transfers), _EVENTS + 1):
        yield None, _name("thread_name", pid, index, name)
        for it in lane:
            yield it, _slice(it, pid, index, origin)


def _slice(it: TransferRecord, pid: int, tid: int, origin: float) -> dict[str, Any]:
    label = f"{it.operation} {it.tag}" if it.tag else it.operation
    args = {
        "number": it.number,
        "tag": it.tag,
        "peer": it.peer,
        "cache": it.cache_id,
        "blocks": it.blocks,
        "bytes": it.nbytes,
        "leases": [*it.leases],
        "status": it.status.name,
    }
    if it.error:
        args["error"] = it.error
    return {
        "name": label,
        "cat": "failed" if it.failed else it.verb,
        "ph": "X",
        "ts": _us(it.time - origin),
        "dur": _us(it.seconds),
        "pid": pid,
        "tid": tid,
        "args": args,
    } | ({"cname": "terrible"} if it.failed else {})


class _Tracks:
    """The tracks of one peer and operation; each transfer goes into the first that is free."""

    def __init__(self) -> None:
        self.lanes: list[list[TransferRecord]] = []
        self._free: list[int] = []  # heap of track numbers
        self._busy: list[tuple[float, int]] = []  # heap of ends, each with its track

    def add(self, transfer: TransferRecord) -> None:
        """Add a transfer that begins no earlier than those before."""
        while self._busy and self._busy[0][0] <= transfer.time:
            heappush(self._free, heappop(self._busy)[1])
        if self._free:
            number = heappop(self._free)
            self.lanes[number].append(transfer)
        else:
            number = len(self.lanes)
            self.lanes.append([transfer])
        heappush(self._busy, (transfer.time + transfer.seconds, number))


def lanes(transfers: Iterable[TransferRecord]) -> list[tuple[str, list[TransferRecord]]]:
    """Tracks: of one peer and operation each, in which no two transfers overlap."""
    tracks: dict[tuple[int, str], _Tracks] = {}
    for transfer in sorted(transfers, key=lambda transfer: transfer.time):
        peer = -1 if transfer.peer is None else transfer.peer
        tracks.setdefault((peer, transfer.operation), _Tracks()).add(transfer)
    named = []
    for (peer, operation), of_kind in sorted(tracks.items()):
        where = "this process" if peer < 0 else f"cluster {peer}"
        for number, lane in enumerate(of_kind.lanes, 1):
            named.append((f"{where}: {operation}" + (f" ({number})" if number > 1 else ""), lane))
    return named


def _others(records: Iterable[AnyRecord], pid: int, origin: float) -> Iterator[dict[str, Any]]:
    """Instants, and of leases spans."""
    open_leases: set[int] = set()
    for it in records:
        base = {"ts": _us(it.time - origin), "pid": pid, "tid": _EVENTS}
        if isinstance(it, Dropped):
            yield base | {"name": "rows are missing", "ph": "i", "s": "p", "cat": "failed"}
        elif isinstance(it, Event):
            lease = it.fields.get("lease")
            if it.operation in ("lease", "release") and isinstance(lease, int):
                begins = it.operation == "lease"
                if begins:
                    open_leases.add(lease)
                elif lease not in open_leases:
                    continue  # it was made before
                tag = it.fields.get("tag")
                yield base | {
                    "name": f"lease {lease}{f' of {tag}' if tag else ''}",
                    "cat": "lease",
                    "ph": "b" if begins else "e",
                    "id": f"{pid}.{lease}",
                    "args": {**it.fields} if begins else {},
                }
                continue
            yield base | {
                "name": _event_name(it),
                "cat": "failed" if it.failed else "engine",
                "ph": "i",
                "s": "t",
                "args": {**it.fields} | {"status": it.status.name, "error": it.error},
            }


def _event_name(it: Event) -> str:
    if it.operation == "link_state":
        return f"cluster {it.fields.get('peer')} {it.fields.get('state')}"
    return it.operation


def _flows(slices: list[tuple[TransferRecord, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Arrows between the transfers of one request."""
    last: dict[str, dict[str, Any]] = {}
    number = 0
    for it, event in sorted(slices, key=lambda it: (it[1]["ts"], it[1]["pid"], it[1]["tid"])):
        if not it.tag:
            continue
        before = last.get(it.tag)
        if before is not None:
            number += 1
            flow = {"name": "request", "cat": "request", "id": number}
            for phase, at in (("s", before), ("f", event)):
                place = {name: at[name] for name in ("pid", "tid", "ts")}
                yield flow | place | {"ph": phase} | ({"bp": "e"} if phase == "f" else {})
        last[it.tag] = event


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
