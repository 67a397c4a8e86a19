"""The tests of transfers and faults, run on one host with peers on another.

pytest and the engines of the tests run on the first host; processes of peers run on the second.
KVPLAN_TEST_ACROSS=all (`make across`) runs all of them.
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
"""Quick files that move bytes of every kind, and the least number of tests that pass there."""


@pytest.mark.parametrize(
    ("suite", "at_least"),
    (ALL if os.environ.get("KVPLAN_TEST_ACROSS") == "all" else SHARE).items(),
)
def test_suites_pass_between_hosts(
    suite: str, at_least: int, hosts: list[Namespace], cluster_key: str
) -> None:
    here, there = hosts
    # All namespaces belong to one user namespace, which a process cannot enter from inside.
    enter = [item for item in there.command() if item not in ("--user", "--preserve-credentials")]
    before = network.received(here)
    # Not tmp_path, because names of sockets in it would be too long.
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
