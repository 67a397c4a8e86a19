"""Recordings that are torn, damaged, forged, or not recordings."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import kvplan
from kvplan import LLMException, LLMStatusCode, Rows, Transfer
from kvplan.cli import main
from kvplan.recording import read, who_wrote
from kvplan.recording.format import LENGTH, MAGIC, TEMPLATE, framed, row_in
from tests.recording.operations import DESC, PLAN, record, recorder, tags
from tests.support.plans import joined
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_is_left")


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


def test_a_damaged_recording_is_refused_or_read(tmp_path):
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


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (None, "its template 1 is in no file that was read"),
        ("stride", r"damaged: .*src: missing fields \['stride'\]"),
    ],
)
def test_the_reason_names_the_missing_field(tmp_path, field, reason):
    path = tmp_path / "a.kvrec"
    with recorder(path) as writer:
        record(writer, PLAN)
    rows = rows_of(path.read_bytes())
    (template,) = (row for row in rows if row[0] == TEMPLATE)
    if field is None:
        rows.remove(template)
    else:
        del template[2]["src"][field]
    path.write_bytes(MAGIC + b"".join(framed(map(msgspec.msgpack.encode, rows))))
    (transfer,) = read(path).transfers
    with refused("LLM_PARAM_INVALID", f"transfer 0.*{reason}"):
        _ = transfer.plan


def rows_of(data: bytes) -> list[list[Any]]:
    rows, at = [], len(MAGIC)
    while found := row_in(data, at):
        rows.append(msgspec.msgpack.decode(data[at + LENGTH.size : found[1]]))
        at = found[1]
    return rows


VALUES = (
    *(None, 0, -1, 2**63 - 1, 2**64 - 1, -(2**63), 1e308, float("nan"), float("inf"), True, 64),
    *("", "x", "sorted", "B2B", b"", b"123", b"\xff" * 8, [], {}, [1], {"a": 1}),
)


def leaves(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path and the value of every leaf of a row."""
    inside = enumerate(value) if isinstance(value, list) else ()
    for key, item in value.items() if isinstance(value, dict) else inside:
        yield from leaves(item, (*path, key))
    if path:
        yield path


def test_rows_with_any_values_are_refused_or_read(tmp_path, capsys):
    path, damaged = tmp_path / "a.kvrec", tmp_path / "damaged.kvrec"
    with recorder(path) as writer:
        record(writer, PLAN, "a")
        record(writer, kvplan.plan(Transfer(Rows(DESC), Rows(DESC)), local="dst"), "b")
        record(writer, joined({"x": PLAN, "y": PLAN}), "c")
        writer.event("lease", LLMStatusCode.LLM_SUCCESS, 0.0, "", {"lease": 1, "blocks": (1, 2)})
    rows = rows_of(path.read_bytes())
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


def test_a_transfer_of_negative_length_is_refused(tmp_path):
    path, damaged = tmp_path / "a.kvrec", tmp_path / "damaged.kvrec"
    with recorder(path) as writer:
        record(writer, PLAN, "a")
    rows = rows_of(path.read_bytes())
    (length,) = (transfer.seconds for transfer in read(path).transfers)
    places = [(row, place) for row in rows for place in leaves(row) if at(row, place) == length]
    assert places
    for row, place in places:
        *outer, last = place
        functools.reduce(operator.getitem, outer, row)[last] = -length
    damaged.write_bytes(MAGIC + b"".join(framed(map(msgspec.msgpack.encode, rows))))
    with refused("LLM_PARAM_INVALID", "is damaged: its time is"):
        read(damaged)


def at(row, place):
    return functools.reduce(operator.getitem, place, row)


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
