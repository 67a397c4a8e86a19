"""Tries a CUDA GPU with real bytes, and times it: for the first runs on hardware.

    python tools/try_cuda.py                  # all of it, in less than 10 minutes
    python tools/try_cuda.py --only copies    # one try; --list has all
    python tools/try_cuda.py --json out.json  # what is printed, for programs

Each try runs in a process of its own, one after the other, so that none ends with another. Exits
with 0: all is well; 1: a try failed; 3: no try failed, and a figure is below its bar; 2: no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import kvplan  # the installed one goes before that of the checkout

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from benchmarks import gpu  # noqa: E402
from benchmarks.gpu_driver import SIMULATED  # noqa: E402
from benchmarks.table import Row, Run, Unmeasured, format_table  # noqa: E402
from tools.cuda_tries.notes import Notes, SkippedError, Try, the_device  # noqa: E402

TRIES = {
    "device": "inside",
    "copies": "inside",
    "tuning": "inside",
    "offloading": "inside",
    "registering": "inside",
    "events": "inside",
    "streams": "inside",
    "transports": "between",
    "freed": "between",
    "killed": "between",
    "leases": "between",
    "ucx": "between",
    "torch": "frameworks",
    "expandable_segments": "frameworks",
    "cupy": "frameworks",
}
"""Name: the module of `cuda_tries` that has `try_<name>`."""

NAMES = (*TRIES, *gpu.TOPIC)
QUICK_NBYTES = 1 << 20
FAILED, BELOW, NO_GPU = 1, 3, 2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", action="append", choices=NAMES, help="repeatable")
    parser.add_argument("--list", action="store_true", help="print the names and what they try")
    parser.add_argument("--quick", action="store_true", help="little of each; no figure counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it there")
    parser.add_argument("--limit", type=float, default=90, metavar="S", help="of a try (90)")
    parser.add_argument("--run", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.list:
        for name in NAMES:
            say(f"{name:<32}{what(name)}")
        return 0
    if arguments.run:
        with arguments.notes.open("a") as file:
            run_here(arguments.run, Notes(arguments.quick, file))
        return 0
    return run_all(arguments)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def function_of(name: str) -> Try:
    found: Try = getattr(importlib.import_module(f"tools.cuda_tries.{TRIES[name]}"), f"try_{name}")
    return found


def what(name: str) -> str:
    """The first line of its docstring."""
    function: Any = function_of(name) if name in TRIES else gpu.TOPIC[name]
    return str(function.__doc__).splitlines()[0]


def run_here(name: str, notes: Notes) -> None:
    """In the process of the try: exceptions are its parent's to see."""
    try:
        if name in TRIES:
            function_of(name)(notes)
            return
        run = Run(notes.quick)
        if notes.quick:
            run.shared[gpu.NBYTES] = QUICK_NBYTES
        with run.opened:
            row = gpu.TOPIC[name](run, name)
        notes.file.write(json.dumps({"row": vars(row)}) + "\n")
    except (SkippedError, Unmeasured) as error:
        notes.add(name, "skipped", str(error))


def machine() -> dict[str, str]:
    """What it is that this was tried on."""
    with the_device() as device:
        found = {it: str(value) for it, value in device.describe().items()}
        found["name"] = device.name
    found["machine"] = platform.node()
    found["system"] = platform.platform()
    found["kvplan"] = kvplan.__version__
    return found


def run_all(arguments: argparse.Namespace) -> int:
    try:
        found = machine()
    except kvplan.LLMException as error:
        sys.stderr.write(f"no GPU to try: {error.args[0]}\n")
        return NO_GPU
    say("\n".join(f"{name:<14}{value}" for name, value in found.items()))
    is_simulated = found["name"].startswith(SIMULATED)
    if is_simulated:
        say("This is the stand-in of the tests, and no GPU: figures mean nothing.")
    names = arguments.only or NAMES
    results = []
    # What a try finds out of this GPU is for those after it, and not for the user's programs.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for number, name in enumerate(names, 1):
            say(f"\n[{number}/{len(names)}] {name}: {what(name)}")
            result = run_apart(name, arguments)
            for it in result["steps"]:
                say(f"  {it['step']:<56} {it['outcome']:<8} {it['detail']}".rstrip())
            results.append(result)
    rows = [Row(**row) for result in results for row in result["rows"]]
    counts = not (arguments.quick or is_simulated)
    if rows:
        say("")
        say("\n".join(format_table(rows if counts else [replace(it, target=None) for it in rows])))
        if not counts:
            say("Figures of a quick run or of the stand-in: no bar counts.")
    failed = [it["name"] for it in results if it["failed"]]
    below = [row.name for row in rows if counts and not row.met]
    skipped = [it["name"] for it in results if it["skipped"]]
    for title, those in (("failed", failed), ("below their bars", below), ("skipped", skipped)):
        if those:
            say(f"{title}: {', '.join(those)}")
    say("tried: " + ("all is well" if not failed and not below else "see above"))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": found, "counts": counts, "tries": results}, indent=1)
        )
    return FAILED if failed else BELOW if below else 0


def run_apart(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One try in a process of its own, which is killed with those that it started if it hangs."""
    with tempfile.TemporaryDirectory() as folder:
        notes, output = Path(folder, "notes"), Path(folder, "output")
        notes.touch()
        command = [sys.executable, __file__, "--run", name, "--notes", str(notes)]
        command += ["--quick"] if arguments.quick else []
        began = time.monotonic()
        with output.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
            )
            how = ended(process, arguments.limit)
        lines = [json.loads(it) for it in notes.read_text().splitlines()]
        steps = [it for it in lines if "step" in it]
        if how:
            tail = " | ".join(output.read_text(errors="replace").strip().splitlines()[-3:])
            steps.append({"step": how, "outcome": "FAILED", "detail": tail})
    outcomes = {it["outcome"] for it in steps}
    return {
        "name": name,
        "seconds": round(time.monotonic() - began, 2),
        "steps": steps,
        "rows": [it["row"] for it in lines if "row" in it],
        "failed": "FAILED" in outcomes,
        "skipped": outcomes == {"skipped"},
    }


def ended(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """How it ended; empty: well. What it has started ends with it."""
    try:
        code = process.wait(limit_s)
        how = f"its process exited with {code}" if code else ""
    except subprocess.TimeoutExpired:
        how = f"it did not end within {limit_s:.0f} s"
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return how


if __name__ == "__main__":
    sys.exit(main())
