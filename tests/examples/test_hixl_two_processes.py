"""The example of hixl, run as a reader would, and with kvplan's name for its module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import examples

SCRIPT = Path(examples.__file__).parent / "hixl_two_processes.py"

SAID = """\
client: read 512 blocks of 16384 bytes; as they should be: True
client: wrote them back, 64 at a time, from [0, 64, 128, 192, 256, 320, 384, 448] on
server: written: 512 blocks; as it should be: True
"""


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_the_example_reads_and_writes_all_blocks(transport: str) -> None:
    command = [sys.executable, "-W", "error", "-m", "kvplan.run", str(SCRIPT)]
    done = subprocess.run(
        [*command, "--transport", transport],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr, done.returncode) == (SAID, "", 0)
