"""`make soak`: rounds of chaos, fuzzers and ThreadSanitizer until a given time is over.

Each round is a program of its own with a seed of its own, which is printed when the round begins.
The report of a failure contains the command that repeats the round. A round fails if it exits with
anything but 0, does not end, or leaves a process or a file of shared memory. The output of the
rounds is in build/soak/.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.soak.chaos import MACHINES
from tests.soak.parsers import PARSERS

ROOT = Path(__file__).parents[2]
LIMIT_S = 1800  # per round; only a round that hangs reaches this limit
SHOWN_LINES = 25
CORPUS = sorted(map(str, Path("tests/tcp/corpus").glob("*")))
# The tests of `make sanitize-threads`. A round takes one line of them, with new examples of
# Hypothesis.
RACES = (
    "tests/native/test_executor.py tests/native/test_executor_concurrency.py",
    "tests/native/test_layered.py tests/native/test_layered_concurrency.py",
    "tests/native/test_striped.py",
    "tests/native/test_writers.py tests/native/test_writers_elsewhere.py",
    "tests/tcp/test_closing.py tests/tcp/test_deregistering.py tests/tcp/test_abandoned.py",
    "tests/ascend/test_acl_abort.py tests/ascend/test_channel_concurrency.py",
    "tests/ucx/test_endpoints.py tests/ucx/test_transfers.py",
    "tests/execution",
)

Command = Callable[[int], Sequence[str]]
"""A function from a seed to the command of a round, which runs in the root of the repository."""


def _chaos(machine: str) -> Command:
    return lambda seed: [sys.executable, "-m", "tests.soak.chaos", machine, str(seed)]


def _requests(seed: int) -> Sequence[str]:
    return [sys.executable, "-m", "tests.soak.requests", str(seed), "300"]


def _races(machine: str) -> Command:
    """Return chaos with native code under ThreadSanitizer, which is about ten times slower."""
    arguments = ["python", "-m", "tests.soak.chaos", machine]
    return lambda seed: ["tools/sanitize", "thread", *arguments, str(seed), "40"]


def _race_tests(seed: int) -> Sequence[str]:
    chosen = RACES[seed % len(RACES)].split()
    environment = ["env", "HYPOTHESIS_PROFILE=soak"]  # the profile of CI ignores the seed
    options = ["-q", "-k", "not forked", f"--hypothesis-seed={seed}"]
    return [*environment, "tools/sanitize", "thread", *options, *chosen]


def _parser(name: str) -> Command:
    return lambda seed: [sys.executable, "-m", "tests.soak.parsers", name, str(seed), "10"]


def _fuzz_tcp(end: str, amount: int, *files: str) -> Command:
    return lambda seed: ["build/fuzz/fuzz_tcp", end, str(amount), str(seed), *files]


# Rounds take the parts in this order, repeatedly. The parts that look for races take longest.
PARTS: dict[str, Command] = {
    **{f"chaos-{machine}": _chaos(machine) for machine in MACHINES},
    "requests": _requests,
    "fuzz-requests": _fuzz_tcp("parser", 1_000_000, *CORPUS),
    "fuzz-answering": _fuzz_tcp("answers", 10, *CORPUS),
    "fuzz-asking": _fuzz_tcp("asks", 10),
    **{f"fuzz-{name}": _parser(name) for name in PARSERS},
    "races-local": _races("local"),
    "races-tcp": _races("tcp"),
    "races-tests": _race_tests,
}


@dataclass
class Tally:
    """Results of all rounds of one part."""

    rounds: int = 0
    failures: int = 0
    seconds: float = 0
    counts: Counter[str] = field(default_factory=Counter)
    text: str = ""
    grown: dict[str, tuple[int, int]] = field(default_factory=dict)

    def take(self, last_line: str) -> None:
        """Add the counts that a round prints as its last line."""
        try:
            found: dict[str, Any] = json.loads(last_line)
        except ValueError:
            self.text = last_line
            return
        self.counts.update(found["counts"])
        for held in found.get("held", {}).values():
            for what in ("kib", "descriptors", "threads", "mappings"):
                now = _size(held["first"][what]), _size(held["last"][what])
                before = self.grown.get(what, (0, -(2**60)))
                self.grown[what] = max(before, now, key=lambda value: value[1] - value[0])

    def __str__(self) -> str:
        totals = [f"{number:,} {what}" for what, number in self.counts.most_common()]
        grown = ", ".join(f"{what} {a} to {b}" for what, (a, b) in self.grown.items())
        return "; ".join(
            value
            for value in (", ".join(totals) or self.text, grown and f"most growth: {grown}")
            if value
        )


def _size(held: Any) -> int:
    return held if isinstance(held, int) else len(held)


def held_here() -> dict[str, int]:
    """Return the resources of this process, and the number of files in /dev/shm."""
    return {
        "kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
        "threads": len([*Path("/proc/self/task").iterdir()]),
        "files of shared memory": len(shared_memory()),
    }


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def orphans(names: set[str]) -> set[str]:
    """Return the names in /dev/shm that no process has mapped or open."""
    for process in Path("/proc").glob("[0-9]*") if names else ():
        with suppress(OSError):
            opened = [str(path.readlink()) for path in (process / "fd").iterdir()]
            text = "\n".join([(process / "maps").read_text(errors="replace"), *opened])
            names = {name for name in names if f"/dev/shm/{name}" not in text}
    return names & shared_memory()  # a file may have gone meanwhile, with its process


class Soak:
    """The rounds and their results."""

    def __init__(self, parts: Mapping[str, Command], folder: Path) -> None:
        self._parts, self._folder = parts, folder
        self._began = time.monotonic()
        self.tallies = {part: Tally() for part in parts}
        self.failed: list[str] = []
        self._first = held_here()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def _print(self, *lines: str) -> None:
        minutes, seconds = divmod(int(self.elapsed_s), 60)
        for line in lines:
            print(f"[{minutes:3}:{seconds:02}] {line}", flush=True)

    def run(self, seed: int, seconds: float, rounds: int | None) -> None:
        """Run rounds until the time is over, or until their number is reached."""
        names = [*self._parts]
        for number in count():
            if number == rounds or (rounds is None and self.elapsed_s >= seconds):
                return
            self._run_round(number + 1, names[number % len(names)], seed + number)

    def _run_round(self, number: int, name: str, seed: int) -> None:
        title = f"round {number}: {name} with seed {seed}"
        self._print(f"{title}; {len(self.failed)} failures so far")
        tally, log = self.tallies[name], self._folder / f"{name}-{seed}.log"
        before, began = shared_memory(), time.monotonic()
        wrong = self._execute(self._parts[name](seed), log)
        took = time.monotonic() - began
        if not wrong and (left := orphans(shared_memory() - before)):
            wrong = f"it has left {sorted(left)} in /dev/shm"
        tally.rounds, tally.seconds = tally.rounds + 1, tally.seconds + took
        lines = log.read_text(errors="replace").splitlines() or [""]
        if not wrong:
            tally.take(lines[-1])
            return
        tally.failures += 1
        again = f"make soak PARTS={name} SEED={seed} ROUNDS=1"
        self.failed.append(again)
        self._print(f"{title} FAILED after {took:.0f} s: {wrong}", *lines[-SHOWN_LINES:])
        self._print(f"all of its output: {log}", f"again: {again}")

    def _execute(self, command: Sequence[str], log: Path) -> str:
        """Run a command; return the reason of its failure, or ""."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"it has not ended within {LIMIT_S} s"
        finally:
            left = True
            try:  # SIGKILL also ends stopped processes of the group
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                left = False
            process.wait()
        if status:
            return f"it ended with {status}"
        return "it has left processes" if left else ""

    def summary(self) -> int:
        """Print the summary, and return the exit status."""
        self._print("", f"{'part':16} rounds  failed  seconds  what")
        for name, tally in self.tallies.items():
            if tally.rounds:
                self._print(
                    f"{name:16} {tally.rounds:6}  {tally.failures:6}  {tally.seconds:7.0f}  {tally}"
                )
        last = held_here()
        self._print(
            "of this process, first and last: "
            + ", ".join(f"{what} {self._first[what]} to {last[what]}" for what in last),
            f"{sum(tally.rounds for tally in self.tallies.values())} rounds, "
            f"{len(self.failed)} failures",
            *(f"again: {command}" for command in self.failed),
        )
        return 1 if self.failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="no round begins after them")
    parser.add_argument("--seed", type=int, help="of the first round; the next has the next one")
    parser.add_argument("--parts", help=f"comma-separated: {', '.join(PARTS)}; all, if not said")
    parser.add_argument("--rounds", type=int, help="so many, instead of minutes")
    given = parser.parse_args(arguments)
    names = given.parts.split(",") if given.parts else [*PARTS]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"parts={unknown}: known are {', '.join(PARTS)}")
    seed = int(time.time()) if given.seed is None else given.seed
    soak = Soak({name: PARTS[name] for name in names}, ROOT / "build" / "soak")
    # As for Ctrl-C, so that the running round ends, too.
    for value in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(value, signal.default_int_handler)
    try:
        soak.run(seed, given.minutes * 60, given.rounds)
    except KeyboardInterrupt:
        soak.summary()
        return 130
    return soak.summary()


if __name__ == "__main__":
    sys.exit(main())
