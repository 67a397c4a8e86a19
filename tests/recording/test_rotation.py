"""The files of a recording: written, renamed, read together, or left alone."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from kvplan import LLMException
from kvplan.recording import Dropped, read
from kvplan.recording.files import RotatingFile
from kvplan.recording.format import LENGTH, MAGIC
from tests.recording.operations import PLAN, SMALLEST, record, recorder, tags
from tests.support import lone_user
from tests.support.refusals import refused
from tests.support.rights import denying

pytestmark = pytest.mark.usefixtures("nothing_is_left")


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


def test_a_full_file_is_locked_until_the_next_one_is(tmp_path):
    """Another recorder could otherwise take one of them while they are renamed."""
    path, locked = tmp_path / "a.kvrec", []

    def head(number):
        if number:
            for name in (path, Path(f"{path}.1")):
                with name.open("rb") as file, pytest.raises(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked.append(name)
        return [b"head"]

    file = RotatingFile(path, head, max_bytes=SMALLEST, files=2)
    for _ in range(3):
        file.write([bytes(SMALLEST // 2)], compress=False)
    file.close()
    assert locked[:2] == [path, Path(f"{path}.1")]


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
def test_a_file_is_filled_up_to_its_limit(tmp_path, more, at_once):
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


def test_a_recording_begins_with_its_first_existing_file(tmp_path):
    """Older rows were removed by rotation, so their absence is not reported as a loss."""
    path = tmp_path / "a.kvrec"
    with recorder(path, max_bytes=SMALLEST, files=4) as writer:
        for number in range(3000):
            record(writer, PLAN, f"{number}")
    Path(f"{path}.1").unlink()
    recording = read(path)
    assert recording.header.file > 0
    assert not any(isinstance(row, Dropped) for row in recording)


@pytest.mark.parametrize("gap", [1, 2, 3])
def test_a_recording_is_read_while_its_files_are_renamed(tmp_path, gap):
    """The writer renames the oldest file first: one name is free at any time."""
    path = tmp_path / "a.kvrec"
    with recorder(path, max_bytes=SMALLEST, files=100) as writer:
        for number in range(3000):
            record(writer, PLAN, f"{number}")
            if number % 100 == 0:
                writer.flush()
    oldest = max(int(name.suffix[1:]) for name in tmp_path.glob("a.kvrec.*"))
    assert oldest >= 3
    for number in range(oldest, gap - 1, -1):
        Path(f"{path}.{number}").rename(f"{path}.{number + 1}")
    assert [row.tag for row in read(path)] == [*map(str, range(3000))]


def test_a_recording_whose_next_file_has_not_begun_is_read(tmp_path):
    """The writer renames a full file before it makes the next one."""
    path = tmp_path / "a.kvrec"
    with recorder(path) as writer:
        record(writer, PLAN, "one")
    path.rename(f"{path}.1")
    assert tags(path) == ["one"]


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


@pytest.mark.parametrize("older", ["", ".1", ".2"])
def test_no_file_of_another_kind_is_renamed_or_removed(tmp_path, older):
    """Rotation would rename such a file, so a path beside the recording counts, too."""
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


@pytest.mark.parametrize("length", [0, 1, len(MAGIC) - 1, len(MAGIC)])
@pytest.mark.parametrize("older", ["", ".1"])
def test_a_file_that_ends_in_its_first_bytes_is_a_recording(tmp_path, older, length):
    """A crash or a full disk leaves such a file; the next recording can begin."""
    path = tmp_path / "a.kvrec"
    Path(f"{path}{older}").write_bytes(MAGIC[:length])
    with recorder(path) as writer:
        record(writer, PLAN, "now")
    assert tags(path) == ["now"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device")
def test_a_device_is_not_a_recording(tmp_path):
    device = tmp_path / "null"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    with refused("LLM_PARAM_INVALID", "exists and is not a recording"):
        recorder(device)
    assert [*tmp_path.iterdir()] == [device]


def test_an_earlier_recording_is_kept(tmp_path):
    path = tmp_path / "a.kvrec"
    for name in ("one", "two", "three"):
        with recorder(path) as writer:
            record(writer, PLAN, name)
    assert tags(path) == ["three"]
    assert tags(Path(f"{path}.1")) == ["two"]
    assert len(list(tmp_path.iterdir())) == 2


def test_files_of_a_longer_earlier_recording_are_not_included(tmp_path):
    """The old files have higher numbers than the files of the new recording."""
    path = tmp_path / "a.kvrec"
    with recorder(path, max_bytes=SMALLEST, files=4) as writer:
        for number in range(60):
            record(writer, PLAN, os.urandom(1500).hex())  # random: not compressed
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


@pytest.mark.parametrize("older", [False, True], ids=["nothing there", "a recording there"])
def test_one_of_two_concurrent_recorders_is_refused(tmp_path, monkeypatch, older):
    """The second one begins before each system call of the first one, in turn."""
    calls = "open", "fstat", "rename", "stat", "unlink"
    nth, was_reached = 0, True
    while was_reached:
        nth, was_reached = nth + 1, False
        folder = tmp_path / str(nth)
        folder.mkdir()
        path = folder / "a.kvrec"
        for name in ("one", "two"):
            with recorder(path, files=3) as writer:
                record(writer, PLAN, name)
        if not older:
            path.unlink()
        kept = [tags(each) for each in sorted(folder.iterdir())]
        left, others = [nth], []

        def begins(call, left=left, others=others, path=path):
            def called(*arguments, **named):
                left[0] -= 1
                if left[0] == 0:
                    with suppress(LLMException):
                        others.append(recorder(path, files=3))
                return call(*arguments, **named)

            return called

        with monkeypatch.context() as patched:
            for name in calls:
                patched.setattr(os, name, begins(getattr(os, name)))
            with suppress(LLMException):
                others.append(recorder(path, files=3))
        was_reached = left[0] <= 0
        (only,) = others
        with only:
            record(only, PLAN, "now")
        assert [tags(each) for each in sorted(folder.iterdir())] == [["now"], *kept], nth
    assert nth > 5


def test_an_interrupted_file_is_not_in_use(tmp_path):
    def interrupted(number):
        raise KeyboardInterrupt

    path = tmp_path / "a.kvrec"
    with pytest.raises(KeyboardInterrupt):
        RotatingFile(path, interrupted, max_bytes=SMALLEST, files=4)
    RotatingFile(path, lambda number: [b"head"], max_bytes=SMALLEST, files=4).close()


@pytest.mark.parametrize("files", [1, 2])
def test_a_recording_that_cannot_begin_leaves_earlier_files_in_place(tmp_path, files):
    """A program may try again on a full disk."""
    path = tmp_path / "a.kvrec"
    for name in ("one", "two")[-files:]:
        with recorder(path, files=files) as writer:
            record(writer, PLAN, name)

    def full(number):
        raise OSError("no space")

    for _ in range(3):
        with pytest.raises(OSError, match="no space"):
            RotatingFile(path, full, max_bytes=SMALLEST, files=files)
    paths = [path, Path(f"{path}.1")][:files]
    assert sorted(tmp_path.iterdir()) == paths
    assert [*map(tags, paths)] == [["two"], ["one"]][:files]


def test_a_file_that_cannot_be_renamed_leaves_all_files_in_place(tmp_path, monkeypatch):
    path = tmp_path / "a.kvrec"
    for name in ("one", "two"):
        with recorder(path, files=2) as writer:
            record(writer, PLAN, name)
    rename = Path.rename

    def refuse(old, new):
        if old == path:
            raise PermissionError("no")
        return rename(old, new)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError, match="no"):
        recorder(path, files=2)
    paths = [path, Path(f"{path}.1")]
    assert sorted(tmp_path.iterdir()) == paths
    assert [*map(tags, paths)] == [["two"], ["one"]]


def test_without_a_thread_earlier_files_stay_in_place():
    lone_user.run("""
        import tempfile
        from pathlib import Path
        from tests.recording.operations import PLAN, record, recorder, tags
        from tests.support.lone_user import allow_threads, become
        from tests.support.refusals import refused

        become()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "a.kvrec")
            for name in ("one", "two"):
                with recorder(path) as writer:
                    record(writer, PLAN, name)
            allow_threads(1)
            for _ in range(3):
                with refused("LLM_OUT_OF_MEMORY", "kvplan-recorder"):
                    recorder(path)
            found = [tags(each) for each in sorted(path.parent.iterdir())]
            assert found == [["two"], ["one"]], found
    """)


FULL = """
import os, resource, sys
from kvplan.recording.files import RotatingFile

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
file = None
try:
    file = RotatingFile(sys.argv[1], lambda number: [bytes(999)], max_bytes=1 << 20, files=1)
except OSError as error:
    print(error.strerror)
open_files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
print(sys.argv[1] in open_files)
"""


def test_a_partial_row_that_cannot_be_removed_leaves_reason_and_file(tmp_path):
    code = textwrap.dedent(denying("ftruncate")) + FULL
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "a.kvrec")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["File too large", "False"]
