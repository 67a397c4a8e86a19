"""Plant bugs in rooms of kvplan, one at a time, and print how many of them the rooms' tests detect.

A bug is one small change of the source (tools/changes.py). Bugs are planted in a copy of the tree;
the seed chooses a sample of all possible ones. The tests that execute the changed line run first,
each in a fork that has imported pytest; then all tests of the room, since a line may be executed in
other processes of a test. An undetected bug means a missing test, or an equivalent program: read
the list to decide. Exits with 1 if too few were detected.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData

from tools.changes import changes

ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "mutants"
TREE = ("kvplan", "kvnative", "include", "tests", "tools", "docs", "examples", "benchmarks")
FILES = ("pyproject.toml", "setup.py", "conftest.py", "pytest_kvplan.py", "README.md")
# Arguments of pytest for each room: its own tests, and tests of rooms above that specify its use.
# Quick tests come first, because the first failure ends the run.
ROOMS = {
    "addressed": "tests/addressed tests/hixl -k 'not ascend'",
    "cli": "tests/cli tests/recording/test_trace.py tests/observe/test_sums.py",
    "control": "tests/control tests/links tests/datadist/test_status_socket.py "
    "-k 'not ucx and not ascend'",
    "debug": "tests/debug",
    "device": "tests/device tests/cuda",
    "engine": "tests/engine tests/datadist tests/links -k 'not ucx and not ascend'",
    "execution": "tests/execution tests/transport -k 'not ucx'",
    "hixl": "tests/hixl -k 'not ascend'",
    "inspection": "tests/inspection -k 'not readme and not browser'",
    "links": "tests/links tests/datadist -k 'not ucx and not ascend'",
    "llm_datadist": "tests/llm_datadist",
    "mooncake": "tests/mooncake tests/addressed",
    "nixl": "tests/nixl tests/addressed",
    "observe": "tests/observe",
    "planning": "tests/planning tests/inspection",
    "recording": "tests/recording tests/debug",
    "run": "tests/run tests/observe/test_launcher.py",
    "serving": "tests/serving",
    "system": "tests/addressed tests/engine tests/transport -k 'not ucx and not ascend'",
    "tensors": "tests/planning tests/addressed tests/engine -k 'not ucx and not ascend'",
    "testing": "tests/testing",
    "transport": "tests/transport tests/links -k 'not ucx and not ascend'",
    "vllm": "tests/vllm",
}
IMPORTED = ("numpy", "msgspec", "hypothesis.extra.numpy", "sybil", "_hypothesis_pytestplugin")
COVERAGE = """[run]
source = kvplan
data_file = covered
"""
Covering = dict[Path, dict[int, list[str]]]
"""The tests that execute each line of each file, those that execute little first."""
_TRACE = sys.gettrace()  # of `coverage`, which loads this module as a plugin of pytest


class Room:
    """A room in the copy, and its tests."""

    def __init__(self, name: str) -> None:
        self.paths = sorted((COPY / "kvplan" / name).rglob("*.py"))
        words = shlex.split(ROOMS[name])
        self._tests = [word for word in words if word.startswith("tests/")]
        self._selection = words[len(self._tests) :]
        began = time.monotonic()
        command = [sys.executable, "-m", "coverage", "run", "--rcfile=coverage.ini"]
        command += ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "tools.mutants", *words]
        (COPY / "coverage.ini").write_text(COVERAGE)
        if subprocess.run(command, check=False, cwd=COPY, stdout=subprocess.DEVNULL).returncode:
            sys.exit(f"these tests fail in {COPY} without a planted bug: {ROOMS[name]}")
        self._limit_s = 60 + 2 * (time.monotonic() - began)
        self._covering = _covering(CoverageData(str(COPY / "covered")))

    def detects(self, path: Path, lines: range, is_quick: bool) -> bool:
        """Return True if a test fails with the bug that is in these lines of a file now."""
        by_line = self._covering.get(path, {})
        tests = list(dict.fromkeys(test for line in lines for test in by_line.get(line, [])))
        if tests and not self._pass(tests):
            return True
        return not (tests and is_quick) and not self._pass(self._tests)

    def _pass(self, tests: list[str]) -> bool:
        """Return True if the tests pass in a fork, in not much more time than all take."""
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.setsid()  # a group with the processes of tests, to kill them all
                code = _run_in_fork([*tests, *self._selection], int(self._limit_s))
            finally:
                os._exit(code)
        ended = os.pidfd_open(pid)
        try:
            in_time = bool(select.select([ended], [], [], 2 * self._limit_s)[0])
        finally:
            os.close(ended)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        return in_time and status == 0


def _run_in_fork(tests: list[str], cpu_limit_s: int) -> int:
    os.chdir(COPY)
    sys.path[:] = [str(COPY), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] == "tools"]:
        del sys.modules[name]
    sys.dont_write_bytecode = True  # a file of the same size and second has changed
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit_s, cpu_limit_s))
    # The parent has imported plugins, of which pytest would rewrite the assertions.
    options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", "60"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *tests]))


def _covering(data: CoverageData) -> Covering:
    data.read()
    files = {Path(file): data.contexts_by_lineno(file) for file in data.measured_files()}
    size = Counter(test for lines in files.values() for tests in lines.values() for test in tests)
    del size[""]  # while a module is imported
    return {
        path: {
            line: sorted(size.keys() & tests, key=size.__getitem__) for line, tests in lines.items()
        }
        for path, lines in files.items()
    }


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Name what is executed from now on by the test, with its parameters and examples."""
    if measured := Coverage.current():
        measured.switch_context(item.nodeid)
        sys.settrace(_TRACE)  # an earlier test may have removed it


def try_room(name: str, sample: int, seed: int, is_quick: bool) -> tuple[int, list[str]]:
    """Return the number of planted bugs, and the undetected ones."""
    room = Room(name)
    every = [(path, change) for path in room.paths for change in changes(path)]
    chosen = sorted(random.Random(seed).sample(every, min(sample, len(every))))
    survivors = []
    for path, change in chosen:
        source = path.read_bytes()
        path.write_bytes(change.applied(source))
        try:
            lines = range(change.line, change.last_line(source) + 1)
            is_seen = room.detects(path, lines, is_quick)
        finally:
            path.write_bytes(source)
        shown = f"{path.relative_to(COPY)}:{change.line}: {change.shown(source)}"
        print("seen    " if is_seen else "SURVIVED", shown, flush=True)
        survivors += [] if is_seen else [shown]
    print(f"{len(chosen)} of {len(every)} possible ones in {name}", flush=True)
    return len(chosen), survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)}; default: all")
    parser.add_argument("--sample", type=int, default=40, help="bugs of each room")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=float, default=0, help="percent that must be detected")
    parser.add_argument(
        "--quick", action="store_true", help="only tests that execute the line, if there are some"
    )
    given = parser.parse_args()
    shutil.rmtree(COPY, ignore_errors=True)
    COPY.mkdir(parents=True)
    for path in map(ROOT.joinpath, (*TREE, *FILES)):
        (shutil.copytree if path.is_dir() else shutil.copy2)(path, COPY / path.name)
    for module in IMPORTED:
        __import__(module)
    rows = {
        room: try_room(room, given.sample, given.seed, given.quick) for room in given.rooms or ROOMS
    }
    print(f"\n{'room':12}{'planted':>8}{'seen':>8}")
    planted = seen = 0
    for room, (count, survivors) in rows.items():
        print(f"{room:12}{count:8}{count - len(survivors):8}", *survivors, sep="\n  ")
        planted, seen = planted + count, seen + count - len(survivors)
    print(f"{'in all':12}{planted:8}{seen:8}")
    return 100 * seen < given.least * planted


if __name__ == "__main__":
    sys.exit(main())
