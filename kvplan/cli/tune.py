"""`kvplan tune`: measure how copies are made best here, and what transfers cost, for estimates."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from kvplan.cli.common import (
    ExitCode,
    console,
    json_option,
    progress_shown,
    table,
    write_json,
    write_table,
)
from kvplan.cli.info.text import tuning_text
from kvplan.inspection.cost import TRANSPORT_COSTS, TransportCost
from kvplan.inspection.measured_costs import costs_path, load_costs, save_costs
from kvplan.machine_file import this_machine
from kvplan.status import LLMException

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvplan.cli.measuring.samples import Sample
    from kvplan.execution.tuning import Finding

SCHEMA_VERSION: Final = 1

COPIES: Final = "copies"
"""What is tuned beside the transports: plain copies, for engines."""

CUDA: Final = "cuda"
"""The same: copies of each kind of GPU."""

_TRIES: Final = 5
"""For copies, until nobody else has used the machine meanwhile."""

TRANSPORT_OF: Final = {"local": "local", "local-registered": "local", "tcp": "tcp"}
"""What is tuned, by the name of its costs, and the transport of the engines."""

_TENSORS: Final = (2, 8, 16, 32)
_SHAPES: Final = ((512, 4 << 10, (1, 4, 16, 64, 256)), (64, 64 << 10, (1, 4, 16, 32)))
"""Blocks, bytes of a block, and how many of them are moved: 8 KiB to 64 MiB in all, with every
range of sizes that a shipped cost has a line for."""


class Tuned(NamedTuple):
    """What came of one transport.

    Attributes:
        cost: fitted; None: it could not be measured.
        error: the median of how far the fitted line is off, 0.1: by a tenth.
        factor: by how much kvplan's own costs are off here, in the median: 2: half as fast here.
        why_not: it could not be measured.
    """

    name: str
    cost: TransportCost | None
    transfers: int = 0
    error: float = 0.0
    factor: float = 0.0
    why_not: str = ""


@click.command("tune", epilog="Example: kvplan tune && kvplan estimate plan.json")
@click.option(
    "-t",
    "--transport",
    "names",
    type=click.Choice([COPIES, CUDA, *TRANSPORT_OF]),
    multiple=True,
    help="Only this one; can be given several times. Default: all of them.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=15.0,
    show_default=True,
    metavar="S",
    help="Seconds to measure for, in all; starting takes some more.",
)
@click.option("--dry-run", is_flag=True, help="Store nothing.")
@json_option
def command(names: tuple[str, ...], seconds: float, *, dry_run: bool, as_json: bool) -> ExitCode:
    """Measure how this machine copies best and what transfers cost, and store both.

    Copies are compared with what is built in, for a third of a second; engines then copy as was
    found ($XDG_CACHE_HOME/kvplan/tuning.json), unless KVPLAN_TUNING or kvplan.tuning says
    otherwise. Two processes move blocks of many sizes over each transport; costs are fitted to the
    times and stored by the model of the processor in $XDG_CACHE_HOME/kvplan/costs.json
    (~/.cache/kvplan). `kvplan estimate` and `kvplan explain --transport` then use them;
    plan.estimate("local") in a program does not, unless it is given
    kvplan.load_costs().costs["local"]. About 500 MB of memory are used. On a host with CUDA the
    ways in which the first GPU copies are compared for each size, which takes some seconds more,
    and stored by its kind in cuda.json beside the others. Exits with 2 if something could not be
    measured, or could not be stored.
    """
    asked = tuple(dict.fromkeys(names)) or (COPIES, CUDA, *TRANSPORT_OF)
    chosen = tuple(it for it in asked if it not in (COPIES, CUDA))
    path = costs_path()
    if not dry_run:
        _check_can_store(path)  # rather than after all has been measured
    copies = _tune_copies(dry_run=dry_run) if COPIES in asked else None
    cuda = _tune_cuda(dry_run=dry_run, is_asked=bool(names)) if CUDA in asked else None
    found = []
    with progress_shown("measuring") as progress:
        for number, name in enumerate(chosen):
            part = partial(_tell, progress, number, len(chosen))
            try:
                found.append(_tune(name, seconds / len(chosen), part))
            except LLMException as error:
                found.append(Tuned(name, None, why_not=str(error)))
    costs = {it.name: it.cost for it in found if it.cost is not None}
    stored = bool(costs) and not dry_run
    if stored:
        save_costs(costs, path)
    where = str(path) if stored else None
    if as_json:
        write_json(_document(found, where, copies, cuda))
    else:
        _write(found, where, copies, cuda)
    is_whole = len(costs) == len(chosen) and (copies is None or copies.sure)
    is_whole &= cuda is None or not cuda.why_not
    return ExitCode.OK if is_whole else ExitCode.TROUBLE


def _check_can_store(path: Path) -> None:
    """Have the folder, and nothing in it that would be refused.

    Raises:
        OSError, LLMException: why nothing could be stored.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path.parent))
    load_costs(path)


def _tell(progress: Callable[[float], object], done: int, of: int, share: float) -> None:
    """How much of all is done, where that share of one part is."""
    progress((done + share) / of)


def _tune(name: str, seconds: float, progress: Callable[[float], object]) -> Tuned:
    from kvplan.cli.measuring.pair import linked
    from kvplan.cli.measuring.samples import measure
    from kvplan.cli.measuring.sizes import Shape

    registered = name == "local-registered"
    shapes = [Shape(max(_TENSORS), blocks, nbytes, registered) for blocks, nbytes, _ in _SHAPES]
    with linked(TRANSPORT_OF[name], shapes) as pair:
        samples = [
            move(number, tensors, blocks)
            for number, (_, _, counts) in enumerate(_SHAPES)
            for tensors, blocks in product(_TENSORS, counts)
            for move in (pair.pull, pair.push)
        ]
        measure(samples, seconds, progress)
    return _fitted(name, samples)


def _fitted(name: str, samples: list[Sample]) -> Tuned:
    shipped = TRANSPORT_COSTS[name]
    measured = [(it.plan, 1e3 * it.median) for it in samples if it.plan is not None]
    cost = shipped.fit(measured)
    off = [abs(plan.estimate(cost).ms / ms - 1) for plan, ms in measured]
    factors = [ms / plan.estimate(shipped).ms for plan, ms in measured]
    transfers = sum(len(it.seconds) for it in samples)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    cost = replace(cost, source=f"measured here by kvplan tune on {day}, {cost.source}")
    return Tuned(name, cost, transfers, median(off), median(factors))


def _tune_copies(*, dry_run: bool) -> Finding:
    """Compare ways of copying, and store what is best.

    Raises:
        OSError, LLMException: it cannot be stored.
    """
    from kvnative._tuning import builtin_tuning
    from kvplan.execution import calibration, tuning

    found = calibration.tune(builtin_tuning(), background=False)
    for _ in range(_TRIES - 1):
        if not found.sure:
            found = calibration.tune(builtin_tuning(), background=False)
    return found if dry_run or not found.sure else tuning.save_tuning(found)


class TunedCuda(NamedTuple):
    """What came of a GPU.

    Attributes:
        name: of its kind.
        copies: how it copies now, by direction, in words.
        why_not: it could not be measured.
    """

    name: str
    copies: dict[str, str]
    why_not: str = ""


def _tune_cuda(*, dry_run: bool, is_asked: bool) -> TunedCuda | None:
    """Measure the first GPU, and store what is best; None: there is none, and none was asked for.

    Raises:
        OSError, LLMException: it cannot be stored.
    """
    from kvnative._backend import NativeError
    from kvplan.device.cuda import CudaDevice

    try:
        device = CudaDevice(0)
    except LLMException as error:
        return TunedCuda("", {}, str(error)) if is_asked else None
    from kvplan.device import cuda_copies

    try:
        try:
            found = cuda_copies.calibrate(partial(cuda_copies.time_copies, device))
        except (NativeError, LLMException) as error:
            return TunedCuda(device.native.name, {}, str(error))
        if not dry_run:
            cuda_copies.save(device, found.tunings)
        return TunedCuda(
            device.native.name, {str(it): how for it, how in found.words(device).items()}
        )
    finally:
        device.close()


def _document(
    found: list[Tuned], path: str | None, copies: Finding | None, cuda: TunedCuda | None
) -> dict[str, object]:
    return {
        "cuda": None if cuda is None else cuda._asdict(),
        "copies": None
        if copies is None
        else {**copies._asdict(), "tuning": copies.tuning._asdict(), "reasons": [*copies.reasons]},
        "schema_version": SCHEMA_VERSION,
        "machine": this_machine(),
        "path": path,
        "transports": [
            {
                "name": it.name,
                "transfers": it.transfers,
                "median_error": it.error,
                "times_builtin": it.factor,
                "lines": [] if it.cost is None else [asdict(line) for line in it.cost.lines],
                "why_not": it.why_not,
            }
            for it in found
        ],
    }


def _write(
    found: list[Tuned], path: str | None, copies: Finding | None, cuda: TunedCuda | None
) -> None:
    out = console()
    out.print(this_machine(), style="bold")
    if copies is not None:
        how = tuning_text(copies.tuning._asdict()) if copies.sure else f"{copies.reasons[0]}"
        out.print(f"copies, measured in {copies.took_ms:.0f} ms: {how}", highlight=False)
    if cuda is not None:
        how = "; ".join(f"{name.replace('_', ' ')}: {it}" for name, it in cuda.copies.items())
        out.print(f"{cuda.name or 'CUDA'}: {cuda.why_not or how}", highlight=False)
    if not found:
        return
    rows = table("transport", ">transfers", ">fit is off by", ">time, of kvplan's own costs")
    for it in found:
        if it.cost is not None:
            rows.add_row(it.name, str(it.transfers), f"{it.error:.0%}", f"{it.factor:.2f}")
    write_table(out, rows)
    for it in found:
        if it.why_not:
            out.print(f"{it.name}: not measured: {it.why_not}", style="red")
    out.print(f"stored in {path}" if path else "nothing is stored")
