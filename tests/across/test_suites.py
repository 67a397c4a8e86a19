"""The suites of transfers, faults and links, run on one host with their peers on another.

pytest itself runs on the first host, with the engines that the tests make; the processes of their
peers run on the second one. KVPLAN_TEST_ACROSS=all runs all of them (`make across`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.across import network
from tests.transport.owner import ROOT
from tests.ucx_library import found
from tools.namespaces import Namespace

ALL = ("tests/datadist", "tests/faults", "tests/links")
SHARE = ("tests/datadist/test_transfers.py", "tests/datadist/test_outcomes.py")
"""Of what is quick, what moves bytes of every kind."""


def suites() -> tuple[str, ...]:
    return ALL if os.environ.get("KVPLAN_TEST_ACROSS") == "all" else SHARE


@pytest.mark.parametrize("suite", suites())
def test_between_hosts(
    suite: str, hosts: list[Namespace], cluster_key: str, tmp_path: Path
) -> None:
    here, there = hosts
    # All belong to one user namespace, if any: from inside it is not entered again.
    enter = [it for it in there.command() if it not in ("--user", "--preserve-credentials")]
    before = network.received(here)
    with found():
        done = here.run(
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=120"),
            *(f"--basetemp={tmp_path / 'inner'}", suite),
            cwd=ROOT,
            env=os.environ
            | {
                "PYTHONPATH": str(ROOT),
                "KVPLAN_TEST_MACHINES": "ucx",
                "KVPLAN_TEST_IP": here.address,
                "KVPLAN_TEST_PEER_IP": there.address,
                "KVPLAN_TEST_PEER_COMMAND": json.dumps(enter),
                "KVPLAN_TEST_CLUSTER_KEY": cluster_key,
            },
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    assert done.returncode == 0, done.stdout
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 50
    assert network.received(here) - before > 100_000, "they took another way"
