"""`kvplan info`: whether and how kvplan works on this machine.

A separate process looks at accelerators and UCX, as a broken library may end it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Any, Final

import click

from kvplan.cli.common import ExitCode, console, json_option, write_json
from kvplan.cli.info import host
from kvplan.cli.info.text import outline, verdict

_KILL_TIMEOUT_S: Final = 2.0
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
    type=click.FloatRange(min=0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Time limit for looking at accelerators and UCX.",
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
        write_json(found)
    else:
        out = console()
        for line, style in summary.lines:
            out.print(line, style=style)
        if verbose:
            out.file.writelines(f"{line}\n" for line in ["", *outline(found)])
    return ExitCode.OK if summary.works else ExitCode.DIFFERENT


def _look(device_id: int, timeout_s: float) -> dict[str, Any]:
    """Return the findings of `kvplan.cli.info.look`.

    If it did not complete, `stopped` has the step and the reason.
    """
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as notes:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvplan.cli.info.look", str(writer), str(device_id)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[writer],
            )
        except OSError as error:
            return _gather(b"", f"no process could be started: {error}")
        finally:
            os.close(writer)
        try:
            lines, said, ended = _read(notes.fileno(), process, timeout_s)
        finally:
            is_gone = _end(process)
        late = f"took longer than {timeout_s:g} s{'' if is_gone else ', and cannot be killed'}"
        return _gather(lines, "" if ended else late, process, said)


def _read(
    notes: int, process: subprocess.Popen[bytes], timeout_s: float
) -> tuple[bytes, bytes, bool]:
    """Return the content of the pipe and of stderr, and True if the process ended in time."""
    assert process.stderr is not None
    written = {notes: bytearray(), process.stderr.fileno(): bytearray()}
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for file in written:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if piece := os.read(key.fd, 65536):
                    written[key.fd] += piece
                else:
                    selector.unregister(key.fd)
        ended = not selector.get_map()
    if ended:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            ended = False
    lines, output = map(bytes, written.values())
    return lines, output, ended


def _end(process: subprocess.Popen[bytes]) -> bool:
    """Kill the process; return False if it waits inside a driver and cannot be killed."""
    assert process.stderr is not None
    process.kill()
    process.stderr.close()
    try:
        process.wait(_KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _gather(
    lines: bytes,
    reason: str,
    process: subprocess.Popen[bytes] | None = None,
    said: bytes = b"",
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "accelerator": {},
        "cuda": {},
        "ucx": {},
        "copies": [],
        "transports": [],
        "stopped": None,
    }
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
    if not reason and process is not None and process.returncode:
        code = process.returncode
        reason = f"ended with {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    if reason:
        found["stopped"] = {
            "step": step,
            "reason": reason,
            "said": said.decode(errors="replace").splitlines()[-_MAX_LINES:],
        }
    return found


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
