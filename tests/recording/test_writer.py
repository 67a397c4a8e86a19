"""The recorder by itself: threads, small rows, full queues and disks, forks."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import ClassVar

import pytest

import kvplan
from kvplan import CacheDesc, DataType, LLMStatusCode, Part, Plan, Rows, Transfer
from kvplan.recording import read
from kvplan.recording.format import MAGIC, row_in
from tests.recording.operations import DESC, PLAN, SMALLEST, record, recorder, tags
from tests.support.held import Held
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_is_left")

OTHER = kvplan.plan(Transfer(Rows(DESC, [1]), Rows(DESC, [4]), reinterpret=True), local="dst")
DEADLINE_S = 60
MAX_KNOWN = 4096


def test_no_row_of_eight_threads_is_lost_or_torn(tmp_path):
    path, each = tmp_path / "a.kvrec", 3000
    before = Held.now()
    with recorder(path) as writer:

        def write(thread: int) -> None:
            for number in range(each):
                record(writer, PLAN, f"{thread}.{number}")

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    recording = read(path)
    assert recording.complete
    assert recording.dropped == 0
    by_thread: dict[str, list[int]] = {str(number): [] for number in range(8)}
    for row in recording.transfers:
        thread, number = row.tag.split(".")
        by_thread[thread].append(int(number))
    assert all(numbers == [*range(each)] for numbers in by_thread.values())
    before.check_nothing_new()


def test_rows_of_equal_values_are_read(tmp_path):
    """Checksums of blocks that are all zero are such values."""
    path, sums = tmp_path / "a.kvrec", ("e4a6a0577479b2b4",) * 8192
    with recorder(path) as writer:
        for _ in range(20):
            writer.event("sums", LLMStatusCode.LLM_SUCCESS, 0.0, "", {"sums": sums})
    assert [row.fields["sums"] for row in read(path).events] == [[*sums]] * 20


def test_a_row_is_small(tmp_path):
    path, count = tmp_path / "a.kvrec", 1000
    with recorder(path) as writer:
        record(writer, PLAN, "a request's id of 36 characters, say")
        writer.flush()
        first = path.stat().st_size
        for _ in range(count):
            record(writer, PLAN, "a request's id of 36 characters, say")
        writer.flush()
        tables = 2 * 8 * 3
        assert (path.stat().st_size - first) / count <= 200 + tables


def test_the_number_of_known_sides_is_bounded(tmp_path):
    with recorder(tmp_path / "a.kvrec") as writer:
        for number in range(MAX_KNOWN + 10):
            desc = CacheDesc(2, (16 + number, 16), DataType.DT_FLOAT)
            record(writer, kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [2])), local="dst"))
            assert len(writer._known) <= MAX_KNOWN
        assert writer._known
    assert len(read(tmp_path / "a.kvrec").transfers) == MAX_KNOWN + 10


class Interrupted(Part):
    """A part during whose recording other rows come between its template and its row."""

    meanwhile: ClassVar[list[Callable[[], None]]] = []

    @property
    def unplanned_rows(self):
        if self.meanwhile:
            self.meanwhile.pop()()
        return super().unplanned_rows


def test_a_row_that_comes_late_has_its_template_in_a_file_that_rotated(tmp_path):
    path, alone = tmp_path / "a.kvrec", tmp_path / "alone.kvrec"
    with recorder(path, max_bytes=SMALLEST, files=3) as writer:

        def others_forget_its_template_and_begin_a_file():
            for number in range(100):
                desc = CacheDesc(2, (16 + number, 16), DataType.DT_FLOAT)
                record(
                    writer,
                    kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [2])), local="dst"),
                )
            writer.flush()
            assert writer._previous
            first = path.stat().st_ino
            while path.stat().st_ino == first:
                record(writer, OTHER)
                writer.flush()

        late = Interrupted(**{of.name: getattr(PLAN.part, of.name) for of in fields(Part)})
        late.meanwhile.append(others_forget_its_template_and_begin_a_file)
        record(writer, Plan.made(late), "late")
        writer.flush()
        shutil.copy(path, alone)
    (row,) = [row for row in read(alone).transfers if row.tag == "late"]
    assert row.plan == PLAN


def test_rows_without_room_are_dropped_and_counted(tmp_path):
    path = tmp_path / "a.kvrec"
    long = kvplan.plan(Transfer(Rows(DESC, range(4096)), Rows(DESC, range(4096))), local="dst")
    with recorder(path, max_queued=32 << 10) as writer:
        record(writer, PLAN, "before")
        for _ in range(7):
            record(writer, long, "too long")
        record(writer, PLAN, "after")
    recording = read(path)
    assert [row.tag for row in recording.transfers] == ["before", "after"]
    assert recording.dropped == 7
    assert recording.transfers[1].plan == PLAN


@pytest.mark.parametrize("fork", [os.fork, ctypes.PyDLL(None).fork], ids=["python", "c"])
def test_a_living_forked_child_does_not_keep_the_file(tmp_path, fork):
    """C code forks without the handlers of Python, such as `subprocess` before exec."""
    path = tmp_path / "a.kvrec"
    with recorder(path) as writer:
        record(writer, PLAN, "first")
        reading, writing = os.pipe()
        if not (child := fork()):
            os.close(writing)
            os.read(reading, 1)  # until the parent has recorded again, or ended
            os._exit(0)
    try:
        with recorder(path) as writer:
            record(writer, PLAN, "second")
    finally:
        os.close(writing)
        assert os.waitpid(child, 0)[1] == 0
        os.close(reading)
    assert tags(path) == ["second"]


def test_numbers_of_up_to_64_bits_are_numbers_and_longer_ones_are_text(tmp_path):
    path = tmp_path / "a.kvrec"
    kept, cut = [-(2**63), -1, 2**63, 2**64 - 1], [-(2**63) - 1, 2**64]
    with recorder(path) as writer:
        for number in kept + cut:
            writer.event("lease", LLMStatusCode.LLM_SUCCESS, 0.0, "", {"lease": number})
    found = [event.fields["lease"] for event in read(path).events]
    assert found == kept + [str(number) for number in cut]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_bytes": 65535}, "max_bytes=65535 must be at least 65536"), ({"files": 0}, "files=0")],
)
def test_impossible_sizes_are_refused(tmp_path, options, message):
    with refused("LLM_PARAM_INVALID", message):
        recorder(tmp_path / "a.kvrec", **options)
    assert not [*tmp_path.iterdir()]


def test_a_forked_child_writes_nothing(tmp_path):
    path = tmp_path / "a.kvrec"
    with recorder(path) as writer:
        record(writer, PLAN, "parent")
        if not (child := os.fork()):
            record(writer, PLAN, "child")
            writer.flush()
            writer.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        record(writer, PLAN, "parent again")
    assert tags(path) == ["parent", "parent again"]


def test_a_child_forked_while_others_record_does_not_hang(tmp_path):
    """The fork may happen while another thread holds a lock of the recorder."""
    path = tmp_path / "a.kvrec"
    done = threading.Event()
    with recorder(path) as writer:

        def write() -> None:
            while not done.is_set():
                record(writer, PLAN, "x")
                writer.flush()

        threads = [threading.Thread(target=write) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                if not (child := os.fork()):
                    record(writer, PLAN, "child")
                    writer.close()
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert set(tags(path)) == {"x"}


FULL = """
import logging, resource, sys
from kvplan import CacheDesc, DataType, LlmDataDist, LlmRole, LLMStatusCode

logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
with LlmDataDist(1, LlmRole.MIX) as engine:
    engine.initialize()
    cache = engine.allocate_blocks_cache(CacheDesc(1, (64, 16), DataType.DT_FLOAT))
    it = engine.record(sys.argv[1])
    for number in range(4000):
        engine.copy_blocks(cache, {1: [2, 3]}, tag=f"{number}")
        if number % 100 == 0:
            it.flush()
    assert it.ended
    print(engine.metrics()["operations"]["copy_blocks"]["statuses"])
    engine.record(sys.argv[1] + ".next").close()
"""


def test_a_full_disk_ends_only_the_recording(tmp_path):
    path = tmp_path / "a.kvrec"
    command = [sys.executable, "-W", "error", "-c", FULL, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    warning, outcome = done.stdout.splitlines()
    assert re.fullmatch(rf"WARNING recording to {path} has ended: .*; transfers go on", warning)
    assert outcome == "{'LLM_SUCCESS': 4000}"
    recording = read(path)
    assert not recording.complete
    found = [int(row.tag) for row in recording.transfers]
    assert found == [*range(len(found))]
    assert 500 < len(found) < 4000
    data, end = path.read_bytes(), len(MAGIC)
    while (row := row_in(data, end)) is not None:
        end = row.end
    assert end == len(data)  # without any byte of the row that had no room
    assert read(f"{path}.next").complete


def test_a_recording_that_an_error_has_ended_keeps_its_rows_and_frees_its_file(tmp_path):
    path = tmp_path / "a.kvrec"
    writer = recorder(path)
    record(writer, PLAN, "before")
    writer.event("lease", LLMStatusCode.LLM_SUCCESS, 0.0, "", {1: Unprintable()})
    assert writer.ended
    for thread in threading.enumerate():
        if thread.name == "kvplan-recorder-3":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
    assert tags(path) == ["before"]
    with recorder(path) as again:
        record(again, PLAN, "after")
    assert tags(path) == ["after"]


class Unprintable:
    """A value of an event that cannot be recorded."""

    def __repr__(self) -> str:
        raise ValueError


def test_an_ended_writer_queues_nothing(tmp_path):
    """The thread of the writer has ended, and would not write any kind of row."""
    with recorder(tmp_path / "a.kvrec") as writer:
        record(writer, PLAN)
    common = {"common": object(), "kind": "B2B", "as_bytes": True}
    head = (0.0, 1e-3, "pull_blocks", 0, "", "late", 7, 1, (), 64)
    record(writer, OTHER)
    writer.event("lease", LLMStatusCode.LLM_SUCCESS, 0.0, "", {"tag": "late"})
    writer.moved(head, common, ([1], [2]), 64, lambda: OTHER.part)
    assert not writer._rows
    assert read(tmp_path / "a.kvrec").complete
