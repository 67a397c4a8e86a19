"""Recordings as one page of HTML that needs nothing else: timeline, list, each plan as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any, Final

from kvplan.recording.format import PartRow
from kvplan.recording.perfetto import lanes
from kvplan.recording.records import AnyRecord, Dropped, Event, Recording, Transfer
from kvplan.status import LLMException

MAX_TRANSFERS: Final = 20_000
"""On a page: more take a browser too long. The newest are shown."""

_MAX_PLANS: Final = 4 << 20  # characters of their texts


def page_of(recordings: Sequence[tuple[Recording, Sequence[AnyRecord]]]) -> str:
    """Return the page of recordings, of each the records that are given."""
    records = [it for _, its in recordings for it in its]
    origin = min((it.time for it in records), default=0.0)
    plans = _Plans()
    tracks: list[str] = []
    transfers: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    of_one = len(recordings) == 1
    for recording, its in recordings:
        head = recording.header
        process = f"cluster {head.cluster_id}, process {head.pid} on {head.host}"
        given = [it for it in its if isinstance(it, Transfer)][-MAX_TRANSFERS:]
        for name, lane in lanes(given):
            title = name if of_one else f"{head.cluster_id} · {name}"
            transfers += [_transfer(it, process, len(tracks), origin, plans) for it in lane]
            tracks.append(title)
        events += [
            _event(it, origin, head.cluster_id) for it in its if not isinstance(it, Transfer)
        ]
    transfers.sort(key=lambda it: float(it["at"]))
    for number, it in enumerate(transfers):
        it["id"] = number
    count = sum(isinstance(it, Transfer) for it in records)
    document = {
        "title": "; ".join(
            f"Cluster {it.header.cluster_id} ({it.header.role})" for it, _ in recordings
        ),
        "subtitle": _subtitle(recordings, count, len(transfers), origin),
        "tracks": tracks,
        "transfers": transfers,
        "events": events,
        "plans": plans.texts,
    }
    # In a script nothing may look like the end of it.
    text = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    template = files("kvplan.recording").joinpath("timeline.html").read_text("utf-8")
    return template.replace("{{DATA}}", text)


class _Plans:
    """Texts of plans, each once, as long as there is room."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._of_parts: dict[tuple[PartRow, ...], int] = {}
        self._known: dict[str, int] = {}
        self._room = _MAX_PLANS

    def of(self, it: Transfer) -> int | None:
        """Where the text of its plan is; None: it has none."""
        if not it.parts:
            return None
        number = self._of_parts.get(it.parts)
        if number is None:
            text = self._text(it)
            number = self._known.setdefault(text, len(self.texts))
            if number == len(self.texts):
                self.texts.append(text)
                self._room -= len(text)
            self._of_parts[it.parts] = number
        return number

    def _text(self, it: Transfer) -> str:
        if self._room <= 0:
            return "There is no room for more plans here: kvplan trace FILE --plan N shows it."
        try:
            plan = it.plan
        except LLMException as error:
            return f"its plan cannot be read: {error}"
        return "no plan" if plan is None else plan.explain()


def _transfer(
    it: Transfer, process: str, track: int, origin: float, plans: _Plans
) -> dict[str, Any]:
    return {
        "number": it.number,
        "process": process,
        "track": track,
        "at": round((it.time - origin) * 1e3, 4),
        "ms": round(it.seconds * 1e3, 4),
        "when": _clock(it.time),
        "operation": it.operation,
        "verb": it.verb,
        "peer": it.peer,
        "tag": it.tag,
        "blocks": it.blocks,
        "bytes": it.nbytes,
        "leases": [*it.leases],
        "failed": it.failed,
        "status": it.status.name,
        "error": it.error,
        "plan": plans.of(it),
    }


def _event(it: Event | Dropped, origin: float, cluster_id: int) -> dict[str, Any]:
    if isinstance(it, Dropped):
        text, failed = "rows are missing here", True
    else:
        fields = " ".join(f"{name}={value}" for name, value in it.fields.items())
        text, failed = f"{it.operation} {fields} {it.error}".strip(), it.failed
    at = round((it.time - origin) * 1e3, 4)
    return {"at": at, "text": f"cluster {cluster_id}: {text}", "failed": failed}


def _subtitle(
    recordings: Sequence[tuple[Recording, Sequence[AnyRecord]]],
    count: int,
    shown: int,
    origin: float,
) -> str:
    processes = ", ".join(f"process {it.header.pid} on {it.header.host}" for it, _ in recordings)
    left_out = f", of which the last {shown:,} are shown" if shown < count else ""
    return f"{processes}; from {_clock(origin)} on; {count:,} transfers{left_out}"


def _clock(when: float) -> str:
    return datetime.fromtimestamp(when).astimezone().isoformat(" ", "milliseconds")
