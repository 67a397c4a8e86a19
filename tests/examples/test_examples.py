"""Tests that the small examples fail when wrong bytes arrive, and print their purpose.

`test_standalone.py` tests that they succeed with nothing but installed packages.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import examples
from tests.support import zygote

FOLDER = Path(examples.__file__).parent
NO_TORCH = pytest.mark.skipif(
    find_spec("torch") is None, reason="needs torch, 900 MB: pip install torch==2.13.0"
)

SHOWN = {
    "pull": [
        "12 slices -> 8 descriptors (4 merged)",
        "tensor 3: 0 0 309 0 0 0 0 304 305 0 0 0 0 0 0 0",
    ],
    "push": ["push_blocks  B2B", "tensor 3: 0 0 309 0 0 0 0 304 305 0 0 0 0 0 0 0"],
    "copy_and_swap": [
        "tensor 3: 301 0 300..0",
        "copy_blocks  B2B",
        "tensor 3: 307 0 0 0 0 300 301 0",
    ],
    "keys": [
        "again: no cache has CacheKey(cluster_id=1, req_id=4711",
        "room again: its cache 2",
    ],
    "several_peers": ["from cluster 3: <Plan pull_blocks", "LINKED with cluster 3: 6144 bytes"],
    "gather_leases": [
        "source 0: 3584 bytes",
        "tensor 3, token 20, by head: 321 721 1121 1521",
        "again: gather_blocks: 1 of 2 sources failed: sources[1] lease 1 of request 4711",
    ],
    "role_switch": ["LLM_EXIST_LINK", "cluster 1, DECODER", "tensor 3: 1300 1301 1302 1303"],
    "asyncio_service": [
        '"blocks": [64]}: src.blocks[0]=64 is out of range [0, 64)',
        '"blocks": [0]}: cluster 5 is not linked',
        "blocks!: JSON is malformed",
        "8 clients at once: 80 answers, every number as it should be",
        "peer 4: ",
    ],
    "sglang_pair": [
        "tensor 3, pages [1, 30, 2, 8]: 301 302 303 304",
        "room 4712: cluster 1 refuses: 4712 was given up by prefill (LLM_KV_CACHE_NOT_EXIST)",
        "prefill: Success",
    ],
    "lmcache_chunks": [
        "64 tokens, 2 blocks -> 8 blocks",
        "layer 1: 64 of 75 tokens in 8 blocks",
        "after the eviction: lease 1 of prompt 1 was released",
    ],
    "why_is_it_wrong": [
        "cmpl-2: DONE, the answer is 0085e81e: WRONG, alone it is 5e6b4fdc",
        "4 of 12 sums differ from",
        "layer 0, run 1: block 1 > block 6: ",
        "8 of 12 sums differ from",
        "layer 0, run 0: block 1 > block 5: ",
        "layers: 12 of 12 runs differ; the first is layer 0, run 0: block 3 > block 0 in A, and ",
        "layer 0, run 0 from layer 1:",
    ],
    "torch_tensors": ["layer 3: 75 tokens in 10 blocks, and nothing else is written"],
}
"""Some of the lines that each example of one program prints."""


def run(*command: Path | str) -> subprocess.CompletedProcess[str]:
    """Run a script as `python -W error` does, with the kvplan of this tree, in a fork."""
    return zygote.run(
        "tests.examples.test_examples",
        *map(str, command),
        imported=("asyncio", "multiprocessing.spawn", "numpy", "kvplan.engine.datadist"),
        flags=("-W", "error"),
        environment=os.environ | {"PYTHONPATH": str(FOLDER.parent)},
    )


def main(*command: str) -> None:
    """Run a script in a fork; its children are new interpreters."""
    sys.argv = [*command]
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(item, marks=NO_TORCH if item == "torch_tensors" else ())
        for item in [*SHOWN, "two_hosts"]
    ],
)
def test_the_help_of_an_example_is_its_first_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = FOLDER / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert script.read_text().splitlines()[0].removeprefix('"""') in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "call", "wrong"),
    [
        ("pull", "Rows(key, theirs), Rows(paged, mine)", "Rows(key, [4, 5, 8]), Rows(paged, mine)"),
        ("push", "Rows(paged, MINE), Rows(key, THEIRS)", "Rows(paged, THEIRS), Rows(key, MINE)"),
        ("copy_and_swap", "{12: 5, 13: 6, 2: 0}", "{12: 6, 13: 5, 2: 0}"),
        ("keys", "[REQUEST, PADDING, PREFIX]", "[PADDING, REQUEST, PREFIX]"),
        (
            "several_peers",
            "Rows(key, theirs), Rows(cache, mine)",
            "Rows(key, mine), Rows(cache, mine)",
        ),
        ("gather_leases", "Transfer(sources, Rows", "Transfer(sources, num_tokens=27, dst=Rows"),
        ("sglang_pair", "Target(kv_indices.tolist())", "Target(kv_indices.tolist()[::-1])"),
        ("lmcache_chunks", "Rows(cache, MINE)", "Rows(cache, MINE[::-1])"),
        ("role_switch", "cache, ALL, ALL)", "cache, ALL, ALL[::-1])"),
        ("asyncio_service", "1_000 * tensor + block", "1_000 * tensor + block + (block == 63)"),
        # So that no blocks are swapped.
        ("why_is_it_wrong", "table[1], table[0]", "table[0], table[1]"),
        # Then a client waits for no answer.
        ("asyncio_service", "DEADLINE_S = 5.0", "DEADLINE_S = 0.0"),
        pytest.param(
            "torch_tensors",
            "Rows(cache, MINE), num_tokens=TOKENS)",
            "Rows(cache, MINE), num_tokens=TOKENS - 1)",
            marks=NO_TORCH,
        ),
    ],
)
def test_an_example_fails_when_wrong_bytes_arrive(
    name: str, call: str, wrong: str, tmp_path: Path
) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    # Of several calls, the last one moves bytes; the first is only planned.
    right, found, rest = source.rpartition(call)
    assert found
    script = tmp_path / f"wrong_{name}.py"
    script.write_text(right + wrong + rest)
    done = run(script)
    assert done.returncode == 1
    assert "FAILED: " in done.stderr


def test_an_example_fails_when_its_other_process_fails(tmp_path: Path) -> None:
    script = tmp_path / "ends_early.py"
    script.write_text((FOLDER / "pull.py").read_text().replace("127.0.0.1:0", "nowhere"))
    done = run(script)
    assert done.returncode == 1
    assert "listen_ip_info (llm.ListenIpInfo)='nowhere'" in done.stderr
