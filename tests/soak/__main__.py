"""`make soak`: chaos, fuzzers and ThreadSanitizer, round after round, for as long as is said.

Each round is a program of its own with a seed of its own, which it prints when it begins; a failure
says the command that repeats it. A round fails if it exits with anything but 0, does not end, or
leaves a process or a file of shared memory. The rounds' output is in build/soak/.
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
LIMIT_S = 1800  # of a round; only one that hangs reaches it
SHOWN_LINES = 25
CORPUS = sorted(map(str, Path("tests/tcp/corpus").glob("*")))
# What make sanitize-threads runs; a round takes some of it, with new examples of Hypothesis.
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
"""What is run with a seed, in the root of the repository."""


def _chaos(machine: str) -> Command:
    return lambda seed: [sys.executable, "-m", "tests.soak.chaos", machine, str(seed)]


def _requests(seed: int) -> Sequence[str]:
    return [sys.executable, "-m", "tests.soak.requests", str(seed), "300"]


def _races(machine: str) -> Command:
    """Chaos with native code that watches its threads; it is some ten times slower."""
    arguments = ["python", "-m", "tests.soak.chaos", machine]
    return lambda seed: ["tools/sanitize", "thread", *arguments, str(seed), "40"]


def _race_tests(seed: int) -> Sequence[str]:
    chosen = RACES[seed % len(RACES)].split()
    environment = ["env", "HYPOTHESIS_PROFILE=soak"]  # that of CI has no regard to a seed
    options = ["-q", "-k", "not forked", f"--hypothesis-seed={seed}"]
    return [*environment, "tools/sanitize", "thread", *options, *chosen]


def _parser(name: str) -> Command:
    return lambda seed: [sys.executable, "-m", "tests.soak.parsers", name, str(seed), "10"]


def _fuzz_tcp(end: str, amount: int, *files: str) -> Command:
    return lambda seed: ["build/fuzz/fuzz_tcp", end, str(amount), str(seed), *files]


# In this order, again and again. What races are looked for in takes longest.
PARTS: dict[str, Command] = {
    **{f"chaos-{item}": _chaos(item) for item in MACHINES},
    "requests": _requests,
    "fuzz-requests": _fuzz_tcp("parser", 1_000_000, *CORPUS),
    "fuzz-answering": _fuzz_tcp("answers", 10, *CORPUS),
    "fuzz-asking": _fuzz_tcp("asks", 10),
    **{f"fuzz-{item}": _parser(item) for item in PARSERS},
    "races-local": _races("local"),
    "races-tcp": _races("tcp"),
    "races-tests": _race_tests,
}


@dataclass
class Tally:
    """What the rounds of one part came to."""

    rounds: int = 0
    failures: int = 0
    seconds: float = 0
    counts: Counter[str] = field(default_factory=Counter)
    said: str = ""
    grown: dict[str, tuple[int, int]] = field(default_factory=dict)

    def take(self, last_line: str) -> None:
        """Add what a round says in its last line."""
        try:
            found: dict[str, Any] = json.loads(last_line)
        except ValueError:
            self.said = last_line
            return
        self.counts.update(found["counts"])
        for held in found.get("held", {}).values():
            for what in ("kib", "descriptors", "threads", "mappings"):
                now = _size(held["first"][what]), _size(held["last"][what])
                before = self.grown.get(what, (0, -(2**60)))
                self.grown[what] = max(before, now, key=lambda value: value[1] - value[0])

    def __str__(self) -> str:
        many = [f"{number:,} {what}" for what, number in self.counts.most_common()]
        grown = ", ".join(f"{what} {a} to {b}" for what, (a, b) in self.grown.items())
        return "; ".join(
            value
            for value in (", ".join(many) or self.said, grown and f"most growth: {grown}")
            if value
        )


def _size(held: Any) -> int:
    return held if isinstance(held, int) else len(held)


def held_here() -> dict[str, int]:
    """What this process holds, and how many files of shared memory the machine has."""
    return {
        "kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
        "threads": len([*Path("/proc/self/task").iterdir()]),
        "files of shared memory": len(shared_memory()),
    }


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def orphans(names: set[str]) -> set[str]:
    """Those of these files in /dev/shm that no process has mapped or open."""
    for process in Path("/proc").glob("[0-9]*") if names else ():
        with suppress(OSError):
            opened = [str(path.readlink()) for path in (process / "fd").iterdir()]
            text = "\n".join([(process / "maps").read_text(errors="replace"), *opened])
            names = {name for name in names if f"/dev/shm/{name}" not in text}
    return names & shared_memory()  # one may have gone meanwhile, with its process


class Soak:
    """The rounds, and what came of them."""

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

    def _say(self, *lines: str) -> None:
        minutes, seconds = divmod(int(self.elapsed_s), 60)
        for line in lines:
            print(f"[{minutes:3}:{seconds:02}] {line}", flush=True)

    def run(self, seed: int, seconds: float, rounds: int | None) -> None:
        """Rounds until the time is over, or there were so many."""
        names = [*self._parts]
        for number in count():
            if number == rounds or (rounds is None and self.elapsed_s >= seconds):
                return
            self._round(number + 1, names[number % len(names)], seed + number)

    def _round(self, number: int, name: str, seed: int) -> None:
        title = f"round {number}: {name} with seed {seed}"
        self._say(f"{title}; {len(self.failed)} failures so far")
        tally, log = self.tallies[name], self._folder / f"{name}-{seed}.log"
        before, began = shared_memory(), time.monotonic()
        wrong = self._ended(self._parts[name](seed), log)
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
        self._say(f"{title} FAILED after {took:.0f} s: {wrong}", *lines[-SHOWN_LINES:])
        self._say(f"all of its output: {log}", f"again: {again}")

    def _ended(self, command: Sequence[str], log: Path) -> str:
        """What is wrong with how it ended; "": nothing."""
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
            try:  # stopped processes too: they are of its group
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                left = False
            process.wait()
        if status:
            return f"it ended with {status}"
        return "it has left processes" if left else ""

    def summary(self) -> int:
        """Print it; returns the exit status."""
        self._say("", f"{'part':16} rounds  failed  seconds  what")
        for name, tally in self.tallies.items():
            if tally.rounds:
                self._say(
                    f"{name:16} {tally.rounds:6}  {tally.failures:6}  {tally.seconds:7.0f}  {tally}"
                )
        last = held_here()
        self._say(
            "of this process, first and last: "
            + ", ".join(f"{what} {self._first[what]} to {last[what]}" for what in last),
            f"{sum(tally.rounds for tally in self.tallies.values())} rounds, "
            f"{len(self.failed)} failures",
            *(f"again: {item}" for item in self.failed),
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
    for value in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C, so that the round is ended too
        signal.signal(value, signal.default_int_handler)
    try:
        soak.run(seed, given.minutes * 60, given.rounds)
    except KeyboardInterrupt:
        soak.summary()
        return 130
    return soak.summary()


if __name__ == "__main__":
    sys.exit(main())
