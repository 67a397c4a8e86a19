"""One try in a process of its own: what it says comes as it is said, and it ends in time."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

Line = dict[str, Any]
_LOOK_S = 0.1
_START_S = 60.0
"""Until its first line: a process imports kvplan before, which on a busy machine takes long."""
_TRACE_S = 10.0
_TAIL = 12
"""Lines of its output that are shown where it ended badly."""


@dataclass
class Result:
    """The result of a try.

    Attributes:
        how: it ended; empty: by itself, and well.
        output: what it and those that it started printed, if `how` is not empty.
    """

    name: str
    how: str = ""
    output: str = ""
    seconds: float = 0.0
    steps: list[Line] = field(default_factory=list)
    rows: list[Line] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """True if a step failed, or the process did."""
        return bool(self.how) or any(step["outcome"] == "FAILED" for step in self.steps)

    @property
    def skipped(self) -> bool:
        """True if it was not tried."""
        return not self.how and {step["outcome"] for step in self.steps} - {"says"} == {"skipped"}

    @property
    def words(self) -> str:
        """The reason of a failure or a skip; empty if all was well."""
        if self.how:
            return f"{self.how} {last_word(self.output)}".strip()
        outcomes = ("FAILED",) if self.failed else ("skipped",) if self.skipped else ()
        those = [
            f"{step['step']}: {step['detail']}"
            for step in self.steps
            if step["outcome"] in outcomes
        ]
        return "; ".join(those)


def last_word(output: str) -> str:
    """Return where a try hung, or the last line of what it printed."""
    lines = output.strip().splitlines() or [""]
    for line, following in pairwise(lines):
        if line.startswith("Current thread"):
            return following.strip()
    return lines[-1]


def dump_when_asked() -> None:
    """On SIGUSR1, print where the threads of this process are, and die of the signal."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)


def run_apart(
    name: str,
    command: Sequence[str],
    silence_s: float,
    until: float,
    heard: Callable[[Line], object],
) -> Result:
    """Run a try, and end it with those that it started if it hangs.

    Args:
        name: of the try.
        command: of the process; it takes `--notes FILE`, where it writes lines of JSON.
        silence_s: longest time between two lines. The first line may take 60 s longer.
        until: `time.monotonic()` at which it ends in any case.
        heard: is called with each line as it comes.
    """
    result = Result(name)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        notes, output = Path(folder, "notes"), Path(folder, "output")
        notes.touch()
        with output.open("w") as file, notes.open() as lines:
            process = subprocess.Popen(
                [*command, "--notes", str(notes)],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            last, rest, code = began + _START_S, "", None
            while code is None and not result.how:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(_LOOK_S)
                rest += lines.read()
                *whole, rest = rest.split("\n")
                for item in map(json.loads, whole):
                    last = time.monotonic()
                    (result.rows if "row" in item else result.steps).append(item.get("row", item))
                    heard(item)
                now = time.monotonic()
                if code is None and now > until:
                    result.how = "it was ended: no time was left"
                elif code is None and now - last > silence_s:
                    result.how = f"it said nothing for {silence_s:.0f} s"
            end(process, is_hanging=code is None)
        if code:
            result.how = f"its process exited with {code}"
        if result.how:
            result.output = output.read_text(errors="replace")[-8000:]
    result.seconds = round(time.monotonic() - began, 2)
    return result


def end(process: subprocess.Popen[bytes], *, is_hanging: bool) -> None:
    """End the process and all that it has started; if they hang, they print where before."""
    with suppress(ProcessLookupError):
        if is_hanging:
            os.killpg(process.pid, signal.SIGUSR1)
            until = time.monotonic() + _TRACE_S
            while time.monotonic() < until:  # until no process of the group is left
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(_LOOK_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(result: Result) -> list[str]:
    """Return the last lines of a try's output."""
    return result.output.strip().splitlines()[-_TAIL:]


def command_of(name: str, program: str, *, quick: bool) -> list[str]:
    """Return the command that runs a try of that name."""
    return [sys.executable, program, "--run", name, *(["--quick"] if quick else [])]
