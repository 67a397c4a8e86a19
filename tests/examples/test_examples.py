"""The small examples, as a reader runs them: they succeed, and fail when wrong bytes arrive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import examples

FOLDER = Path(examples.__file__).parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=FOLDER.parent,
        env=os.environ | {"PYTHONPATH": str(FOLDER.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )


SHOWN = {
    "pull": [
        "12 slices -> 8 descriptors (4 merged)",
        "tensor 3: 0 0 309 0 0 0 0 304 305 0 0 0 0 0 0 0",
    ],
    "push": ["push_blocks  B2B", "tensor 3: 0 0 309 0 0 0 0 304 305 0 0 0 0 0 0 0"],
    "copy_and_swap": ["copy_blocks  B2B", "tensor 3: 307 0 0 0 0 300 301 0"],
    "keys": [
        "once more: no cache has CacheKey(cluster_id=1, req_id=4711",
        "room again: its cache 2",
    ],
    "several_peers": ["from cluster 3: <Plan pull_blocks", "LINKED with cluster 3: 6144 bytes"],
    "role_switch": ["LLM_EXIST_LINK", "cluster 1, DECODER", "tensor 3: 1300 1301 1302 1303"],
}


def test_every_example_is_run() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "harness"}
    # test_llm_datadist_pair.py
    pair = {f"llm_datadist_{it}" for it in ("prefill", "decode", "memory")}
    assert scripts == set(SHOWN) | pair | {"hixl_two_processes"}  # which has a test of its own


@pytest.mark.parametrize("name", SHOWN)
def test_shows_what_arrived(name: str) -> None:
    done = run("-m", f"examples.{name}")
    assert (done.returncode, done.stderr) == (0, "")
    for text in SHOWN[name]:
        assert text in done.stdout


@pytest.mark.parametrize("name", SHOWN)
def test_says_what_it_is_about(name: str) -> None:
    done = run("-m", f"examples.{name}", "--help")
    assert done.returncode == 0
    assert (FOLDER / f"{name}.py").read_text().splitlines()[0].removeprefix('"""') in done.stdout


@pytest.mark.parametrize(
    ("name", "call", "wrong"),
    [
        (
            "pull",
            "pull_blocks(key, paged, theirs, mine)",
            "pull_blocks(key, paged, [4, 5, 8], mine)",
        ),
        ("push", "push_blocks(paged, key, MINE, THEIRS)", "push_blocks(paged, key, THEIRS, MINE)"),
        ("copy_and_swap", "{12: 5, 13: 6, 2: 0}", "{12: 6, 13: 5, 2: 0}"),
        ("keys", "[REQUEST, NOBODY, PREFIX]", "[NOBODY, REQUEST, PREFIX]"),
        (
            "several_peers",
            "pull_blocks(key, cache, theirs, mine)",
            "pull_blocks(key, cache, mine, mine)",
        ),
        ("role_switch", "cache, ALL, ALL)", "cache, ALL, ALL[::-1])"),
    ],
)
def test_fails_when_the_wrong_bytes_arrive(
    name: str, call: str, wrong: str, tmp_path: Path
) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    # Of several, that which moves is the last: the first is planned.
    right, found, rest = source.rpartition(call)
    assert found
    script = tmp_path / f"wrong_{name}.py"
    script.write_text(right + wrong + rest)
    done = run(str(script))
    assert done.returncode == 1
    assert "FAILED: tensor" in done.stderr


def test_fails_when_the_other_process_does(tmp_path: Path) -> None:
    script = tmp_path / "ends_early.py"
    script.write_text((FOLDER / "pull.py").read_text().replace("127.0.0.1:0", "nowhere"))
    done = run(str(script))
    assert done.returncode == 1
    assert "FAILED: the process of prefill has ended too early" in done.stderr
