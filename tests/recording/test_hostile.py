"""Recordings are whatever a file says: nothing of them commands a terminal, or ends a command."""

from __future__ import annotations

import json

import pytest

from kvplan.cli import main
from kvplan.recording.format import END, EVENT, HEADER, MAGIC, TRANSFER, encode, framed

ESCAPE = "\x1b]0;title\x07\x1b[2J"


@pytest.fixture
def hostile(tmp_path):
    """Every text of it has an escape sequence, and values are of other types."""
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
    [[], ["--failed"], ["--plan", "0"], ["--block", "1:2"], ["--replay"], ["--follow"]],
    ids=" ".join,
)
def test_nothing_in_a_recording_commands_the_terminal(hostile, capsys, options):
    assert main(["trace", str(hostile), *options]) == 0
    text = capsys.readouterr().out
    assert text.replace("\n", "").isprintable()
    assert not any(line.startswith(" 7 a row") for line in text.splitlines())


def test_what_is_exported_is_json(hostile, tmp_path, capsys):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert main(["trace", str(hostile), "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=refuse)
    out = tmp_path / "trace.json"
    assert main(["trace", str(hostile), "--perfetto", str(out)]) == 0
    json.loads(out.read_text(), parse_constant=refuse)
    page = tmp_path / "page.html"
    assert main(["trace", str(hostile), "--html", str(page)]) == 0
    data = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    json.loads(data, parse_constant=refuse)
