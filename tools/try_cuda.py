"""Try a CUDA GPU with real bytes, and time it: for the first runs on hardware.

    python tools/try_cuda.py                   # all tries, in less than 10 minutes
    python tools/try_cuda.py --only copies     # one try; --list names all
    python tools/try_cuda.py --json out.jsonl  # the same output, as lines of JSON
    python tools/try_cuda.py --wheels FOLDER   # on a machine without a network

Works before kvplan is built: the program examines the driver and the host, then compiles the
checkout if needed. Tries run one after another, each in its own process, so that a crash ends only
one try. The most informative ones come first. Exit status: 0: all is well; 1: a try failed; 2: no
GPU, or kvplan cannot be imported; 3: no try failed, but a figure is below its bar; 4: time ran
out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # installed packages come before the checkout

from tools.cuda_tries import diagnosis, preparing  # noqa: E402
from tools.cuda_tries.notes import Notes, SkippedError, Try  # noqa: E402
from tools.cuda_tries.process import Line, Result, command_of, dump_when_asked, run_apart, tail  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.table import Row

DIAGNOSIS = "diagnosis"
TRIES = {
    DIAGNOSIS: "diagnosis",
    "device": "inside",
    "copies": "inside",
    "tuning": "inside",
    "events": "inside",
    "streams": "inside",
    "transports": "between",
    "torch": "frameworks",
    "offloading": "inside",
    "registering": "inside",
    "leases": "between",
    "freed": "between",
    "killed": "between",
    "fault": "inside",
    "expandable_segments": "frameworks",
    "cupy": "frameworks",
    "ucx": "between",
}
"""Name: the module of `cuda_tries` that has `try_<name>`."""

FIRST = (
    *("device", "copies", "tuning", "gpu_32KiB_ratio", "gpu_4KiB_ratio", "gpu_one_block_us"),
    *("transports", "gpu_peer_32KiB_ratio", "gpu_peer_4KiB_ratio", "events", "torch"),
    *("gpu_layerwise_visible_fraction", "gpu_from_pinned_ratio", "gpu_to_pinned_ratio"),
    *("gpu_256KiB_ratio", "gpu_peer_256KiB_ratio", "gpu_request_over_nixl"),
)
"""The most informative tries and figures, which come first: a run may be cut."""

SANITIZED = ("copies", "offloading", "registering")
SANITIZER = "compute-sanitizer"
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck")
SLOWER = 5
"""Factor by which a try may be silent for longer under a sanitizer."""
FRAMEWORKS = 2
"""The same factor for a try that imports torch for the first time."""

QUICK_NBYTES = 1 << 20
LEAST_S = 5.0
"""Seconds that must be left for another try to begin."""
FAILED, NO_GPU, BELOW, CUT = 1, 2, 3, 4


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", action="append", help="repeatable")
    parser.add_argument("--list", action="store_true", help="print each name and its purpose")
    parser.add_argument("--quick", action="store_true", help="less of each; figures do not count")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write each line there as JSON"
    )
    parser.add_argument("--minutes", type=float, default=9, metavar="M", help="time limit (9)")
    parser.add_argument(
        "--limit",
        type=float,
        default=25,
        metavar="S",
        help="longest silence of a try after its first line (25)",
    )
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="packages to use as well")
    parser.add_argument("--build", action="store_true", help="compile the checkout in any case")
    parser.add_argument(
        "--sanitize", action="store_true", help=f"then run some under {SANITIZER}, if it is there"
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        with arguments.notes.open("a") as file:
            run_here(arguments.run, Notes(arguments.quick, lambda value: put_line(file, value)))
        return 0
    report = Report(arguments)
    with report:
        return report.run()


def put_line(file: IO[str], line: Line) -> None:
    """Write a line at once: nothing is lost if the process dies."""
    file.write(json.dumps(line) + "\n")
    file.flush()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def names() -> list[str]:
    """Return the names of all tries and figures, in the order in which they run."""
    from benchmarks import gpu

    known = [value for value in (*TRIES, *gpu.TOPIC) if value != DIAGNOSIS]
    return sorted(known, key=lambda value: FIRST.index(value) if value in FIRST else len(FIRST))


def function_of(name: str) -> Try:
    found: Try = getattr(importlib.import_module(f"tools.cuda_tries.{TRIES[name]}"), f"try_{name}")
    return found


def what(name: str) -> str:
    """Return the first line of the docstring of a try."""
    from benchmarks import gpu

    function: Any = function_of(name) if name in TRIES else gpu.TOPIC[name]
    return str(function.__doc__).splitlines()[0]


def run_here(name: str, notes: Notes) -> None:
    """Run a try in its own process; the parent process handles exceptions."""
    dump_when_asked()
    if name == DIAGNOSIS:  # NumPy may be missing
        diagnosis.try_diagnosis(notes)
        return
    from benchmarks import gpu
    from benchmarks.table import Run, Unmeasured

    try:
        if name in TRIES:
            function_of(name)(notes)
            return
        run = Run(notes.quick, say=partial(notes.add, outcome="says"))
        if notes.quick:
            run.shared[gpu.NBYTES] = QUICK_NBYTES
        with run.opened:
            row = gpu.TOPIC[name](run, name)
        notes.put({"row": vars(row)})
    except (SkippedError, Unmeasured) as error:
        notes.add(name, "skipped", str(error))


class Report:
    """One run: the tries in order, with their output printed and written at once."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._until = time.monotonic() + 60 * arguments.minutes
        self._file: IO[str] | None = None
        self._results: list[Result] = []
        self._not_run: list[str] = []
        self._is_simulated = False

    def __enter__(self) -> Report:
        if self._arguments.json:
            self._file = self._arguments.json.open("w")
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file is not None:
            self._file.close()

    def run(self) -> int:
        """Run everything; return the exit status."""
        if not self._arguments.list:
            say(f"{DIAGNOSIS}: {diagnosis.try_diagnosis.__doc__}")
            asked = self._try(DIAGNOSIS, DIAGNOSIS)
            refused = [step for step in asked.steps if step["step"] == "the driver"]
            if refused:
                sys.stderr.write(f"no GPU to try: {refused[0]['detail']}\n")
                return NO_GPU
            named = [step["detail"] for step in asked.steps if step["step"].startswith("GPU 0 of")]
            self._is_simulated = bool(named) and named[0].startswith("Simulated")
        try:
            notes = Notes(self._arguments.quick, lambda value: self._heard("prepare", value))
            preparing.prepare(notes, self._arguments.wheels, build=self._arguments.build)
        except preparing.UnpreparedError as error:
            sys.stderr.write(f"{error}\n")
            return NO_GPU
        if self._arguments.list:
            for name in names():
                say(f"{name:<32}{what(name)}")
            return 0
        return self._run_tries()

    def _run_tries(self) -> int:
        wanted = self._arguments.only or names()
        if unknown := set(wanted) - {DIAGNOSIS, *names()}:
            sys.stderr.write(f"--only {', '.join(sorted(unknown))}: --list has the names\n")
            return NO_GPU
        if self._is_simulated:
            say("This is the stand-in of the tests, and no GPU: figures mean nothing.")
        # Later tries may use what a try stores about this GPU; the user's programs must not.
        with tempfile.TemporaryDirectory() as cache, held_context():
            os.environ["XDG_CACHE_HOME"] = cache
            for number, name in enumerate(wanted, 1):
                if self._until - time.monotonic() < LEAST_S:
                    self._not_run.append(name)
                    continue
                say(f"\n[{number}/{len(wanted)}] {name}: {what(name)}")
                result = self._try(name, name)
                self._results.append(result)
                if name == "device" and result.how and not result.steps:
                    self._not_run += wanted[number:]  # nothing else can work
                    break
            if self._arguments.sanitize:
                self._sanitize([item for item in SANITIZED if item in wanted])
        return self._end()

    def _sanitize(self, wanted: list[str]) -> None:
        program = shutil.which(SANITIZER)
        for tool in SANITIZER_TOOLS:
            for name in wanted:
                title = f"{tool}: {name}"
                if program is None or self._until - time.monotonic() < LEAST_S:
                    self._not_run.append(title)
                    continue
                say(f"\n{title}")
                prefix = [program, "--tool", tool, "--target-processes", "all"]
                prefix += ["--error-exitcode", "86", "--print-limit", "5"]
                self._results.append(self._try(title, name, prefix))

    def _try(self, title: str, name: str, prefix: list[str] | None = None) -> Result:
        """Run one try; print and write its lines."""
        quick = self._arguments.quick or prefix is not None
        command = [*(prefix or []), *command_of(name, __file__, quick=quick)]
        longer = SLOWER if prefix else FRAMEWORKS if TRIES.get(name) == "frameworks" else 1
        silence = self._arguments.limit * longer
        result = run_apart(
            title, command, silence, self._until, lambda value: self._heard(title, value)
        )
        if result.how:
            say(f"  {result.how:<56} FAILED")
            for line in tail(result):
                say(f"    {line}")
        say(f"  ({result.seconds:.1f} s; {self._until - time.monotonic():.0f} s are left)")
        self._write({"try": title, "seconds": result.seconds, "how": result.how})
        if result.output:
            self._write({"try": title, "output": result.output})
        return result

    def _heard(self, title: str, line: Line) -> None:
        if "step" in line:
            say(f"  {line['step']:<56} {line['outcome']:<8} {line['detail']}".rstrip())
        else:
            row = line["row"]
            say(f"  {row['value']:.2f} {row['unit']}, limit {row['limit']:.2f}; {row['note']}")
        self._write({"try": title, **line})

    def _write(self, line: Line) -> None:
        if self._file is not None:
            put_line(self._file, line)

    def _end(self) -> int:
        """Print the tables; return the exit status."""
        from benchmarks.table import Row, format_table

        rows = [Row(**row) for result in self._results for row in result.rows]
        counts = not (self._arguments.quick or self._is_simulated)
        say("")
        for item in self._results:
            outcome = "FAILED" if item.failed else "skipped" if item.skipped else "ok"
            say(f"{item.name:<32} {outcome:<8} {item.seconds:6.1f} s  {item.words[:200]}".rstrip())
        if rows:
            say("")
            shown = rows if counts else [replace(item, target=None) for item in rows]
            say("\n".join(format_table(shown)))
            if not counts:
                say("Figures of a quick run or of the stand-in: no bar counts.")
        say("")
        return self._judge(rows, counts=counts)

    def _judge(self, rows: list[Row], *, counts: bool) -> int:
        failed = [result.name for result in self._results if result.failed]
        below = [row.name for row in rows if counts and not row.met]
        skipped = [result.name for result in self._results if result.skipped]
        ends = {
            "failed": failed,
            "below their bars": below,
            "skipped": skipped,
            "not run": self._not_run,
        }
        for title, those in ends.items():
            if those:
                say(f"{title}: {', '.join(those)}")
        well = not (failed or below or self._not_run)
        say("tried: " + ("all is well" if well else "see above"))
        self._write({"end": ends, "counts": counts})
        return FAILED if failed else BELOW if below else CUT if self._not_run else 0


@contextmanager
def held_context() -> Iterator[None]:
    """Keep the driver initialized by an extra process: otherwise each try initializes it again."""
    command = [sys.executable, diagnosis.__file__, "hold"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            try:
                process.communicate(timeout=LEAST_S)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    sys.exit(main())
