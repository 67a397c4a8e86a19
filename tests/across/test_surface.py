"""Examples between hosts that share only addresses and a key file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import examples
from tests.across import network
from tests.across.engine import OWN_PROCESSES
from tests.examples.test_llm_datadist_pair import DECODE, PATIENCE, PREFILL
from tests.support.installation import run, users_environment
from tools.namespaces import Namespace

FOLDER = Path(examples.__file__).parent
BLOCKS, SLOT = 6 * 3 * 8 * 2 * 16, 6 * 32 * 2 * 16  # numbers of four bytes


def launched(host: Namespace, program: str, *arguments: str) -> subprocess.Popen[str]:
    return host.start(
        *(*OWN_PROCESSES, sys.executable, "-m", "kvplan.run", FOLDER / program, *arguments),
        env=os.environ | {"PYTHONPATH": str(FOLDER.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_pair_transfers_in_both_modes(hosts: list[Namespace]) -> None:
    here, there = (host.address for host in hosts)
    where = (f"--prefill={here}:26001", f"--decode={there}:26000", f"--scheduler={here}:26100")
    before = network.received(hosts[1])
    prefill = launched(hosts[0], PREFILL, *where)
    waiting = prefill.stdout.readline()
    decode = launched(hosts[1], DECODE, *where)
    output, errors = decode.communicate(timeout=PATIENCE)
    rest, prefill_errors = prefill.communicate(timeout=PATIENCE)
    assert (prefill.returncode, decode.returncode) == (0, 0), prefill_errors + errors
    assert waiting + rest == "prefill: waiting for decode\nprefill: all was sent\n"
    assert output == (
        f"decode: pull_blocks: {BLOCKS} numbers, all in their places\n"
        f"decode: pull_cache: {SLOT} numbers, all in their places\n"
        "decode: pull_cache again: the key is gone\n"
        f"decode: push_blocks: {BLOCKS} numbers, all in their places\n"
        f"decode: transfer_cache_async: {BLOCKS} numbers, all in their places\n"
    )
    assert network.received(hosts[1]) - before > 4 * (3 * BLOCKS + SLOT)


@pytest.mark.slow  # needs the wheel
def test_two_hosts_transfer_encrypted_bytes(
    hosts: list[Namespace], python: Path, tmp_path: Path
) -> None:
    shutil.copy(FOLDER / "two_hosts.py", tmp_path)
    key = tmp_path / "cluster.key"
    run([python.with_name("kvplan"), "keygen", key])
    address = f"{hosts[0].address}:26000"

    def started(host: Namespace, *arguments: str) -> subprocess.Popen[str]:
        return host.start(
            *(*OWN_PROCESSES, python, "-W", "error", tmp_path / "two_hosts.py"),
            *("--key", key, "--encrypt", *arguments),
            env=users_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    before = [network.received(host) for host in hosts]
    prefill = started(hosts[0], "--listen", address)
    listening = prefill.stdout.readline()
    decode = started(hosts[1], "--connect", address)
    pulled, errors = decode.communicate(timeout=PATIENCE)
    pushed, prefill_errors = prefill.communicate(timeout=PATIENCE)
    assert (prefill.returncode, decode.returncode, prefill_errors + errors) == (0, 0, "")
    assert listening == f"prefill: listening at {address}\n"
    assert "the bytes go over tcp" in pulled
    assert "every byte as it should be" in pulled
    assert "every byte as it should be" in pushed
    moved = 2 << 20  # in each direction
    assert all(
        network.received(host) - had > moved for host, had in zip(hosts, before, strict=True)
    )
