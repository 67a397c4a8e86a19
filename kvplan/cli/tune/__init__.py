"""`kvplan tune`: measure the fastest way to copy on this machine, and store it for engines."""

from __future__ import annotations

import errno
import os
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from kvplan.cli.common import ExitCode, console, json_option, write_json
from kvplan.cli.info.text import tuning_text
from kvplan.status import LLMException

if TYPE_CHECKING:
    from kvplan.execution.tuning import Finding

_SCHEMA_VERSION: Final = 2  # of --json

HOST: Final = "host"
CUDA: Final = "cuda"

_MAX_TRIES: Final = 5  # attempts to measure host memory, as other processes may disturb one


class TunedCuda(NamedTuple):
    """Result of tuning a GPU."""

    name: str  # model of the GPU
    copies: dict[str, str]  # its fastest ways, by direction, in words
    why_not: str = ""  # reason of a failure


@click.command("tune", epilog="Example: kvplan tune --only host --dry-run")
@click.option(
    "--only",
    type=click.Choice([HOST, CUDA]),
    help="Measure only copies in host memory, or only copies of the first GPU.",
)
@click.option("--dry-run", is_flag=True, help="Do not store the results.")
@json_option
def tune(only: str | None, *, dry_run: bool, as_json: bool) -> ExitCode:
    """Measure the fastest way to copy on this machine, and store it.

    Measures copies in host memory, and copies of the first CUDA GPU, if there is one. That takes
    some seconds; run it on an idle machine. The results are stored in
    $XDG_CACHE_HOME/kvplan (~/.cache/kvplan), by kind of processor and GPU. Engines that start later
    use them, unless KVPLAN_TUNING or kvplan.tuning says otherwise. Exits with 2 if a measurement or
    the storing fails.
    """
    if not dry_run:
        _check_can_store()  # before measuring
    host = _tune_host(dry_run=dry_run) if only != CUDA else None
    cuda = _tune_cuda(dry_run=dry_run, is_asked=only == CUDA) if only != HOST else None
    if as_json:
        write_json(_document(host, cuda), _SCHEMA_VERSION)
    else:
        _write(host, cuda)
    is_whole = (host is None or host.sure) and (cuda is None or not cuda.why_not)
    return ExitCode.OK if is_whole else ExitCode.TROUBLE


def _check_can_store() -> None:
    from kvplan.execution.tuning import load_tuning, tuning_path

    folder = tuning_path().parent
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    load_tuning()


def _tune_host(*, dry_run: bool) -> Finding:
    from kvnative._tuning import builtin_tuning
    from kvplan.cli.tune import host
    from kvplan.execution import tuning

    found = host.tune(builtin_tuning())
    for _ in range(_MAX_TRIES - 1):
        if not found.sure:
            found = host.tune(builtin_tuning())
    return found if dry_run or not found.sure else tuning.save_tuning(found)


def _tune_cuda(*, dry_run: bool, is_asked: bool) -> TunedCuda | None:
    """Measure the first GPU. Return None if there is none, unless `is_asked`."""
    from kvnative._backend import NativeError
    from kvplan.device.cuda import CudaDevice

    try:
        device = CudaDevice(0)
    except LLMException as error:
        return TunedCuda("", {}, str(error)) if is_asked else None
    from kvplan.cli.tune import cuda
    from kvplan.device import cuda_copies

    try:
        try:
            found = cuda.calibrate(partial(cuda.time_copies, device))
        except (NativeError, LLMException) as error:
            return TunedCuda(device.native.name, {}, str(error))
        if not dry_run:
            cuda_copies.save(device, found.tunings)
        return TunedCuda(
            device.native.name,
            {str(direction): how for direction, how in found.words(device).items()},
        )
    finally:
        device.close()


def _document(host: Finding | None, cuda: TunedCuda | None) -> dict[str, object]:
    from kvplan.execution.tuning import this_processor

    return {
        "machine": this_processor(),
        "host": None
        if host is None
        else {**host._asdict(), "tuning": host.tuning._asdict(), "reasons": [*host.reasons]},
        "cuda": None if cuda is None else cuda._asdict(),
    }


def _write(host: Finding | None, cuda: TunedCuda | None) -> None:
    out = console()
    if host is not None:
        how = tuning_text(host.tuning._asdict()) if host.sure else host.reasons[0]
        out.print(f"host memory, measured in {host.took_ms:.0f} ms: {how}")
        for reason in host.reasons if host.sure else ():
            out.print(f"  {reason}")
    if cuda is not None:
        ways = (f"{name.replace('_', ' ')}: {way}" for name, way in cuda.copies.items())
        how = "; ".join(ways)
        out.print(f"{cuda.name or 'CUDA'}: {cuda.why_not or how}")
