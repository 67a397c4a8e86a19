"""The choice of a tuning: options, the environment, and files with any content."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

import kvplan
from kvnative._tuning import builtin_tuning
from kvnative.cores import usable_cores
from kvplan import CacheDesc, DataType, LLMException, Options, Rows, Transfer
from kvplan.execution import default_transfers
from kvplan.execution.tuning import (
    Finding,
    choose,
    load_tuning,
    save_tuning,
    this_processor,
    tuning_path,
)
from tests.support import lone_user
from tests.support.held import Held

MINE = Finding(builtin_tuning()._replace(bypass_nbytes=9 << 20), True, ("measured",), 250.0)
# Recognized by the text of a RecursionError; the parser of Python 3.14 checks the stack itself.
TOO_DEEP = "Stack overflow" if sys.version_info >= (3, 14) else "recursion"


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVPLAN_TUNING")
    assert tuning_path() == tmp_path / "kvplan/tuning.json"
    return tuning_path()


def test_threads_that_race_share_their_copying_threads() -> None:
    barrier, made, text = (
        threading.Barrier(8),
        list[object](),
        '{"threads": 2, "piece_nbytes": 65664}',
    )

    def ask() -> None:
        barrier.wait()
        made.append(default_transfers(text))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=ask) for _ in range(barrier.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert made == [default_transfers(text)] * barrier.parties


def test_a_stored_tuning_is_loaded_and_used() -> None:
    assert load_tuning() is None
    assert choose() == (builtin_tuning(), "built in", "")
    stored = save_tuning(MINE)
    assert stored._replace(measured="") == MINE
    assert load_tuning() == stored
    assert choose() == (MINE.tuning, "measured", "")
    assert choose("builtin") == (builtin_tuning(), "built in", "")


def test_the_environment_applies_without_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    save_tuning(MINE)
    monkeypatch.setenv("KVPLAN_TUNING", "builtin")
    assert choose().tuning == builtin_tuning()
    assert choose("auto").tuning == MINE.tuning
    monkeypatch.setenv("KVPLAN_TUNING", "")
    assert choose().tuning == MINE.tuning
    monkeypatch.setenv("KVPLAN_TUNING", "fast")
    with pytest.raises(LLMException, match="KVPLAN_TUNING='fast' must be auto, builtin or"):
        choose()


def test_large_transfers_measure_nothing(path: Path) -> None:
    before = set(threading.enumerate())
    src, dst = np.ones((2, 4, 1 << 20), np.uint8)
    rows = Rows(CacheDesc(1, src.shape, DataType.DT_UINT8), range(4))
    default_transfers("auto").execute(kvplan.plan(Transfer(rows, rows), local="dst"), [src], [dst])
    assert set(threading.enumerate()) <= before  # earlier tests may have left threads that end
    assert not path.parent.exists()


def test_a_given_tuning_is_used() -> None:
    given = choose('{"threads": 3, "bypass_nbytes": 1000000}')
    expected = builtin_tuning()._replace(threads=3, bypass_nbytes=1_000_000)
    assert given == (expected, "kvplan.tuning", "")
    assert default_transfers('{"threads": 3}').threads == 3
    assert default_transfers('{"threads": 3}') is default_transfers('{"threads": 3}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "Expecting property name"),
        ('{"threads": 0}', "threads = 0: expected 1 to 64"),
        ('{"threads": "2"}', "must be an int"),
        ('{"speed": 1}', "'speed' must be one of threads, bypass_nbytes"),
        ("[1]", "must be auto, builtin or a JSON object"),
        ('{"a":' * 100_000, TOO_DEEP),
    ],
)
def test_an_option_is_checked_when_it_is_given(text: str, expected: str) -> None:
    for call in (lambda: Options(tuning=text), lambda: choose(text)):
        with pytest.raises(LLMException) as raised:
            call()
        assert expected in str(raised.value)
    with pytest.raises(TypeError, match="tuning"):
        Options(tuning=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "Expecting value"),
        ("\0\xff", "Expecting value"),
        ("[]", "must be dict"),
        ('{"schema_version": 99, "machines": {}}', "schema_version=99 must be 3"),
        ("[" * 100_000, TOO_DEEP),
        ("x" * (2 << 20), "more than 1048576 bytes"),
    ],
)
def test_a_file_with_other_content_is_not_used_and_not_changed(
    path: Path, text: str, expected: str
) -> None:
    path.parent.mkdir()
    path.write_text(text, encoding="latin-1")
    found = choose()
    assert found.tuning == builtin_tuning()
    assert expected in found.note
    assert "remove it, and `kvplan tune` makes another" in found.note
    with pytest.raises(LLMException, match="remove it"):
        save_tuning(MINE)
    assert path.read_text(encoding="latin-1") == text


@pytest.mark.parametrize(
    "change",
    [
        {"tuning": []},
        {"tuning": {"threads": 1}},
        {"tuning": {**MINE.tuning._asdict(), "threads": 10**30}},
        {"tuning": {**MINE.tuning._asdict(), "piece_nbytes": 1}},
        {"tuning": {**MINE.tuning._asdict(), "more": 1}},
        {"reasons": [3]},
        {"measured": None},
        {"took_ms": "x"},
        {"took_ms": math.nan},
        {"took_ms": math.inf},
        {"reasons": ["\x1b[2J"]},
        {"reasons": ["\ud800"]},
        {"measured": "2026-01-01\x1b]0;title\x07"},
    ],
)
def test_a_wrong_entry_is_not_used(path: Path, change: dict[str, Any]) -> None:
    save_tuning(MINE)
    document = json.loads(path.read_text())
    document["machines"][this_processor()].update(change)
    path.write_text(json.dumps(document))
    found = choose()
    assert found.tuning == builtin_tuning()
    assert f"machines['{this_processor()}']" in found.note
    save_tuning(MINE)  # replaces only the wrong entry of this machine
    assert choose().tuning == MINE.tuning


def test_entries_of_other_machines_are_kept(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"schema_version": 3, "machines": {"another": {"of": "a later version"}}}')
    assert load_tuning() is None
    save_tuning(MINE)
    assert json.loads(path.read_text())["machines"]["another"] == {"of": "a later version"}


def test_a_tuning_of_other_cores_is_not_used() -> None:
    """A container with fewer cores has the same processor, but a tuning of its own."""
    cores = os.sched_getaffinity(0)
    if usable_cores() < 2:
        pytest.skip("a machine with one core")
    save_tuning(MINE)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert load_tuning() is None
        save_tuning(MINE._replace(reasons=("one core",)))
    finally:
        os.sched_setaffinity(0, cores)
    found = load_tuning()
    assert found is not None
    assert found.reasons == MINE.reasons


def store_beside_ever_deeper_ones(path: Path) -> None:
    for depth in range(300, 20_000, 50):
        deep = "[" * depth + "]" * depth
        path.write_text(f'{{"schema_version": 3, "machines": {{"another": {deep}}}}}')
        save_tuning(MINE)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="it writes as deep as it reads")
def test_a_file_that_is_too_deep_to_write_is_refused(path: Path) -> None:
    """Python 3.12 reads deeper values than it writes."""
    path.parent.mkdir()
    with pytest.raises(LLMException, match="recursion"):
        store_beside_ever_deeper_ones(path)
    assert "another" in path.read_text()


def test_a_path_that_is_not_a_file_is_reported(path: Path) -> None:
    path.mkdir(parents=True)
    assert "not a regular file" in choose().note
    path.rmdir()
    os.mkfifo(path)
    assert "not a regular file" in choose().note


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_file_of_another_user_is_not_used(path: Path) -> None:
    save_tuning(MINE)
    os.chown(path, 12345, 12345)
    before = Held.now()
    assert "it belongs to user 12345" in choose().note
    before.check_nothing_new()


def test_a_file_of_root_is_used_by_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator may measure for all users of a machine."""
    with TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        save_tuning(MINE)
        for file in (Path(folder), tuning_path().parent, tuning_path()):
            file.chmod(0o755)
        lone_user.run("""
            from kvplan.execution.tuning import choose
            from tests.support.lone_user import become

            become()
            choice = choose()
            assert (choice.source, choice.note) == ("measured", ""), choice
        """)


def test_without_a_folder_the_builtin_tuning_is_used(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    path.parent.write_text("a file where the folder would be")
    found = choose()
    assert found.tuning == builtin_tuning()
    assert "Not a directory" in found.note
