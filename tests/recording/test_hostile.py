"""A recording may have any content, which must not control a terminal or crash a command."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import numpy as np
import pytest

from kvplan.cli import main
from kvplan.recording.format import (
    COMPRESSED,
    END,
    EVENT,
    HEADER,
    LENGTH,
    MAGIC,
    SPARE_ROOM,
    TEMPLATE,
    TRANSFER,
    encode,
    framed,
)
from kvplan.recording.reader import read

ESCAPE = "\x1b]0;title\x07\x1b[2J"


@pytest.fixture
def hostile(tmp_path):
    """A recording whose texts have escape sequences, and whose values have other types."""
    rows = [
        (HEADER, "ab" * 8, 0, ESCAPE, ESCAPE, 1, 2, ESCAPE, 1.7e9, 5.0),
        (TRANSFER, 6.0, 0.1, ESCAPE, 1, f"{ESCAPE}\n 7 a row", ESCAPE, 7, 1, (1,), 0, ()),
        (EVENT, 6.0, 0.1, f"link{ESCAPE}", 1, ESCAPE, {ESCAPE: ESCAPE, "peer": ESCAPE}),
        (EVENT, 6.0, 0.1, "link_state", 0, "", {"peer": [1, 2], "lease": [1], "tag": [ESCAPE]}),
        (EVENT, 6.0, 0.1, "lease", 0, "", {"age": float("nan"), "far": float("-inf")}),
        (END, 7.0),
    ]
    path = tmp_path / "hostile.kvrec"
    path.write_bytes(MAGIC + b"".join(framed(map(encode, rows))))
    return path


@pytest.mark.parametrize(
    "options",
    [[], ["--failed"], ["--plan", "0"], ["--block", "1:2"]],
    ids=" ".join,
)
def test_a_recording_does_not_control_the_terminal(hostile, capsys, options):
    assert main(["trace", str(hostile), *options]) == 0
    text = capsys.readouterr().out
    assert text.replace("\n", "").isprintable()
    assert not any(line.startswith(" 7 a row") for line in text.splitlines())


def test_exports_are_json(hostile, tmp_path, capsys):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert main(["trace", str(hostile), "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=refuse)
    out = tmp_path / "trace.json"
    assert main(["trace", str(hostile), "--perfetto", str(out)]) == 0
    json.loads(out.read_text(), parse_constant=refuse)


def file_of(path, *rows):
    head = (HEADER, "ab" * 8, 0, "1", "host", 1, 2, "PROMPT", 1.7e9, 5.0)
    shorts = [zlib.compress(encode(row)) for row in (head, *rows)]  # the writer does so for some
    frames = (LENGTH.pack(len(short) | COMPRESSED) + short for short in shorts)
    path.write_bytes(MAGIC + b"".join(frames))
    return path


def transfer(*parts, leases=()):
    return (TRANSFER, 6.0, 0.1, "pull", 0, "", "", 7, 1, leases, 0, parts)


LITTLE: Any = ("", None, 0, b"", b"", None)
FAR_TOO_MANY = [
    [transfer(*[LITTLE] * 2_000_000)],
    [transfer(leases=[1] * 8_000_000)],
    [(TEMPLATE, 0, {"sides": [[]] * 8_000_000}, ("", ""), (0, 0))],
    [transfer(leases=[1] * (SPARE_ROOM - 1000))] * 8,
    # The first row gives room once, and not again to each row behind it.
    [
        (EVENT, 6.0, 0.1, "link", 0, random.Random(1).randbytes(25_000).hex(), {}),
        *[transfer(leases=[1] * (SPARE_ROOM - 1000))] * 8,
    ],
]


@pytest.mark.parametrize(
    "rows", FAR_TOO_MANY, ids=["parts", "leases", "a template", "many rows", "a long row"]
)
def test_a_small_file_takes_little_memory(rows, tmp_path, capsys):
    """Each row would become gigabytes of objects, a thousand times its length in the file."""
    path = file_of(tmp_path / "small.kvrec", *rows)
    assert path.stat().st_size < 200_000
    assert main(["trace", str(path)]) == 2
    assert "is damaged after" in capsys.readouterr().err


def test_rows_that_compress_best_are_read(tmp_path):
    """Rows of one kind have segments of one size from one place, many times."""
    count = 100_000
    same, offsets = np.full(count, 65536, "<u8"), np.arange(count, dtype="<u8") * 65536
    columns = [item.tobytes() for item in (same, offsets, same)]
    rows = [transfer(("", None, 0, b"", b"", (count, *columns)))] * 4
    path = file_of(tmp_path / "large.kvrec", *rows)
    assert path.stat().st_size < 4 * 24 * count / 10
    assert len(read(path)) == 4
