"""The recorder alone: threads, rotation, full queues and disks, torn and foreign files, forks."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

import kvplan
from kvplan import (
    CacheDesc,
    DataType,
    LLMException,
    LLMStatusCode,
    Part,
    Plan,
    Rows,
    Transfer,
)
from kvplan.cli import main
from kvplan.recording import Dropped, read, who_wrote
from kvplan.recording.files import RotatingFile
from kvplan.recording.format import LENGTH, MAGIC, framed, row_in
from tests.recording.operations import record, recorder
from tests.support.held import Held
from tests.support.plans import joined
from tests.support.refusals import refused

DESC = CacheDesc(2, (4096, 16), DataType.DT_FLOAT)
PLAN = kvplan.plan(Transfer(Rows(DESC, [1, 2, 9]), Rows(DESC, [4, 5, 6])), local="dst")
OTHER = kvplan.plan(Transfer(Rows(DESC, [1]), Rows(DESC, [4]), reinterpret=True), local="dst")
DEADLINE_S = 60
SMALLEST = 64 << 10
MAX_KNOWN = 4096


def tags(path: Path) -> list[str]:
    return [transfer.tag for transfer in read(path).transfers]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Who writes, reads or refuses a recording holds no file of it in the end."""
    before = Held.now()
    yield
    before.check_nothing_new()


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
    """A part in whose recording others come between its template and its row."""

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


def test_each_file_that_rotates_is_readable_by_itself(tmp_path):
    path, count = tmp_path / "a.kvrec", 4000
    with recorder(path, max_bytes=SMALLEST, files=4) as writer:
        for number in range(count):
            record(writer, PLAN, f"{number}")
            if number % 500 == 0:
                writer.flush()
    paths = [path, *(Path(f"{path}.{number}") for number in (1, 2, 3))]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    found = []
    for part in reversed(paths):
        assert part.stat().st_size <= SMALLEST
        alone = tmp_path / "alone" / "it.kvrec"
        alone.parent.mkdir()
        shutil.copy(part, alone)
        recording = read(alone)
        assert {row.plan for row in recording.transfers} == {PLAN}
        found += [int(row.tag) for row in recording.transfers]
        shutil.rmtree(alone.parent)
    assert found == [*range(found[0], count)]
    whole = read(path)
    assert [int(row.tag) for row in whole.transfers] == found
    assert [row.number for row in whole.rows] == [*range(len(whole))]


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
def test_a_file_is_as_large_as_it_may_be_and_no_larger(tmp_path, more, at_once):
    path = tmp_path / "a.kvrec"
    file = RotatingFile(path, lambda number: [b"head"], max_bytes=SMALLEST, files=4)
    sizes = [1000] * 5
    sizes.append(SMALLEST - path.stat().st_size - sum(sizes) - 6 * LENGTH.size + more)
    rows = [bytes(size) for size in sizes]
    for batch in [rows] if at_once else [[row] for row in rows]:
        file.write(batch, compress=False)
    file.close()
    found = [Path(f"{path}{end}") for end in ([""] if more < 1 else [".1", ""])]
    assert sorted(tmp_path.iterdir()) == sorted(found)
    assert max(item.stat().st_size for item in found) <= SMALLEST


def test_a_row_larger_than_a_file_has_one_of_its_own(tmp_path):
    path = tmp_path / "a.kvrec"
    file = RotatingFile(path, lambda number: [b"head"], max_bytes=SMALLEST, files=4)
    for size in (SMALLEST + 1, 100):
        file.write([bytes(size)], compress=False)
    file.close()
    assert sorted(tmp_path.iterdir()) == [path, Path(f"{path}.1")]


def test_the_first_file_of_those_that_are_there_begins(tmp_path):
    """What is older was removed: nothing says that it is missing, as the recording begins later."""
    path = tmp_path / "a.kvrec"
    with recorder(path, max_bytes=SMALLEST, files=4) as writer:
        for number in range(3000):
            record(writer, PLAN, f"{number}")
    Path(f"{path}.1").unlink()
    recording = read(path)
    assert recording.header.file > 0
    assert not any(isinstance(row, Dropped) for row in recording)


def test_a_recording_has_the_header_of_its_oldest_file(tmp_path):
    path = tmp_path / "a.kvrec"
    with recorder(path, max_bytes=SMALLEST, files=4) as writer:
        for number in range(3000):
            record(writer, PLAN, f"{number}")
    header = read(path).header
    assert header == read(f"{path}.3").header
    assert header.file < read(f"{path}.2").header.file


def test_a_file_that_is_written_is_read_across_rotations(tmp_path):
    path, count = tmp_path / "a.kvrec", 2000
    writer = recorder(path, max_bytes=SMALLEST, files=100)

    def write() -> None:
        with writer:
            for number in range(count):
                record(writer, PLAN, f"{number}")
                if number % 50 == 0:
                    writer.flush()

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    while thread.is_alive():
        rows = read(path).rows
        assert [row.tag for row in rows] == [*map(str, range(len(rows)))]
        assert len(rows) >= seen
        seen = len(rows)
    thread.join()
    assert [row.tag for row in read(path)] == [*map(str, range(count))]
    assert len(list(tmp_path.iterdir())) > 2


def test_a_file_that_is_missing_is_a_gap(tmp_path):
    path = tmp_path / "a.kvrec"
    with recorder(path, max_bytes=SMALLEST, files=100) as writer:
        for number in range(4000):
            record(writer, PLAN, f"{number}")
            if number % 100 == 0:
                writer.flush()
    Path(f"{path}.2").write_bytes(Path(f"{path}.1").read_bytes())
    recording = read(path)
    assert [row.count for row in recording if isinstance(row, Dropped)] == [None]
    assert recording.rows[-1].tag == "3999"
    assert recording.rows[-1].plan == PLAN


def test_rows_that_find_no_room_are_dropped_and_counted(tmp_path):
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


def test_a_recording_may_end_anywhere(tmp_path):
    path, cut = tmp_path / "a.kvrec", tmp_path / "cut.kvrec"
    long = kvplan.plan(
        Transfer(Rows(DESC, range(0, 4096, 2)), Rows(DESC, range(2048))), local="dst"
    )
    with recorder(path) as writer:
        for number in range(20):
            record(writer, long if number == 10 else PLAN, f"{number}")
    whole, all_tags = path.read_bytes(), tags(path)
    (head,) = LENGTH.unpack_from(whole, len(MAGIC))
    begin = len(MAGIC) + LENGTH.size + head
    lengths = set()
    for size in range(begin, len(whole), 7):
        cut.write_bytes(whole[:size])
        recording = read(cut)
        assert not recording.complete
        found = [row.tag for row in recording.transfers]
        assert found == all_tags[: len(found)]
        lengths.add(len(found))
    assert lengths == {*range(21)}
    for size in (0, 3, len(MAGIC), begin - 1):
        cut.write_bytes(whole[:size])
        with refused("LLM_PARAM_INVALID", "has no row yet"):
            read(cut)


def test_a_damaged_recording_is_refused_or_read_and_nothing_else(tmp_path):
    path, damaged = tmp_path / "a.kvrec", tmp_path / "damaged.kvrec"
    with recorder(path) as writer:
        for number in range(30):
            record(writer, PLAN, f"{number}", error="x" * number)
    whole = path.read_bytes()
    rng = random.Random(1)
    refusals, statuses = 0, set()
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 30))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        damaged.write_bytes(data)
        try:
            recording = read(damaged)
            for row in recording.transfers:
                assert row.plan is not None
            who_wrote(recording, 1, 4)
        except LLMException as error:
            statuses.add(error.status_code.name)
            refusals += 1
    assert refusals > 100
    assert statuses == {"LLM_PARAM_INVALID"}


VALUES = (
    *(None, 0, -1, 2**63 - 1, 2**64 - 1, -(2**63), 1e308, float("nan"), float("inf"), True, 64),
    *("", "x", "sorted", "B2B", b"", b"123", b"\xff" * 8, [], {}, [1], {"a": 1}),
)


def leaves(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Every place in a row."""
    inside = enumerate(value) if isinstance(value, list) else ()
    for key, item in value.items() if isinstance(value, dict) else inside:
        yield from leaves(item, (*path, key))
    if path:
        yield path


def test_rows_that_hold_anything_are_refused_or_read(tmp_path, capsys):
    path, damaged = tmp_path / "a.kvrec", tmp_path / "damaged.kvrec"
    with recorder(path) as writer:
        record(writer, PLAN, "a")
        record(writer, kvplan.plan(Transfer(Rows(DESC), Rows(DESC)), local="dst"), "b")
        record(writer, joined({"x": PLAN, "y": PLAN}), "c")
        writer.event("lease", LLMStatusCode.LLM_SUCCESS, 0.0, "", {"lease": 1, "blocks": (1, 2)})
    rows, data, at = [], path.read_bytes(), len(MAGIC)
    while found := row_in(data, at):
        rows.append(msgspec.msgpack.decode(data[at + LENGTH.size : found[1]]))
        at = found[1]
    rng = random.Random(3)
    for _ in range(250):
        changed = copy.deepcopy(rows)
        row = rng.choice(changed)
        *outer, last = rng.choice([*leaves(row)])
        functools.reduce(operator.getitem, outer, row)[last] = rng.choice(VALUES)
        damaged.write_bytes(MAGIC + b"".join(framed(map(msgspec.msgpack.encode, changed))))
        with contextlib.suppress(LLMException):
            recording = read(damaged)
            for writer in recording.transfers:
                assert writer.plan is None or writer.plan.nbytes >= 0
            who_wrote(recording, 1, 4)
        for options in ([], ["--json"], ["--perfetto", str(tmp_path / "trace.json")]):
            assert main(["trace", str(damaged), *options]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_that_is_not_a_recording_is_refused(tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("my notes, of which there are many\n")
    with refused("LLM_PARAM_INVALID", "is not a recording"):
        read(other)
    with refused("LLM_PARAM_INVALID", "exists and is not a recording"):
        recorder(other)
    assert other.read_text().startswith("my notes")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        recorder(tmp_path / "no" / "folder" / "a.kvrec")


@pytest.mark.parametrize("older", ["", ".1", ".2"])
def test_no_file_of_another_kind_is_renamed_or_removed(tmp_path, older):
    """A recording that rotates would: not even one beside it may be anything else."""
    path = tmp_path / "a.kvrec"
    other = Path(f"{path}{older}")
    other.write_text("my notes")
    with refused("LLM_PARAM_INVALID", f"{other} exists and is not a recording"):
        recorder(path, files=3)
    assert [*tmp_path.iterdir()] == [other]
    other.unlink()
    os.mkfifo(other)
    with refused("LLM_PARAM_INVALID", f"{other} exists and is not a recording"):
        recorder(path, files=3)
    assert [*tmp_path.iterdir()] == [other]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device")
def test_a_device_is_not_a_recording(tmp_path):
    device = tmp_path / "null"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    with refused("LLM_PARAM_INVALID", "exists and is not a recording"):
        recorder(device)
    assert [*tmp_path.iterdir()] == [device]


def test_a_forked_child_that_lives_on_does_not_keep_the_file(tmp_path):
    path = tmp_path / "a.kvrec"
    reading, writing = os.pipe()
    with recorder(path) as writer:
        record(writer, PLAN, "first")
        if not (child := os.fork()):
            os.close(writing)
            os.read(reading, 1)  # until the parent has recorded again
            os._exit(0)
    try:
        with recorder(path) as writer:
            record(writer, PLAN, "second")
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
    assert tags(path) == ["second"]


def test_a_recording_of_before_is_kept(tmp_path):
    path = tmp_path / "a.kvrec"
    for name in ("one", "two", "three"):
        with recorder(path) as writer:
            record(writer, PLAN, name)
    assert tags(path) == ["three"]
    assert tags(Path(f"{path}.1")) == ["two"]
    assert len(list(tmp_path.iterdir())) == 2


def test_files_of_a_longer_recording_of_before_are_not_of_this_one(tmp_path):
    """Its files follow the new one's, with higher numbers than those that this one has."""
    path = tmp_path / "a.kvrec"
    with recorder(path, max_bytes=SMALLEST, files=4) as writer:
        for number in range(60):
            record(writer, PLAN, os.urandom(1500).hex())  # which is not compressed to nothing
            if number % 10 == 0:
                writer.flush()
    with recorder(path, max_bytes=SMALLEST, files=4) as writer:
        record(writer, PLAN, "now")
    assert len(list(tmp_path.iterdir())) > 2
    assert tags(path) == ["now"]


def test_one_file_has_one_recorder(tmp_path):
    path = tmp_path / "a.kvrec"
    with recorder(path) as writer:
        with refused("LLM_PARAM_INVALID", "another engine records to it"):
            recorder(path)
        record(writer, PLAN, "still written")
    assert tags(path) == ["still written"]


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
    """It may be forked while another thread holds a lock of the recorder."""
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


def test_a_full_disk_ends_the_recording_and_no_transfer(tmp_path):
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
    assert end == len(data)  # nothing of the row that had no room
    assert read(f"{path}.next").complete
