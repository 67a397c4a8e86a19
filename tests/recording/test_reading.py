"""Queries of recordings, and traces that are made of them."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import Cache, CacheDesc, DataType, LLMStatusCode, Rows, Transfer
from kvplan.recording import read, select, who_wrote
from kvplan.recording.perfetto import lanes, trace_of
from kvplan.recording.records import rows_written
from kvplan.recording.writer import Recorder
from tests.planning import test_unlike
from tests.recording.operations import Done, Link, record, recorder

DESC = CacheDesc(2, (64, 4, 2, 8), DataType.DT_FLOAT16, kv_tensor_format="NHD")
PLAN = kvplan.plan(Transfer(Rows(DESC, [1, 2, 9]), Rows(DESC, [4, 5, 6])), local="dst")


@pytest.fixture
def recording(tmp_path):
    with recorder(tmp_path / "a.kvrec") as writer:
        for number in range(30):
            tag = f"request {number % 3}"
            record(writer, PLAN, tag, error="no link" if number % 10 == 7 else "")
        writer.event("link_state", 0, 0.0, "", {"peer": 7, "state": "LINKED"})
        writer.event("lease", 0, 0.0, "", {"lease": 4, "blocks": [1], "tag": "request 2"})
        writer.event("release", 0, 0.0, "", {"lease": 4, "blocks": [1], "tag": "request 2"})
        writer.event("release", 0, 0.0, "", {"lease": 1, "blocks": [1], "tag": "</script><b>"})
    return read(tmp_path / "a.kvrec")


def test_rows_are_selected(recording):
    def numbers(**asked) -> list[int]:
        return [item.number for item in select(recording, **asked)]

    assert numbers(tag="request 1") == [*range(1, 30, 3)]
    assert numbers(tag="request*") == [*range(30), 31, 32]
    assert numbers(tag="request") == []
    assert numbers(failed=True) == [7, 17, 27]
    assert numbers(cluster=7) == [*range(31)]
    assert numbers(cluster=8) == []
    assert numbers(operation="pull") == numbers(operation="pull_blocks") == [*range(30)]
    assert numbers(operation="lease") == [31]
    tenth = recording.rows[10].time
    assert numbers(since=tenth, until=tenth) == [10]
    assert numbers(since=tenth, failed=True, tag="request 2") == [17]


def test_the_last_write_belongs_to_the_transfer_that_ended_last(tmp_path):
    """The transfer that began last, and the order of the rows, do not matter."""
    plan = kvplan.plan(Transfer(Rows(DESC, [1]), Rows(Cache(DESC, 1), [4])), local="dst")
    long = Done(plan, tag="long", started=100.0), 3.0
    short = Done(plan, tag="short", started=101.0), 1.0
    for name, order in (("a", (short, long)), ("b", (long, short))):
        with recorder(tmp_path / name) as writer:
            for operation, seconds in order:
                writer.transfer(operation, LLMStatusCode.LLM_SUCCESS, seconds, plan.nbytes, "")
        writes = who_wrote(read(tmp_path / name), 1, 4)
        assert [write.transfer.tag for write in writes] == ["short", "long"]


@pytest.mark.parametrize(
    ("operation", "source"), [("pull_blocks", 7), ("gather_blocks", 7), ("copy_blocks", None)]
)
def test_bytes_of_pulls_and_gathers_came_from_the_peer(tmp_path, operation, source):
    plan = kvplan.plan(Transfer(Rows(DESC, [1]), Rows(Cache(DESC, 1), [4])), local="dst")
    with recorder(tmp_path / "a") as writer:
        done = Done(plan, operation, link=None if source is None else Link(source))
        writer.transfer(done, LLMStatusCode.LLM_SUCCESS, 1e-3, plan.nbytes, "")
    assert [write.source for write in who_wrote(read(tmp_path / "a"), 1, 4)] == [source]


def test_pushes_of_peers_count_from_those_that_went_to_this_engine(tmp_path):
    """A peer pushes into block 4 of cache 1 of two engines; only cluster 3 asks."""
    plan = kvplan.plan(Transfer(Rows(DESC, [1]), Rows(Cache(DESC, 1), [4])))
    with recorder(tmp_path / "own") as writer:
        record(writer, plan, "a pull")
    with Recorder(tmp_path / "peer", 7, "MIX", max_bytes=1 << 20, files=1) as writer:
        for peer in (2, 3, 4, 3):
            done = Done(plan, "push_blocks", f"to {peer}", started=1e9, link=Link(peer))
            writer.transfer(done, LLMStatusCode.LLM_SUCCESS, 1e-3, plan.nbytes, "")
    own, others = read(tmp_path / "own"), [read(tmp_path / "peer")]
    assert [item.transfer.tag for item in who_wrote(own, 1, 4, others)] == [
        "a pull",
        "to 3",
        "to 3",
    ]
    assert [item.transfer.tag for item in who_wrote(own, 1, 4)] == ["a pull"]
    assert [item.transfer.tag for item in who_wrote(own, 2, 4, others)] == []


@given(test_unlike.transfers())
def test_the_writer_of_each_byte_of_a_row_is_known(transfer):
    """A transfer into an array of zeros is the oracle, byte for byte."""
    plan = test_unlike.planned(transfer, True)
    dst = plan.part.dst
    written = np.zeros((dst.num_tensors, dst.tensor_nbytes), bool)
    for index in range(plan.num_tensor_pairs):
        _, (tensor, base) = plan.part.pair(index)
        for run in range(plan.part.segments.num_runs):
            _, offset, nbytes = plan.part.run_at(run)
            written[tensor, base + offset : base + offset + nbytes] = True
    rows = dst.rows
    of_row = defaultdict(list)
    for tensor, byte in np.ndindex(written.shape):
        if byte % dst.stride < dst.row_nbytes:
            of_row[rows(byte, 1)[0]].append(written[tensor, byte])
    for row in range(dst.count):
        found = rows_written(plan.part, row)
        assert (found is not None) == any(of_row[row])
        if found is not None:
            assert found[1] == (not all(of_row[row]))
            assert set(found[0]) <= set(range(plan.part.src.count))


def test_a_trace_conforms_to_its_format(recording):
    trace = json.loads(json.dumps(trace_of([(recording, recording.rows)])))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert_is_a_trace(trace["traceEvents"])
    kinds = [item["ph"] for item in trace["traceEvents"]]
    assert kinds.count("X") == 30
    assert kinds.count("s") == kinds.count("f") == 27  # of three tags
    assert kinds.count("b") == kinds.count("e") == 1  # the other lease is older
    failed = [
        item for item in trace["traceEvents"] if item["ph"] == "X" and "error" in item["args"]
    ]
    assert {item["args"]["number"] for item in failed} == {7, 17, 27}  # by their tracks


def test_a_trace_has_each_event_in_its_order(tmp_path):
    """A lease comes first, and another event only names the lease."""
    with recorder(tmp_path / "a.kvrec") as writer:
        for name in ("lease", "move", "release"):
            writer.event(name, 0, 0.0, "", {"lease": 4, "tag": "mine"})
    recording = read(tmp_path / "a.kvrec")
    events = trace_of([(recording, recording.rows)])["traceEvents"]
    assert [(item["ph"], item["name"]) for item in events if item["ph"] != "M"] == [
        ("b", "lease 4 of mine"),
        ("i", "move"),
        ("e", "lease 4 of mine"),
    ]


def assert_is_a_trace(events: list[dict]) -> None:
    """Check that events conform to the Trace Event Format, for these phases."""
    names, spans = {}, defaultdict(list)
    flows: dict[int, list[dict]] = defaultdict(list)
    slices = defaultdict(list)
    for event in events:
        assert {"name", "ph", "pid", "tid", "ts"} <= event.keys()
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0 or event["ph"] == "M"
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "thread_name")
                names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
            case "X":
                assert event["dur"] >= 0
                slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "i":
                assert event["s"] in ("g", "p", "t")
            case "b" | "e":
                assert "cat" in event
                spans[event["cat"], event["id"]].append(event["ph"])
            case "s" | "f":
                flows[event["id"]].append(event)
            case other:
                raise AssertionError(other)
    for (pid, tid), found in slices.items():
        assert names["thread_name", pid, tid]
        assert names["process_name", pid, 0]
        found.sort()
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(found))
    assert all(phases == ["b", "e"] for phases in spans.values())
    for begin, end in flows.values():
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert begin["ts"] <= end["ts"]
        for event in (begin, end):  # bound to the slice around its beginning
            at = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= stop for start, stop in at)


def test_overlapping_transfers_have_different_tracks(tmp_path):
    with recorder(tmp_path / "a.kvrec") as writer:
        for _ in range(4):  # each takes 1 ms, and the next begins within it
            record(writer, PLAN)
    recording = read(tmp_path / "a.kvrec")
    events = trace_of([(recording, recording.rows)])["traceEvents"]
    assert_is_a_trace(events)
    tracks = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert tracks[1] == "cluster 7: pull_blocks"
    assert tracks[2] == "cluster 7: pull_blocks (2)"


class Counted(float):
    """A time that counts its comparisons."""

    compared = 0

    def __lt__(self, other):
        Counted.compared += 1
        return float(self) < float(other)

    __le__ = __lt__

    def __add__(self, other):
        return Counted(float(self) + float(other))


def test_overlapping_transfers_get_tracks_in_few_steps(recording):
    count = 4000
    first = recording.transfers[0]
    Counted.compared = 0
    found = lanes(replace(first, time=Counted(start), seconds=count) for start in range(count))
    assert [len(lane) for _, lane in found] == [1] * count
    assert Counted.compared < 40 * count  # comparing all pairs takes 2,000 * count


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=30))
def test_transfers_of_a_track_do_not_overlap_and_tracks_are_few(times):
    class Timed:
        peer, operation = 7, "pull_blocks"

        def __init__(self, time, seconds):
            self.time, self.seconds = time, seconds

    made = [Timed(*values) for values in times]
    found = [lane for _, lane in lanes(made)]
    assert sorted(map(id, made)) == sorted(id(one) for lane in found for one in lane)
    for lane in found:
        assert all(a.time + a.seconds <= b.time for a, b in pairwise(lane))
    most: list[list[Timed]] = []  # the first free track is the optimal choice
    for timed in sorted(made, key=lambda timed: timed.time):
        free = [lane for lane in most if lane[-1].time + lane[-1].seconds <= timed.time]
        (free[0] if free else most.append([]) or most[-1]).append(timed)
    assert len(found) == len(most)
