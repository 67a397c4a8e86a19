"""The suites of transfers and faults, run on one host with their peers on another.

pytest itself runs on the first host, with the engines that the tests make; the processes of their
peers run on the second one. KVPLAN_TEST_ACROSS=all runs all of them (`make across`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from tempfile import TemporaryDirectory

import pytest

from tests.across import network
from tests.support.peer import ROOT
from tools.namespaces import Namespace

ALL = {"tests/datadist": 200, "tests/faults": 100}
SHARE = {"tests/datadist/test_transfers.py": 25}
"""Files, and how many tests pass there at least. What is quick, and moves bytes of every kind."""


@pytest.mark.parametrize(
    ("suite", "at_least"),
    (ALL if os.environ.get("KVPLAN_TEST_ACROSS") == "all" else SHARE).items(),
)
def test_between_hosts(suite: str, at_least: int, hosts: list[Namespace], cluster_key: str) -> None:
    here, there = hosts
    # All belong to one user namespace, if any: from inside it is not entered again.
    enter = [item for item in there.command() if item not in ("--user", "--preserve-credentials")]
    before = network.received(here)
    # Not tmp_path: the names of sockets in it would be too long.
    with TemporaryDirectory(prefix="kv") as inner:
        done = here.run(
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "--timeout=120",
                "--tb=short",
            ),
            *(f"--basetemp={inner}", suite),
            cwd=ROOT,
            env=os.environ
            | {
                "PYTHONPATH": str(ROOT),
                "KVPLAN_TEST_MACHINES": "tcp",
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
    assert int(passed) >= at_least, done.stdout
    assert network.received(here) - before > 100_000, "they took another way"
