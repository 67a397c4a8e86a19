"""Two agents in two processes, over NIXL itself and kvplan's: their recordings fit together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from kvplan.cli import main
from kvplan.observe.observer import peer_number
from kvplan.recording import read
from tests.support.zygote import ROOT

PROGRAM = ROOT / "examples/why_is_it_wrong.py"
NIXL = ROOT / "build/peers/bin/python"
OWNERS = """
import runpy, sys
library = runpy.run_path(sys.argv[1])["nixl_agent"].__module__
print(library)
"""

pytestmark = pytest.mark.slow

Ends = tuple[str, str]
"""The recordings of decode and of prefill."""


@pytest.fixture(
    params=[
        "kvplan.nixl",
        pytest.param(
            "nixl_cu12",
            marks=pytest.mark.skipif(
                not (NIXL.parents[1] / "ready").exists(), reason="make bench-peers installs NIXL"
            ),
        ),
    ]
)
def library(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(library: str, *arguments: str) -> str:
    """Run Python with this library, and with kvplan of this tree, and return its output."""
    installed = library == "nixl_cu12"
    folders = [str(ROOT), *([sysconfig.get_path("purelib")] if installed else [])]
    done = subprocess.run(
        [NIXL if installed else sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    return done.stdout


def ends(library: str, plant: str, folder: Path) -> Ends:
    """Run both processes with the planted mistake."""
    said = run(library, str(PROGRAM), "--plant", plant, "--folder", str(folder))
    assert "cmpl-1: DONE" in said
    assert said.count("WRONG") == 1
    (decode,), (prefill,) = (folder.glob(f"nixl-{name}-*") for name in ("decode", "prefill"))
    return str(decode), str(prefill)


def wrong(found: Ends, request: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the report of `kvplan trace --sums` on a request."""
    capsys.readouterr()
    code = main(["trace", *found, "--sums", "--request", request, "--json"])
    (transfer,) = json.loads(capsys.readouterr().out)["transfers"]
    assert code == bool(transfer["wrong"])
    return list(transfer["wrong"])


def test_the_requested_library_is_used(library: str) -> None:
    assert run(library, "-c", OWNERS, str(PROGRAM)).split()[-1].startswith(library)


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        ("stale", [(layer, 1, "block 1 > block 6", None) for layer in range(4)]),
        (
            "swapped",
            [
                (layer, run, moved, 3 * layer + 1 - run)
                for layer in range(4)
                for run, moved in ((0, "block 1 > block 5"), (1, "block 7 > block 6"))
            ],
        ),
    ],
)
def test_sums_of_both_ends_name_the_wrong_blocks(
    library: str,
    plant: str,
    expected: list[tuple[int, int, str, int | None]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first wrong block is the first of the request, and the request before has none."""
    found = ends(library, plant, tmp_path)
    assert wrong(found, "cmpl-1", capsys) == []
    listed = wrong(found, "cmpl-2", capsys)
    assert [(block["index"], block["origin"]) for block in listed] == [
        (3 * layer + run, origin) for layer, run, _, origin in expected
    ]
    for block, (layer, run, moved, _) in zip(listed, expected, strict=True):
        assert block["text"].startswith(f"layer {layer}, run {run}: {moved}: ")
    decode, prefill = map(read, map(Path, found))
    numbers = peer_number("decode"), peer_number("prefill")
    assert (decode.header.cluster_id, prefill.header.cluster_id) == numbers
    assert [transfer.peer for transfer in decode.transfers] == [numbers[1]] * 2
    assert decode.complete
    assert prefill.complete


def test_two_requests_are_told_apart(
    library: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layers that they read differ, so the recording of one end suffices."""
    decode, _ = ends(library, "layer", tmp_path)
    for tags, code, differ in (
        (("cmpl-1", "cmpl-1"), 0, []),
        (("cmpl-1", "cmpl-2"), 1, ["layers", "src blocks", "dst blocks"]),
    ):
        capsys.readouterr()
        assert main(["trace", decode, "--compare", *tags, "--json"]) == code
        (compared,) = json.loads(capsys.readouterr().out)["transfers"]
        assert [text.partition(":")[0] for text in compared["differences"]] == differ
        if differ:
            first = "layer 0, run 0: block 3 > block 0 in A, and layer 0, run 0 from layer 1: "
            assert first in compared["differences"][0]
