"""Recordings of engines in two processes: operations, tags, and the variable KVPLAN_RECORD."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvplan import (
    BlockLease,
    Cache,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    LLMException,
    LlmRole,
    LLMStatusCode,
    Rows,
    Transfer,
)
from kvplan.recording import read, select, who_wrote
from kvplan.recording.records import OPERATIONS
from tests.support.refusals import refused

DESC = CacheDesc(4, (64, 4, 2, 8), DataType.DT_FLOAT16, kv_tensor_format="NHD")
DEADLINE_S = 60


def theirs(peer) -> CacheIndex:
    cache_id = peer.run(
        "cache = datadist.allocate_blocks_cache(desc); result = cache.cache_id", desc=DESC
    )
    return CacheIndex(1, cache_id)


def test_every_operation_is_recorded_with_its_plan(tmp_path, user, peer):
    there, here = theirs(peer), user.allocate_blocks_cache(DESC)
    slots = user.allocate_cache(DESC)
    planned = []
    user.on_plan(lambda event: planned.append((event.operation, event.tag, event.plan)))
    layers = KvCacheExtParam(tensor_num_per_layer=2)
    with user.record(tmp_path / "a.kvrec"):
        user.pull_blocks(there, here, [1, 2], [3, 4], tag="pull")
        user.pull_blocks(there, here, [1, 2], [3, 4], num_tokens=5, src_token=1, tag="some tokens")
        user.push_blocks(here, there, [5], [6], tag="push")
        user.submit(Transfer(Rows(there, [7]), Rows(here, [8])), tag="submitted").wait()
        user.submit(Transfer(Rows(here, [7]), Rows(there, [8])), tag="submitted push").wait()
        groups = {
            "a": Transfer(Rows(there, [1]), Rows(here, [9])),
            "b": Transfer(Rows(there, [2]), Rows(here, [10])),
        }
        user.run(groups, tag="groups")
        user.submit(groups, tag="submitted groups").wait()
        back = {name: Transfer(group.dst, group.src) for name, group in groups.items()}
        user.run(back, tag="pushed groups")
        user.submit(back, tag="submitted pushed groups").wait()
        user.run(Transfer([Rows(there, [1])], Rows(here, [11])), tag="gather")
        user.submit(Transfer([Rows(there, [1])], Rows(here, [11])), tag="submitted gather").wait()
        gathered = {"a": Transfer([Rows(there, [1])], Rows(here, [12]))}
        user.run(gathered, tag="gather groups")
        user.submit(gathered, tag="submitted gather groups").wait()
        for src, dst in ((here, there), (there, here), (here, here)):
            task = user.layered(Transfer(Rows(src, [1]), Rows(dst, [2]), layers=layers), tag="L")
            for layer in task.layers:
                task.ready(layer)
            task.wait()
        user.run({"own": Transfer(Rows(here, [1]), Rows(here, [2]))}, tag="own groups")
        user.copy_cache(slots, slots, 1, 2, tag="copy")
        user.submit(Transfer(Rows(slots, slot=1), Rows(slots, slot=2)), tag="submitted copy").wait()
        user.copy_blocks(here, {1: [2, 3]}, tag="copies")
        user.submit(Transfer(Rows(here, [1, 1]), Rows(here, [2, 3])), tag="submitted copies").wait()
    recording = read(tmp_path / "a.kvrec")
    assert recording.complete
    assert [transfer.plan for transfer in recording.transfers] == [plan for *_, plan in planned]
    assert [(transfer.operation, transfer.tag) for transfer in recording.transfers] == [
        item[:2] for item in planned
    ]
    assert len(recording.transfers) == 21
    assert {transfer.operation for transfer in recording.transfers} - OPERATIONS == set()
    for transfer, (*_, plan) in zip(recording.transfers, planned, strict=True):
        local = transfer.operation.startswith("copy")
        assert transfer.status is LLMStatusCode.LLM_SUCCESS
        assert (transfer.cluster_id, transfer.peer) == (2, None if local else 1)
        assert transfer.nbytes == plan.nbytes
        assert 0 < transfer.seconds < DEADLINE_S
        assert abs(transfer.time - time.time()) < DEADLINE_S


def test_slots_and_swaps_are_recorded(tmp_path, user, peer):
    cache_id = peer.run("slots = datadist.allocate_cache(desc); result = slots.cache_id", desc=DESC)
    slots = user.allocate_cache(DESC)
    with user.record(tmp_path / "a.kvrec"):
        user.pull_cache(CacheIndex(1, cache_id, 3), slots, 5, tag="pulled")
        user.push_cache(slots, CacheIndex(1, cache_id, 4), 5, tag="pushed")
        user.submit(Transfer(Rows(CacheIndex(1, cache_id, 3)), Rows(slots, slot=5)), tag="p").wait()
        user.submit(Transfer(Rows(slots, slot=5), Rows(CacheIndex(1, cache_id, 4))), tag="q").wait()
    recording = read(tmp_path / "a.kvrec")
    assert [transfer.tag for transfer in recording.transfers] == ["pulled", "pushed", "p", "q"]
    writes = who_wrote(recording, slots.cache_id, 5)
    assert [
        (write.transfer.tag, write.source, write.src_cache, write.src_rows) for write in writes
    ] == [
        ("pulled", 1, cache_id, (3,)),
        ("p", 1, cache_id, (3,)),
    ]
    assert not any(write.partial for write in writes)
    assert who_wrote(recording, slots.cache_id, 4) == []


def test_a_failure_is_recorded_with_its_reason(tmp_path, user, peer):
    there, here = theirs(peer), user.allocate_blocks_cache(DESC)
    with user.record(tmp_path / "a.kvrec"):
        with refused("LLM_PARAM_INVALID"):
            user.pull_blocks(there, here, [64], [3], tag="no such block")
        with refused("LLM_KV_CACHE_NOT_EXIST"):
            user.pull_blocks(CacheIndex(1, 99), here, [1], [3], tag="no such cache")
        with pytest.raises(TypeError):
            user.pull_blocks(there, here, "12", [3], tag="no blocks")
    recording = read(tmp_path / "a.kvrec")
    assert [(item.tag, item.status.name) for item in select(recording, failed=True)] == [
        ("no such block", "LLM_PARAM_INVALID"),
        ("no such cache", "LLM_KV_CACHE_NOT_EXIST"),
        ("no blocks", "LLM_PARAM_INVALID"),
    ]
    assert "64" in recording.transfers[0].error
    assert [transfer.plan for transfer in recording.transfers] == [None] * 3


def test_links_and_leases_are_recorded(tmp_path, peer):
    peer.run("it = datadist.record(path)", path=str(tmp_path / "peer.kvrec"))
    blob = peer.run(
        """
        cache = datadist.allocate_blocks_cache(desc)
        lease = datadist.lease_blocks(cache, [4, 5], tag="request 8", ttl_ms=100_000)
        result = lease.to_bytes()
        """,
        desc=DESC,
    )
    lease = BlockLease.from_bytes(blob)
    with LlmDataDist(2, LlmRole.DECODER) as user:
        user.initialize()
        recorder = user.record(tmp_path / "user.kvrec")
        user.link_clusters([ClusterInfo(1, peer.address)], timeout_ms=5000).raise_for_status()
        here = user.allocate_blocks_cache(DESC)
        for _ in range(3):  # the last one moves without an operation
            user.pull_blocks(lease, here, None, [1, 2], tag="request 8")
        peer.run("(lease,) = datadist.moved(lease, {5: 6}); datadist.release(lease)")
        with refused("LLM_KV_CACHE_NOT_EXIST"):
            user.pull_blocks(lease, here, None, [1, 2], tag="request 8")
        peer.run("it.flush()")
        peer.kill()
        deadline = time.monotonic() + DEADLINE_S

        def states() -> list[str]:
            recorder.flush()
            events = read(recorder.path).events
            return [row.fields["state"] for row in events if row.operation == "link_state"]

        while "BROKEN" not in states():
            assert time.monotonic() < deadline
    recording = read(tmp_path / "user.kvrec")
    assert recording.complete  # finalize has written the rest
    assert [transfer.leases for transfer in recording.transfers] == [(1,)] * 4
    assert states() == ["LINKED", "BROKEN"]
    assert [event.operation for event in recording.events][:2] == ["link_state", "link_clusters"]
    theirs = read(tmp_path / "peer.kvrec")
    kinds = "lease", "lease_moved", "release"
    found = {event.operation: event for event in theirs.events if event.operation in kinds}
    assert found["lease"].fields["blocks"] == [4, 5]
    assert found["lease"].fields["tag"] == found["release"].fields["tag"] == "request 8"
    assert found["lease_moved"].fields["blocks"] == [4, 6]
    assert found["release"].fields["end"] == "released"
    assert not theirs.complete  # it was killed
    assert [item.operation for item in select(theirs, tag="request*")] == [*kinds]


def test_the_writers_of_a_block_are_recorded(tmp_path, user, peer):
    """Writers are pulls and copies of the own process, and pushes of a peer."""
    there, here = theirs(peer), user.allocate_blocks_cache(DESC)
    peer.run(
        "it = datadist.record(path); ours = datadist.allocate_blocks_cache(desc)",
        path=str(tmp_path / "peer.kvrec"),
        desc=DESC,
    )
    with user.record(tmp_path / "user.kvrec") as recorder:
        user.pull_blocks(there, here, [1, 2], [3, 4], tag="first")
        user.pull_blocks(there, here, [1, 2, 3], [7, 8, 9], num_tokens=6, tag="some of it")
        user.copy_blocks(here, {3: [9, 10]}, tag="copied")
        user.pull_blocks(there, here, [9], [11], tag="another block")
        peer.run(
            "datadist.push_blocks(ours, CacheIndex(2, cache_id), [5, 6], [8, 9], tag='pushed')",
            cache_id=here.cache_id,
        )
        recorder.flush()
        peer.run("it.flush()")
        both = read(tmp_path / "user.kvrec"), read(tmp_path / "peer.kvrec")

        def tags_of(block: int) -> list[tuple[str, tuple[int, ...], bool]]:
            writes = who_wrote(both[0], here.cache_id, block, both[1:])
            return [(write.transfer.tag, write.src_rows, write.partial) for write in writes]

        assert tags_of(3) == [("first", (1,), False)]
        assert tags_of(8) == [("some of it", (2,), True), ("pushed", (5,), False)]
        assert tags_of(9) == [("copied", (3,), False), ("pushed", (6,), False)]
        assert tags_of(10) == [("copied", (3,), False)]
        assert tags_of(12) == []
        assert who_wrote(both[0], here.cache_id + 1, 3) == []
        with refused("LLM_PARAM_INVALID", "is of cluster 2 itself"):
            who_wrote(both[0], here.cache_id, 3, [both[0]])
        with pytest.raises(TypeError):
            who_wrote(both[0], "3", 3)


def test_a_process_that_is_killed_leaves_whole_rows(tmp_path, peer):
    peer.send(
        """
        from itertools import count
        cache = datadist.allocate_blocks_cache(desc)
        datadist.record(path)
        for number in count():
            datadist.copy_blocks(cache, {1: [2, 3]}, tag=f"{number}")
        """,
        path=str(tmp_path / "a.kvrec"),
        desc=DESC,
    )
    deadline = time.monotonic() + DEADLINE_S
    path = tmp_path / "a.kvrec"
    while not path.exists() or path.stat().st_size == 0:  # the header is written at once
        assert time.monotonic() < deadline
    while len(read(path)) <= 2000:
        assert time.monotonic() < deadline
    peer.kill()
    recording = read(tmp_path / "a.kvrec")
    assert not recording.complete
    found = [int(transfer.tag) for transfer in recording.transfers]
    assert found == [*range(len(found))]
    assert len(found) > 1900
    assert recording.transfers[-1].plan.operation == "copy_blocks"


def test_operations_of_eight_threads_are_recorded_once_each(tmp_path, engine):
    """Operations run or are submitted, files rotate, and the rows equal the counters."""
    cache = engine.allocate_blocks_cache(DESC)

    def work(thread: int) -> None:
        for number in range(150):
            read, written = 8 * thread + number % 7, 8 * thread + 7
            transfer = Transfer(Rows(cache, [read]), Rows(cache, [written]))
            if number % 2:
                engine.run(transfer, tag=f"{thread}.{number}")
            else:
                engine.submit(transfer, tag=f"{thread}.{number}").wait()

    with engine.record(tmp_path / "a.kvrec", max_bytes=64 << 10, files=100):
        with ThreadPoolExecutor(8) as threads:
            assert [*threads.map(work, range(8))] == [None] * 8
        deadline = time.monotonic() + DEADLINE_S
        while engine.metrics()["operations"]["copy_blocks"]["seconds"]["count"] < 1200:
            assert time.monotonic() < deadline  # an outcome is counted after the end of its wait
    recording = read(tmp_path / "a.kvrec")
    expected = {f"{thread}.{number}" for thread in range(8) for number in range(150)}
    assert {transfer.tag for transfer in recording.transfers} == expected
    assert len(recording.transfers) == len(expected)
    for record in recording.transfers:
        thread, number = map(int, record.tag.split("."))
        tables = record.plan.part.tables
        assert (tables.src.tolist(), tables.dst.tolist()) == (
            [8 * thread + number % 7],
            [8 * thread + 7],
        )


def test_an_engine_is_recorded_once_at_a_time(tmp_path, engine):
    first = engine.record(tmp_path / "a.kvrec")
    with refused("LLM_PARAM_INVALID", rf"cluster 3 is being recorded to {tmp_path}/a.kvrec"):
        engine.record(tmp_path / "b.kvrec")
    first.close()
    first.close()
    assert first.ended
    engine.record(tmp_path / "b.kvrec").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.kvrec", "b.kvrec"]


def test_engines_that_do_not_run_are_not_recorded(tmp_path):
    engine = LlmDataDist(3, LlmRole.MIX)
    with refused("LLM_FAILED", "is not initialized"):
        engine.record(tmp_path / "a.kvrec")
    engine.initialize()
    engine.finalize()
    with refused("LLM_ENGINE_FINALIZED"):
        engine.record(tmp_path / "a.kvrec")
    assert not [*tmp_path.iterdir()]


FORKED = """
import os, sys
from kvplan import CacheDesc, DataType, LlmDataDist, LLMException, LlmRole

with LlmDataDist(1, LlmRole.MIX) as engine:
    engine.initialize()
    cache = engine.allocate_blocks_cache(CacheDesc(1, (64, 16), DataType.DT_FLOAT))
    engine.copy_blocks(cache, {1: [2]}, tag="parent")
    if not (child := os.fork()):
        try:
            engine.copy_blocks(cache, {1: [2]}, tag="child")
        except LLMException:
            with LlmDataDist(2, LlmRole.MIX) as own:
                own.initialize()
                mine = own.allocate_blocks_cache(CacheDesc(1, (64, 16), DataType.DT_FLOAT))
                own.copy_blocks(mine, {1: [2]}, tag="child's own")
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    engine.copy_blocks(cache, {1: [2]}, tag="parent again")
"""


def test_the_environment_names_a_folder(tmp_path):
    """Each engine of each process has its own file, also in forked children."""
    folder = tmp_path / "not" / "there"
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        env=os.environ | {"KVPLAN_RECORD": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {path.header.cluster_id: path for path in map(read, folder.iterdir())}
    assert {
        name: [row.tag for row in recording.transfers] for name, recording in found.items()
    } == {
        1: ["parent", "parent again"],
        2: ["child's own"],
    }
    for cluster_id, recording in found.items():
        assert recording.complete
        name = recording.path.name
        assert name.startswith(f"kvplan-{cluster_id}-{recording.header.pid}-20")
        assert name.endswith(".kvrec")
    assert found[1].header.pid != found[2].header.pid


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    file = tmp_path / "file"
    file.touch()
    script = """
import logging, sys
logging.basicConfig(stream=sys.stdout)
from kvplan import LlmDataDist, LlmRole
with LlmDataDist(1, LlmRole.MIX) as engine:
    engine.initialize()
    engine.links()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"KVPLAN_RECORD": str(file / "folder")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"KVPLAN_RECORD={file}/folder: cluster 1 is not recorded" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_tags_are_logged_and_checked(tmp_path, engine, caplog):
    cache = engine.allocate_blocks_cache(DESC)
    with caplog.at_level(logging.INFO, "kvplan"):
        engine.copy_blocks(cache, {1: [2]}, tag="request 9")
        engine.copy_blocks(cache, {1: [2]})
    said = [
        record.getMessage() for record in caplog.records if "copy_blocks" in record.getMessage()
    ]
    assert 'tag="request 9"' in said[0]
    assert "tag=" not in said[1]
    engine.copy_blocks(cache, {1: [2]}, tag="x" * 128)
    for tag in ("x" * 129, "two\nlines", "\ud800"):
        with refused("LLM_PARAM_INVALID", "at most 128 printable characters"):
            engine.copy_blocks(cache, {1: [2]}, tag=tag)
    with pytest.raises(TypeError, match="tag"):
        engine.copy_blocks(cache, {1: [2]}, tag=None)


def test_an_error_of_any_text_is_recorded(tmp_path, engine):
    cache = engine.allocate_blocks_cache(DESC)

    def hook(event: object) -> None:
        raise ValueError("\ud800 of a hook")

    engine.on_plan(hook)
    with engine.record(tmp_path / "a.kvrec") as recorder:
        with pytest.raises(ValueError, match="of a hook"):
            engine.copy_blocks(cache, {1: [2]})
        assert not recorder.ended
    (row,) = read(tmp_path / "a.kvrec").transfers
    assert row.error == r"ValueError('\ud800 of a hook')"
    assert row.plan is not None


def test_caches_named_by_addresses_alone_have_one_template(tmp_path, engine):
    arrays = [np.zeros((64, 4, 2, 8), np.float16) for _ in range(8)]
    src, dst = (
        Cache(DESC, tensor_addrs=[tensor.ctypes.data for tensor in half])
        for half in (arrays[:4], arrays[4:])
    )
    with engine.record(tmp_path / "a.kvrec") as recorder:
        for _ in range(200):
            engine.copy_cache(src, dst, 1, 2)
        recorder.flush()
        size = recorder.path.stat().st_size
    recording = read(tmp_path / "a.kvrec")
    assert len(recording.transfers) == 200
    assert len({row.parts[0].template for row in recording.transfers}) == 1
    assert size < 200 * 120 + 2000


def test_refused_arguments_that_a_recording_cannot_hold_do_not_end_it(tmp_path, engine):
    calls = {
        "unregister_cache": lambda: engine.unregister_cache(2**70),
        "unlink": lambda: engine.unlink(-(2**70)),
        "link": lambda: engine.link("\ud800", {1: 0}),
    }
    with engine.record(tmp_path / "a.kvrec") as recorder:
        for call in calls.values():
            with pytest.raises((ValueError, LLMException)):
                call()
        assert not recorder.ended
    found = {row.operation: row.fields for row in read(tmp_path / "a.kvrec").events}
    assert found["unregister_cache"] == {"cache": str(2**70)}
    assert found["unlink"] == {"comm": str(-(2**70))}
    assert found["link"] == {"comm": r"\ud800"}
