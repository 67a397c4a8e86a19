"""The command as a shell runs it, and its plans."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kvplan
from kvplan import CacheDesc, DataType, Placement, Plan, Rows, Transfer

ROOT = Path(__file__).parents[2]

TOKENS_FIRST = CacheDesc(
    4, (16, 16, 4, 32), DataType.DT_BF16, Placement.HOST, kv_tensor_format="block token head dim"
)
HEADS_FIRST = CacheDesc(
    4, (16, 4, 16, 32), DataType.DT_BF16, Placement.HOST, kv_tensor_format="block head token dim"
)


def push(dst_blocks: list[int], dst: CacheDesc = TOKENS_FIRST, *, coalesce: bool = True) -> Plan:
    """Of blocks 4, 5 and 9."""
    return kvplan.plan(
        Transfer(Rows(TOKENS_FIRST, [4, 5, 9]), Rows(dst, dst_blocks), coalesce=coalesce),
        local="src",
    )


def command(
    *arguments: str | Path, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """A process of its own, in which warnings are errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "kvplan", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def refused(*arguments: str | Path, stdin: str = "", **environment: str) -> str:
    """Why, in the one line that it prints; exit code 2."""
    done = command(*arguments, stdin=stdin, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvplan: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("kvplan: ").rstrip()
