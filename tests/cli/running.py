"""The command as a shell runs it, and plans for it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import kvplan
from kvplan import CacheDesc, DataType, Placement, Plan, Rows, Transfer, cli
from tests.support import zygote

IMPORTED = (
    "tests.cli.peer_process",
    "kvplan.cli.info.look",
    *{row.module: None for row in cli.COMMANDS.values()},
)

TOKENS_FIRST = CacheDesc(
    4, (16, 16, 4, 32), DataType.DT_BF16, Placement.HOST, kv_tensor_format="block token head dim"
)
HEADS_FIRST = CacheDesc(
    4, (16, 4, 16, 32), DataType.DT_BF16, Placement.HOST, kv_tensor_format="block head token dim"
)


def push(dst_blocks: list[int], dst: CacheDesc = TOKENS_FIRST, *, coalesce: bool = True) -> Plan:
    """Return a plan that pushes blocks 4, 5 and 9."""
    return kvplan.plan(
        Transfer(Rows(TOKENS_FIRST, [4, 5, 9]), Rows(dst, dst_blocks), coalesce=coalesce),
        local="src",
    )


def command(
    *arguments: str | Path,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, in which warnings are errors.

    Args:
        arguments: The words after `kvplan`.
        stdin: Input of the command.
        environment: Environment of the command; by default that of this process.
        variables: Additional variables.
    """
    return zygote.run(
        "tests.cli.running",
        *map(str, arguments),
        imported=IMPORTED,
        flags=("-W", "error"),
        environment=dict(os.environ if environment is None else environment) | variables,
        stdin=stdin,
    )


def main(*arguments: str) -> None:
    """Run the command in a fork; the process in which `kvplan info` looks is a fork of that one."""
    sys.argv = ["kvplan", *arguments]
    import_module("kvplan.cli.info")._start = start_look  # type: ignore[attr-defined]
    sys.exit(cli.main())


def start_look(notes: int, device_id: int, said: int) -> zygote.Forked:
    """Start a look like `_start` of kvplan.cli.info, without a new interpreter and its imports."""
    if pid := os.fork():
        return zygote.Forked(pid)
    null = os.open(os.devnull, os.O_RDWR)
    for number, descriptor in enumerate((null, null, said)):
        os.dup2(descriptor, number)
    sys.argv = ["look", str(notes), str(device_id)]
    code = 1
    try:
        import_module("kvplan.cli.info.look").main()
        code = 0
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    ctypes.CDLL(None).exit(code)  # not os._exit: libraries release their resources
    raise AssertionError


def refused(*arguments: str | Path, stdin: str = "", **environment: str) -> str:
    """Return the one line that the refused command prints; its exit code is 2."""
    done = command(*arguments, stdin=stdin, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvplan: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("kvplan: ").rstrip()


if __name__ == "__main__":
    main(*sys.argv[1:])
