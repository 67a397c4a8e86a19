"""Programs whose imports are observed by the launcher or a plugin; and Mooncake's engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplan.observe import install_from
from kvplan.recording import read
from kvplan.run.__main__ import Launch, Misuse, parse
from tests.support.refusals import refused
from tests.support.zygote import ROOT

PROGRAM = """
import numpy as np
from nixl._api import nixl_agent
from mooncake.engine import TransferEngine
agent = nixl_agent("decode")
here, there = np.zeros(64, np.uint8), np.arange(64, dtype=np.uint8)
agent.register_memory([(here.ctypes.data, 64, 0, "kv")])
local, remote = (agent.prep_xfer_dlist(name, [(its.ctypes.data + i * 16, 16, 0) for i in range(4)])
                 for name, its in (("", here), ("prefill", there)))
handle = agent.make_prepped_xfer("READ", local, [1], remote, [3], b"cmpl-7:1")
assert agent.transfer(handle) == "DONE" and here[16] == 48
engine = TransferEngine()
assert engine.initialize("host", "P2PHANDSHAKE", "tcp", "") == 0
assert engine.register_memory(here.ctypes.data, 64) == 0
arguments = [here.ctypes.data + 32], [there.ctypes.data], [16]
assert engine.batch_transfer_sync_read("peer:1", *arguments) == 0 and here[47] == 15
assert engine.batch_transfer_sync_write("gone:1", *arguments) == -1
assert engine.transfer_sync_read("peer:1", here.ctypes.data, there.ctypes.data + 8, 8) == 0
"""

MOONCAKE = """
import ctypes
class TransferEngine:
    def initialize(self, *names): return 0
    def get_rpc_port(self): return 15428
    def register_memory(self, address, nbytes): return 0
    def batch_transfer_sync_read(self, target, buffers, peer_buffers, lengths):
        for row in zip(buffers, peer_buffers, lengths): ctypes.memmove(*row)
        return 0
    def batch_transfer_sync_write(self, target, buffers, peer_buffers, lengths): return -1
    def transfer_sync_read(self, target, buffer, peer_buffer, length):
        ctypes.memmove(buffer, peer_buffer, length)
        return 0
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the packages `nixl` and `mooncake`."""
    files = {
        "nixl/__init__.py": "",
        "nixl/_api.py": (ROOT / "tests/observe/fake_nixl.py").read_text(),
        "mooncake/__init__.py": "",
        "mooncake/engine.py": MOONCAKE,
        "program.py": PROGRAM,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(site: Path, *command: str, **environment: str) -> None:
    """Run a program in the folder."""
    subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=site,
        env=os.environ | {"PYTHONPATH": f"{ROOT}"} | environment,
        check=True,
        timeout=60,
    )


LAUNCHER = ("-m", "kvplan.run", "--observe")
PLUGIN = f"from kvplan.run.aliases import plugin; plugin(); plugin()\n{PROGRAM}"
LATE = f"import nixl._api as a, mooncake.engine, sys; sys.modules['nixl_cu12._api'] = a\n{PLUGIN}"


@pytest.mark.parametrize("way", ["launcher", "plugin", "late plugin", "both"])
def test_an_unchanged_program_is_observed(site: Path, way: str) -> None:
    """Calls are observed once, also if classes were imported before, by two names."""
    what = f"nixl,mooncake={site}/seen"
    if way == "launcher":
        run(site, *LAUNCHER, what, "--", "program.py")
    elif way == "both":
        run(site, *LAUNCHER, what, "--", "-c", PLUGIN)
    else:
        run(site, "-c", LATE if way == "late plugin" else PLUGIN, KVPLAN_OBSERVE=what)
    (nixl,) = map(read, (site / "seen").glob("nixl-decode-*.kvrec"))
    (transfer,) = nixl.transfers
    assert (transfer.tag, transfer.nbytes) == ("cmpl-7", 16)
    (mooncake,) = map(read, (site / "seen").glob("mooncake-host-15428-*.kvrec"))
    outcomes = [(its.operation, its.nbytes, its.error) for its in mooncake.transfers]
    assert outcomes == [
        ("pull_ranges", 16, ""), ("push_ranges", 0, "ret: -1"), ("pull_ranges", 8, ""),
    ]  # fmt: skip
    plan = mooncake.transfers[0].plan
    assert plan is not None
    assert plan.part.dst.tensor_nbytes == 64
    assert next(iter(plan.part.segments))[1:] == (32, 16)
    assert nixl.complete
    assert mooncake.complete


OURS = """
import numpy as np
from {name} import nixl_agent
import {name}._api, kvplan.nixl
assert {name}._api.nixl_agent is nixl_agent is kvplan.nixl.nixl_agent
owner, agent = nixl_agent("prefill"), nixl_agent("decode")
there, here = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
owner.register_memory([(there.ctypes.data, 64, 0, "kv")], "DRAM")
agent.register_memory([(here.ctypes.data, 64, 0, "kv")], "DRAM")
agent.add_remote_agent(owner.get_agent_metadata())
lists = [agent.prep_xfer_dlist(name, [(its.ctypes.data, 64, 0)], "DRAM")
         for name, its in (("", here), ("prefill", there))]
handle = agent.make_prepped_xfer("READ", lists[0], [0], lists[1], [0], b"cmpl-7")
state = agent.transfer(handle)
while state == "PROC": state = agent.check_xfer_state(handle)
assert state == "DONE" and (here == there).all()
for its in (agent, owner): its.agent.close()
"""


@pytest.mark.parametrize("name", ["nixl", "kvplan.nixl"])
def test_programs_on_kvplans_nixl_are_observed(site: Path, name: str) -> None:
    """Modules of kvplan are observed under their own names, and under those of the package."""
    program = OURS.format(name=name)
    run(site, *LAUNCHER, f"nixl={site}/seen", "--as", "nixl", "--", "-c", program)
    (recording,) = map(read, (site / "seen").glob("nixl-decode-*.kvrec"))
    assert [(its.tag, its.nbytes) for its in recording.transfers] == [("cmpl-7", 64)]


CHILD = "from nixl._api import nixl_agent; nixl_agent('decode')"
IN_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
MOVED = f"import os; os.chdir('nixl'); {IN_A_CHILD}"


@pytest.mark.parametrize("program", [IN_A_CHILD, MOVED], ids=["in a child", "in another folder"])
@pytest.mark.parametrize("folder", ["", "seen", "/proc/nothere"])
def test_a_program_that_records_nothing_says_so_at_its_end(
    site: Path, program: str, folder: str
) -> None:
    """The folder is relative to that in which the launcher was started."""
    what = f"nixl={folder}" if folder else "nixl"
    end = f"kvplan.run: --observe nixl: no recording was made in {site / folder}\n"
    assert launched(site, what, "pass") == end
    said = launched(site, what, program)
    if folder == "/proc/nothere":
        assert "observing has ended: FileNotFoundError" in said
        assert said.endswith(end)
    else:
        assert (said, len(list((site / folder).glob("*.kvrec")))) == ("", 1)


def test_a_forked_child_says_nothing_at_its_end(site: Path) -> None:
    end = f"kvplan.run: --observe nixl: no recording was made in {site}\n"
    assert launched(site, "nixl", "import os; os.wait() if os.fork() else None") == end


def test_a_recording_that_is_gone_was_not_made(site: Path) -> None:
    (site / "gone.kvrec").symlink_to(site / "nowhere")
    end = f"kvplan.run: --observe nixl: no recording was made in {site}\n"
    assert launched(site, "nixl", "pass") == end


def launched(site: Path, what: str, program: str) -> str:
    """Return the standard error of an observed program that succeeds."""
    ran = subprocess.run(
        [sys.executable, *LAUNCHER, what, "--", "-c", program],
        cwd=site,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{site}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0
    return ran.stderr


def test_the_launcher_takes_the_names_of_observed_libraries() -> None:
    assert parse(["--observe", "nixl", "a.py", "-x"]) == Launch(False, ("a.py", "-x"), "nixl")
    assert parse(["--observe", "nixl", "--", "-m", "vllm"]) == Launch(False, ("-m", "vllm"), "nixl")
    with pytest.raises(Misuse, match="--observe needs"):
        parse(["--observe"])
    both = "nixl, mooncake,sums=/a=b"
    assert parse(["--observe", both, "a.py"]) == Launch(False, ("a.py",), both)
    with pytest.raises(Misuse, match="--observe 'ucx' must be one of nixl, mooncake, hixl, sums"):
        parse(["--observe", "nixl,ucx=/tmp", "a.py"])
    with pytest.raises(Misuse, match="--observe 'sums' needs a library as well"):
        parse(["--observe", "sums,sums=/tmp", "a.py"])


def test_a_value_of_the_environment_is_checked() -> None:
    before = list(sys.meta_path)
    with refused("LLM_PARAM_INVALID", "must be of"):
        install_from("nixl,ucx")
    assert sys.meta_path == before
