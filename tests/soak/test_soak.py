"""Tests of `make soak`: its report, its oracles, and a short round on each machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from tests.soak import requests_process
from tests.soak.__main__ import PARTS, ROOT, Command, Soak, main
from tests.soak.chaos import MACHINES, Wrong, check_growth
from tests.soak.chaos_process import find_mismatch, write
from tests.soak.parsers import PARSERS
from tests.soak.requests import DEADLINE_S, one_round
from tests.soak.requests_process import Decoding


def program(text: str) -> Command:
    def command(seed: int) -> Sequence[str]:
        return [sys.executable, "-c", text, str(seed)]

    return command


def soaked(tmp_path: Path, **parts: str) -> Soak:
    soak = Soak({name: program(text) for name, text in parts.items()}, tmp_path)
    soak.run(seed=7, seconds=0, rounds=2 * len(parts))
    return soak


LEFT = f"kvplan-soak-test-{os.getpid()}"
COUNTS = """
import json
held = {"1": {"first": dict.fromkeys(WHAT, 5), "last": dict.fromkeys(WHAT, 6)}}
print("a line before"); print(json.dumps({"counts": {"moved": 3}, "held": held}))
""".replace("WHAT", "('kib', 'descriptors', 'threads', 'mappings')")


def test_a_summary_adds_up_the_counts_of_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soak = soaked(tmp_path, chaos=COUNTS, fuzz="print('10 inputs')")
    assert soak.summary() == 0
    text = capsys.readouterr().out
    assert "round 3: chaos with seed 9; 0 failures so far" in text
    assert "6 moved; most growth: kib 5 to 6" in text
    assert "10 inputs" in text
    assert "4 rounds, 0 failures" in text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise SystemExit('bytes of another request')", "ended with 1"),
        ("import os; os.abort()", "ended with -6"),
        ("import subprocess; subprocess.Popen(['sleep', '60'])", "left processes"),
        (f"open('/dev/shm/{LEFT}', 'w')", f"left ['{LEFT}'] in /dev/shm"),
    ],
    ids=["status", "signal", "processes", "memory"],
)
def test_the_report_of_a_failure_contains_the_command_that_repeats_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, why: str
) -> None:
    clean = f"; import pathlib; pathlib.Path('/dev/shm/{LEFT}').unlink(missing_ok=True)"
    soak = Soak({"bad": program(text), "good": program(f"pass{clean}")}, tmp_path)
    soak.run(seed=7, seconds=0, rounds=2)
    assert soak.summary() == 1
    output = capsys.readouterr().out
    assert why in output
    assert "again: make soak PARTS=bad SEED=7 ROUNDS=1" in output
    assert "round 2: good with seed 8; 1 failures so far" in output


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--parts", "chaos-local,chess"])
    assert "parts=['chess']: known are chaos-local" in capsys.readouterr().err


def test_soak_that_is_terminated_ends_its_round() -> None:
    command = [sys.executable, "-m", "tests.soak", "--parts", "fuzz-plans", "--rounds", "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as soak:
        try:
            assert soak.stdout is not None
            assert "round 1: fuzz-plans" in soak.stdout.readline()
            children = Path(f"/proc/{soak.pid}/task/{soak.pid}/children")
            while not (child := children.read_text().strip()):
                assert soak.poll() is None
            while "parsers" not in Path(f"/proc/{child}/cmdline").read_text():
                assert soak.poll() is None
            while "libkvn" not in Path(f"/proc/{child}/maps").read_text():
                assert soak.poll() is None
            soak.terminate()
            rest = soak.stdout.read()
        finally:
            soak.kill()
    assert soak.returncode == 130
    assert "0 rounds, 0 failures" in rest
    assert not Path(f"/proc/{child}").exists()


EXAMPLES = """
from hypothesis import given, strategies

@given(strategies.integers())
def test_numbers(number):
    print(number)
"""


def test_examples_under_thread_sanitizer_are_those_of_the_seed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(EXAMPLES)
    first, command = 0, PARTS["races-tests"]
    outputs = []
    for seed in (first, first, first + 1):
        environment, _, options = " ".join(command(seed)).partition(" tools/sanitize thread ")
        (option,) = (word for word in options.split() if word.startswith("--hypothesis-seed"))
        pytest_ = [sys.executable, "-m", "pytest", "-s", "-q", "-p", "tests.conftest", option]
        done = subprocess.run(
            [*environment.split(), *pytest_, str(tmp_path / "test_it.py")],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        outputs.append(done.stdout.rpartition("in ")[0])
    assert outputs[0] == outputs[1] != outputs[2]


def test_the_oracle_detects_bytes_of_other_stamps_and_positions() -> None:
    arrays = [np.zeros((4, 16), np.uint32) for _ in range(2)]
    write(arrays, (1, 3), stamp=7)
    assert find_mismatch(arrays, (1, 3), (7,)) == ""
    assert "tensor 0, block 3" in find_mismatch(arrays, (3, 1), (7,))  # in another order
    assert "of stamp 7 and not of (8,)" in find_mismatch(arrays, (1, 3), (8,))
    assert find_mismatch(arrays, (1, 3), (8, 7)) == ""
    arrays[1][3, 5] = arrays[1][3, 4]
    assert "tensor 1, block 3, word 5 (of 1)" in find_mismatch(arrays, (1, 3), (7,))


def test_growth_is_detected() -> None:
    first = {"kib": 5, "descriptors": 5, "mappings": 5, "threads": [], "registrations": []}
    check_growth({"1": {"first": first, "last": first}})
    with pytest.raises(Wrong, match=r"cluster 1 has new threads: .'kvplan-control': 5"):
        check_growth({"1": {"first": first, "last": first | {"threads": ["kvplan-control"] * 5}}})
    for what in ("kib", "descriptors", "mappings"):
        with pytest.raises(Wrong, match=f"cluster 1 .*grew from 5 to {10**6}"):
            check_growth({"1": {"first": first, "last": first | {what: 10**6}}})


@pytest.mark.parametrize("name", PARSERS)
def test_inputs_of_parsers_are_the_same_for_the_same_seed(tmp_path: Path, name: str) -> None:
    parser = PARSERS[name](tmp_path)
    for number in range(20):
        given = parser.make(Random(f"1 {number}"))
        assert repr(parser.make(Random(f"1 {number}"))) == repr(given)
        assert parser.check(given)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_a_short_round_of_chaos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], machine: str
) -> None:
    """`make soak` starts a round by the same command.

    At its end, all engines must reach each other.
    """
    name = f"chaos-{machine}"
    soak = Soak({name: lambda seed: [*PARTS[name](seed), "24"]}, tmp_path)
    soak.run(seed=3, seconds=0, rounds=1)
    assert soak.summary() == 0, capsys.readouterr().out
    counts = soak.tallies[name].counts
    assert min(counts["pull moved"], counts["push moved"], counts["released"]) > 0


@pytest.mark.slow
def test_a_short_round_of_requests() -> None:
    """With this seed, engines of both kinds are killed."""
    found = one_round(3, 40)
    assert min(found["counts"][name] for name in ("fetched", "recomputed", "producers killed")) > 0
    assert found["until_no_block_is_held_s"] < DEADLINE_S


@pytest.fixture
def decoding() -> Iterator[Decoding]:
    engine = Decoding("decode", 1, 4)
    yield engine
    engine.side.worker.close()


def test_the_oracle_of_requests_detects_other_tokens_and_late_writes(decoding: Decoding) -> None:
    prompt = [*range(70)]
    blocks = decoding.take(prompt)
    decoding.compute(prompt, blocks, [0, 1, 2])
    decoding.check("mine", prompt, blocks)
    with pytest.raises(requests_process.Wrong, match="mine: block 2 of layer 9 is of other tokens"):
        decoding.check("mine", [*prompt[:-1], 7], blocks)
    decoding.give_back(blocks)
    decoding.side.packed(10)[blocks[1], 0, 0, 0] = 1
    with pytest.raises(requests_process.Wrong, match="was written to, in layer 10"):
        decoding.take([*range(128)])


def test_the_oracle_of_requests_detects_blocks_that_had_not_failed(decoding: Decoding) -> None:
    request = SimpleNamespace(request_id="mine", prompt_token_ids=[*range(70)])
    arrived = requests_process.Arrived(request, 32, [3, 1, 2])
    decoding.compute(request.prompt_token_ids, arrived.blocks, [0])
    assert decoding._conclude(arrived, {1, 2}) == "recomputed"
    with pytest.raises(requests_process.Wrong, match=r"mine: \[1\] of \[3, 1, 2\] failed; 32 were"):
        decoding._conclude(arrived, {1})
