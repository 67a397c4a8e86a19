"""The tables of docs/how-to/testing.md, compared with those of vLLM's own block manager."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import kvplan
from kvplan import Rows, Transfer
from kvplan.testing import make_desc, run_reference
from tests.vllm.pretended import NEEDS_VLLM, PYTHON

ROOT = Path(__file__).parents[2]


def documented(name: str) -> list[int]:
    text = (ROOT / "docs/how-to/testing.md").read_text()
    found = re.search(rf"^{name} = (\[.*\])$", text, re.MULTILINE)
    assert found
    numbers: list[int] = json.loads(found[1])
    return numbers


@pytest.mark.slow  # imports torch
@NEEDS_VLLM
def test_the_documented_tables_equal_those_of_vllm() -> None:
    code = "import json, examples.vllm.block_tables as it; print(json.dumps(it.tables()))"
    run = subprocess.run([PYTHON, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    prefill, decode, num_cached = json.loads(run.stdout.splitlines()[-1])
    assert num_cached == 32
    assert (prefill, decode) == (documented("PREFILL"), documented("DECODE"))


def test_the_tables_are_of_one_request_without_the_null_block() -> None:
    for table, blocks in ((documented("PREFILL"), 20), (documented("DECODE"), 28)):
        assert len(set(table)) == len(table) == -(-150 // 16)
        assert all(0 < item < blocks for item in table)


def test_each_token_that_was_not_cached_arrives() -> None:
    desc, tables = make_desc(blocks=28), (documented("PREFILL"), documented("DECODE"))
    rows = (Rows(desc, table, first_token=32) for table in tables)
    moved = run_reference(kvplan.plan(Transfer(*rows, num_tokens=118), local="dst"))
    for token in range(32, 150):
        (src, dst), offset = (item[token // 16] for item in tables), token % 16
        assert (moved.dst[0][dst, offset] == moved.src[0][src, offset]).all()
