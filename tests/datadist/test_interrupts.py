"""A KeyboardInterrupt between any two steps of a call leaves nothing of the call behind."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvplan import (
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LLMException,
    LlmRole,
    Rows,
    Transfer,
    Transfers,
)
from tests.datadist.machine import Machine
from tests.support import forked
from tests.support.interrupts import Interrupts
from tests.support.wrappers import delay

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("kind", "interrupts"),
    [
        ("index", 1500),
        ("gather", 500),
        pytest.param("layers", 1500, marks=pytest.mark.slow),
    ],
)
def test_a_storm_of_interrupts_leaves_nothing_in_flight(
    machine: Machine, kind: str, interrupts: int
) -> None:
    arguments = (machine.name, kind, str(interrupts))
    command = (sys.executable, "-m", "tests.datadist.interrupted_process", *arguments)
    process = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert json.loads(process.stdout) == {
        "in_flight": [0, 0],
        "caches": 0,
        "unlinked": "LLM_SUCCESS",
        "finalized_at_once": True,
    }


def interrupted_runs() -> int:
    """Interrupt `run` with two peers at each place; then no task is in flight."""
    desc = CacheDesc(1, (8, 64), DataType.DT_INT8)
    with ExitStack() as held:
        transfers = held.enter_context(Transfers(1, wrap=lambda backend: delay(backend, 600_000)))
        user = held.enter_context(LlmDataDist(2, LlmRole.MIX, transfers=transfers))
        user.initialize({"kvplan.transport": "local"})
        pulls: dict[str, Transfer] = {}
        for number in (1, 3):
            owner = held.enter_context(LlmDataDist(number, LlmRole.MIX))
            owner.initialize({"ListenIpInfo": "127.0.0.1:0", "kvplan.transport": "local"})
            assert owner.listen_address is not None
            user.link_clusters([ClusterInfo(number, owner.listen_address)], 10_000)
            source = CacheIndex(number, owner.allocate_blocks_cache(desc).cache_id)
            pulls[f"{number}"] = Transfer(
                Rows(source, [0]), Rows(user.allocate_blocks_cache(desc), [0])
            )

        def run() -> None:
            with suppress(LLMException):  # the last call, which nothing interrupts
                user.run(pulls, timeout_ms=3000)

        interrupts = Interrupts("/kvplan/execution/transfers.py")
        while interrupts.call(run):
            assert ": 0 tasks" in repr(user._running().transfers._executor), interrupts.place
            assert user.metrics()["in_flight"] == 0, interrupts.place
    return interrupts.place


def test_an_interrupted_run_leaves_no_task_in_flight() -> None:
    code = "from tests.datadist.test_interrupts import *; print(interrupted_runs())"
    done = forked.python(code, imported=("tests.datadist.test_interrupts",))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
