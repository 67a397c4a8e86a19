"""Records made by hand: their whole trace, every combination of conditions, and their texts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvplan import LLMStatusCode
from kvplan.recording import select
from kvplan.recording.format import Header, PartRow
from kvplan.recording.perfetto import trace_of
from kvplan.recording.records import AnyRecord, Dropped, Event, Recording, TransferRecord, Write

OK, FAILED, CANCELLED = (
    LLMStatusCode.LLM_SUCCESS,
    LLMStatusCode.LLM_FAILED,
    LLMStatusCode.LLM_CANCELLED,
)
BEGAN = 1000.0


def header(cluster_id: int, pid: int) -> Header:
    return Header("ab" * 8, 0, "1", "node", pid, cluster_id, "MIX", BEGAN, 0.0)


def transfer(number: int, after: float, seconds: float, **fields: Any) -> TransferRecord:
    known = {
        "operation": "pull_blocks",
        "cluster_id": 3,
        "peer": 7,
        "cache_id": 1,
        "tag": "",
        "leases": (),
        "status": OK,
        "error": "",
        "nbytes": 64,
        "parts": (),
    }
    return TransferRecord(
        number,
        BEGAN + after,
        seconds,
        **(known | fields),
        _templates={},
    )


def event(number: int, after: float, operation: str, error: str = "", **fields: Any) -> Event:
    status = FAILED if error else OK
    return Event(number, BEGAN + after, 0.0, operation, status, error, fields)


def args(record: TransferRecord, **more: object) -> dict[str, object]:
    return {
        "number": record.number,
        "tag": record.tag,
        "peer": record.peer,
        "cache": record.cache_id,
        "blocks": 0,
        "bytes": record.nbytes,
        "leases": [*record.leases],
        "status": record.status.name,
    } | more


@pytest.mark.parametrize(
    ("pids", "shown"), [((50, 60), (50, 60)), ((50, 50), (1, 2))], ids=["two", "same number"]
)
def test_the_whole_trace_of_two_processes(pids: tuple[int, int], shown: tuple[int, int]) -> None:
    """Processes on two hosts may have the same pid; the trace then gives them other numbers."""
    first = [
        transfer(0, 2.0, 0.5, tag="a", leases=(4, 5)),
        transfer(1, 2.25, 1.0, status=FAILED, error="no link", nbytes=0),  # overlaps the first
        transfer(2, 2.5, 0.25, peer=None, operation="copy_blocks", tag="a"),
        transfer(3, 3.0, 0.25, peer=2, operation="notify", status=CANCELLED, error="stopped"),
        event(4, 1.5, "lease", lease=9, tag="a"),
        event(5, 4.0, "release", lease=9),
        event(6, 4.0, "release", lease=8),  # the lease is older than these records
        event(7, 1.0, "link_state", peer=7, state="LINKED"),
        event(8, 1.0, "link_state", "gone", peer=7, state="BROKEN"),
        event(9, 1.25, "lease_moved", lease=9),
        event(10, 1.25, "lease", lease="a text"),
        Dropped(11, BEGAN + 5, 3),
    ]
    second = [
        transfer(0, 2.125, 0.5, cluster_id=4, tag="a"),
        transfer(1, 6.0, 0.5, cluster_id=4, tag="b"),
        event(2, 7.0, "lease", lease=9),
    ]
    one, two = shown
    found = trace_of(
        [
            (Recording(Path("x"), header(3, pids[0]), first, True), first),
            (Recording(Path("y"), header(4, pids[1]), second, True), second),
        ]
    )

    def named(pid: int, tid: int, name: str) -> dict[str, Any]:
        what = "thread_name" if tid else "process_name"
        return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}

    def piece(
        pid: int, tid: int, ts: float, dur: float, name: str, cat: str, its_args: dict[str, Any]
    ) -> dict[str, Any]:
        fields = {"name": name, "cat": cat, "ph": "X", "ts": ts, "dur": dur, "pid": pid}
        color = {"cname": "terrible"} if cat == "failed" else {}
        return fields | {"tid": tid, "args": its_args} | color

    def instant(pid: int, ts: float, name: str, **fields: Any) -> dict[str, Any]:
        cat = "failed" if fields.get("error") else "engine"
        at = {"ts": ts, "pid": pid, "tid": 1, "name": name, "cat": cat, "ph": "i", "s": "t"}
        error = fields.pop("error", "")
        status = {"status": "LLM_FAILED" if error else "LLM_SUCCESS", "error": error}
        return at | {"args": fields | status}

    def span(pid: int, ts: float, phase: str, name: str, **fields: Any) -> dict[str, Any]:
        at = {"ts": ts, "pid": pid, "tid": 1, "name": name, "cat": "lease", "ph": phase}
        return at | {"id": f"{pid}.9", "args": fields}

    def arrow(number: int, phase: str, pid: int, tid: int, ts: float) -> dict[str, Any]:
        flow = {"name": "request", "cat": "request", "id": number, "ph": phase}
        ends = {"bp": "e"} if phase == "f" else {}
        return flow | {"pid": pid, "tid": tid, "ts": ts} | ends

    pulls, failing, copy, notify = first[:4]
    far, last = second[:2]
    assert isinstance(pulls, TransferRecord)
    expected = [
        named(one, 0, f"cluster 3 (MIX) pid {pids[0]} on node"),
        named(one, 1, "links, leases, caches"),
        named(one, 2, "this process: copy_blocks"),
        piece(one, 2, 1.5e6, 0.25e6, "copy_blocks a", "copy", args(copy)),
        named(one, 3, "cluster 2: notify"),
        piece(one, 3, 2e6, 0.25e6, "notify", "notify", args(notify, error="stopped")),
        named(one, 4, "cluster 7: pull_blocks"),
        piece(one, 4, 1e6, 0.5e6, "pull_blocks a", "pull", args(pulls)),
        named(one, 5, "cluster 7: pull_blocks (2)"),
        piece(one, 5, 1.25e6, 1e6, "pull_blocks", "failed", args(failing, error="no link")),
        span(one, 0.5e6, "b", "lease 9 of a", lease=9, tag="a"),
        span(one, 3e6, "e", "lease 9"),
        instant(one, 0, "cluster 7 LINKED", peer=7, state="LINKED"),
        instant(one, 0, "cluster 7 BROKEN", peer=7, state="BROKEN", error="gone"),
        instant(one, 0.25e6, "lease_moved", lease=9),
        instant(one, 0.25e6, "lease", lease="a text"),
        {"name": "rows are missing", "ph": "i", "s": "p", "cat": "failed", "ts": 4e6}
        | {"pid": one, "tid": 1},
        named(two, 0, f"cluster 4 (MIX) pid {pids[1]} on node"),
        named(two, 1, "links, leases, caches"),
        named(two, 2, "cluster 7: pull_blocks"),
        piece(two, 2, 1.125e6, 0.5e6, "pull_blocks a", "pull", args(far)),
        piece(two, 2, 5e6, 0.5e6, "pull_blocks b", "pull", args(last)),
        span(two, 6e6, "b", "lease 9", lease=9),
        arrow(1, "s", one, 4, 1e6),
        arrow(1, "f", two, 2, 1.125e6),
        arrow(2, "s", two, 2, 1.125e6),
        arrow(2, "f", one, 2, 1.5e6),
    ]
    assert found.pop("otherData")["began"] == BEGAN + 1
    assert found == {"traceEvents": expected, "displayTimeUnit": "ms"}


CONDITIONS: list[tuple[dict[str, Any], Callable[[Any], bool]]] = [
    ({}, lambda row: True),
    ({"tag": "a"}, lambda row: tag(row) == "a"),
    ({"tag": "a*"}, lambda row: tag(row)[:1] == "a"),
    ({"tag": ""}, lambda row: not tag(row)),
    ({"cluster": 0}, lambda row: peer(row) == 0),
    ({"cluster": 7}, lambda row: peer(row) == 7),
    ({"operation": "pull"}, lambda row: row.operation in ("pull_blocks", "gather_blocks")),
    ({"operation": "lease"}, lambda row: row.operation == "lease"),
    ({"since": BEGAN + 2}, lambda row: row.time - BEGAN >= 2),
    ({"until": BEGAN + 2}, lambda row: row.time - BEGAN <= 2),
    ({"since": 0.0}, lambda row: True),
    ({"until": 0.0}, lambda row: False),
    ({"failed": True}, lambda row: row.status is FAILED),
]


def tag(row: Any) -> str:
    return row.tag if isinstance(row, TransferRecord) else row.fields.get("tag", "")


def peer(row: Any) -> int | None:
    return row.peer if isinstance(row, TransferRecord) else row.fields.get("peer")


def test_a_row_is_selected_if_it_meets_each_condition() -> None:
    names = ("pull_blocks", "gather_blocks", "push_blocks")
    outcomes = ((OK, ""), (FAILED, "why"), (CANCELLED, "why"))
    kinds = product(names, ("", "a", "ab"), (None, 0, 7), outcomes, (1, 2, 3))
    rows: list[AnyRecord] = [
        transfer(0, after, 0.0, operation=name, tag=its_tag, peer=its_peer, status=status)
        for name, its_tag, its_peer, (status, _), after in kinds
    ]
    rows += [
        event(0, after, name, error, peer=its_peer, tag=its_tag)
        for name, its_tag, its_peer, error, after in product(
            ("lease", "pull"), ("a", "b"), (0, 7), ("", "why"), (1, 2, 3)
        )
    ]
    rows += [event(0, 2, "lease"), Dropped(0, BEGAN + 2, 1)]
    rows = [row for row in rows if not (isinstance(row, Event) and row.operation == "pull")]
    for (first, holds), (second, holds_too) in product(CONDITIONS, CONDITIONS):
        if first.keys() & second.keys():
            continue
        wanted = [
            row for row in rows if not isinstance(row, Dropped) and holds(row) and holds_too(row)
        ]
        assert [*select(rows, **first, **second)] == wanted, (first, second)


def test_a_write_says_where_its_bytes_came_from() -> None:
    one = Write(transfer(7, 0.0, 0.0, tag="request 3"), "", 2, 1, (9,), False)
    assert str(one) == "#7 pull_blocks of request 3: from block 9 of cache 1 of cluster 2"
    pushed = transfer(8, 0.0, 0.0, operation="push_blocks", cluster_id=4)
    eight, nine = (", ".join(map(str, range(8))) + more for more in ("", " ..."))
    for count, rows in ((8, eight), (9, nine)):
        many = Write(pushed, "k", None, -1, tuple(range(count)), True)
        where = "of a cache of this engine, part k, a part of it, run by cluster 4"
        assert str(many) == f"#8 push_blocks: from blocks {rows} {where}"
    for status, how in ((FAILED, "failed"), (CANCELLED, "was cancelled")):
        ended = transfer(9, 0.0, 0.0, status=status, error="why", operation="copy_blocks")
        text = str(Write(ended, "", None, 0, (1,), False))
        assert text == (
            f"#9 copy_blocks: from block 1 of cache 0 of this engine; {how}, and may have written "
            "it: why"
        )


def test_a_transfer_is_shown_without_its_block_tables() -> None:
    part = PartRow("", None, 1, bytes(8), bytes(8), None)
    assert repr(transfer(0, 0, 0, parts=(part,))) == repr(transfer(0, 0, 0))


def test_a_recording_counts_its_rows() -> None:
    rows = [transfer(0, 0, 0), event(1, 0, "lease"), Dropped(2, 0, 3), Dropped(3, 0, None)]
    recording = Recording(Path("x"), header(3, 50), rows, False)
    assert [*recording] == rows
    assert (len(recording), recording.dropped) == (4, 3)
    assert (recording.transfers, recording.events) == (rows[:1], rows[1:2])
    assert repr(recording) == ("<Recording of cluster 3, process 50 on node: 1 transfers, 4 rows>")
    verbs = {"gather_groups": "pull", "pull": "pull", "push_layers": "push", "notify": "notify"}
    assert {name: transfer(0, 0, 0, operation=name).verb for name in verbs} == verbs
