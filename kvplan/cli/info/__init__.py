"""`kvplan info`: whether and how kvplan works on this machine.

A separate process tries accelerators and UCX, as a broken library may end its process.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from tempfile import TemporaryFile
from typing import Any, Final

import click

from kvplan.cli.common import ExitCode, Number, console, json_option, write_json
from kvplan.cli.info import host
from kvplan.cli.info.text import outline, verdict

_KILL_TIMEOUT_S: Final = 2.0
_SCHEMA_VERSION: Final = 2  # of --json
_MAX_LINES: Final = 12  # of the output of a process that died


@click.command("info", epilog="Example: kvplan info -v")
@click.option(
    "--device-id",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Device for trials of transports and copies (llm.DeviceId).",
)
@click.option(
    "--timeout",
    type=Number(min=0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Time limit for trying accelerators and UCX.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show all findings.")
@json_option
def info(device_id: int, timeout: float, *, verbose: bool, as_json: bool) -> ExitCode:
    """Show whether kvplan works on this machine, how, and what would improve it.

    Exits with 1 if kvplan does not work here, or may not work.
    """
    found = {**host.describe(), **_look(device_id, timeout)}
    summary = verdict(found)
    if as_json:
        write_json(found, _SCHEMA_VERSION)
    else:
        out = console()
        for line, style in summary.lines:
            out.print(line, style=style)
        if verbose:
            out.file.writelines(f"{line}\n" for line in ["", *outline(found)])
    return ExitCode.OK if summary.works else ExitCode.DIFFERENT


def _look(device_id: int, timeout_s: float) -> dict[str, Any]:
    """Return the findings of `kvplan.cli.info.look`; `stopped`: where and why it ended early."""
    reason = ""
    with TemporaryFile() as notes, TemporaryFile() as said:
        try:
            process = _start(notes.fileno(), device_id, said.fileno())
        except OSError as error:
            reason = f"no process could be started: {error}"
        else:
            reason = _end_of(process, timeout_s)
        for file in (notes, said):
            file.seek(0)
        return _gather(notes.read(), reason, said.read().decode(errors="replace"))


def _start(notes: int, device_id: int, said: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvplan.cli.info.look", str(notes), str(device_id)]
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=said, pass_fds=[notes])


def _end_of(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    """Wait for the process; return why it did not complete, or an empty text."""
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # the process waits inside of a driver
            return f"took longer than {timeout_s:g} s, and cannot be killed"
        return f"took longer than {timeout_s:g} s"
    finally:
        process.kill()  # after Ctrl-C
    if code >= 0:
        return f"ended with exit code {code}" if code else ""
    return f"ended with {_signal_name(-code)}"


def _gather(lines: bytes, reason: str, said: str) -> dict[str, Any]:
    names = ("accelerator", "cuda", "ucx", "copies", "transports", "stopped")
    kinds: tuple[Any, ...] = ({}, {}, {}, [], [], None)
    found = dict(zip(names, kinds, strict=True))
    step = "starting Python"
    # The last piece is empty, or an incomplete line.
    for line in lines.split(b"\n")[:-1]:
        note = json.loads(line)
        step = note.pop("step", step)
        for name, value in note.items():
            if isinstance(found[name], dict):
                found[name].update(value)
            else:
                found[name].append(value)
    if reason:
        last = said.splitlines()[-_MAX_LINES:]
        found["stopped"] = {"step": step, "reason": reason, "said": last}
    return found


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
