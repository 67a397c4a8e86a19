"""A pull of 4 KiB over TCP, beside UCX's own benchmark of a get."""

from __future__ import annotations

import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks import libraries
from benchmarks.compiled import compiled
from benchmarks.libraries import SEGMENTS
from benchmarks.network import places
from benchmarks.pairs import LOOPBACK, Pair, Place
from benchmarks.table import Row, Run, Topic, Unmeasured
from kvplan.status import LLMException
from kvplan.transport.ucx.library import find

TOPIC = Topic()
TIMES, WARM_UP = 2000, 200
ROUNDS = 15
PORT = "13377"
LISTENS_S = 10
"""Until the serving end must listen."""


def ucx_library() -> Path:
    """The UCX that kvplan uses."""
    try:
        return Path(find().path)
    except LLMException as error:
        raise Unmeasured(str(error)) from error


def ucx_perftest() -> tuple[str, dict[str, str]]:
    """The program that comes with the UCX which kvplan uses, and its environment."""
    library = ucx_library()
    program = library.parents[1] / "bin/ucx_perftest"
    if not program.exists():
        raise Unmeasured(f"{program} is not there: pip install libucx-cu12")
    return str(program), {"LD_LIBRARY_PATH": str(library.parent), "UCX_TLS": "tcp"}


def ucx_seconds(place: Place) -> float:
    """Median seconds of a get of 4 KiB, both ends spinning, as UCX itself says."""
    program, environment = ucx_perftest()
    environment["UCX_NET_DEVICES"] = place.interface
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    test = ("-t", "ucp_get", "-s", "4096", "-n", str(TIMES), "-w", str(WARM_UP), "-f", "-v")
    with place.start_serving(program, "-p", PORT, **quiet) as server:
        try:
            give_up = time.monotonic() + LISTENS_S
            while True:
                with place.start_moving(
                    program, place.serving, "-p", PORT, *test, **quiet | PIPED
                ) as client:
                    said, complaint = client.communicate(timeout=60)
                if client.returncode == 0:
                    return float(said.splitlines()[-1].split(",")[1]) / 1e6
                if time.monotonic() > give_up:
                    raise RuntimeError(f"ucx_perftest: {complaint[-500:].strip()}")
        finally:
            server.kill()


def messages_seconds(place: Place) -> float:
    """Median seconds of a question and an answer of 4 KiB, by messages of UCX and nothing else."""
    program = compiled("messages.c", "")
    settings = SEGMENTS | {"UCX_TLS": "tcp", "UCX_ZCOPY_THRESH": "0"}
    settings["UCX_NET_DEVICES"] = place.interface
    arguments = (str(program), str(ucx_library()), str(TIMES))
    said = subprocess.check_output(arguments, env=settings, text=True, timeout=60)
    return float(said) / 1e6


PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def small_pull(
    run: Run, name: str, level: Literal["facade", "executor"], target: float | None
) -> Row:
    """The worse of both places."""
    figures = []
    with places() as both:
        for place in both:
            with Pair(libraries.kvplan_over_tcp(place, "small"), place) as pair:
                ours, theirs = run.medians(
                    partial(pair.seconds, level, TIMES), partial(ucx_seconds, place), rounds=ROUNDS
                )
            figures.append((1e6 * ours, 1e6 * theirs, place.name))
    ours, theirs, where = max(figures, key=lambda it: it[0] / it[1])
    ratios = ", ".join(f"{place} {a / b:.2f}" for a, b, place in figures)
    note = f"{where}, the worse of {ratios}; limit: ucx_perftest's get, both ends spinning"
    return Row(name, ours, "us", theirs, target=target, note=note)


@TOPIC.row("tcp_messages_4KiB_us")
def messages(run: Run, name: str) -> Row:
    """The part of a small pull that is UCX's."""
    bare, get = run.medians(
        partial(messages_seconds, LOOPBACK), partial(ucx_seconds, LOOPBACK), rounds=ROUNDS
    )
    note = "two messages of UCX and nothing else; limit: ucx_perftest's get, both ends spinning"
    return Row(name, 1e6 * bare, "us", 1e6 * get, target=None, note=note)


@TOPIC.row("tcp_pull_4KiB_us")
def executor(run: Run, name: str) -> Row:
    """From the executor: the descriptor is at hand."""
    return small_pull(run, name, "executor", 1.2)


@TOPIC.row("tcp_facade_pull_4KiB_us")
def facade(run: Run, name: str) -> Row:
    """A whole call: planned, checked, moved, checked, counted."""
    return small_pull(run, name, "facade", 1.2)
