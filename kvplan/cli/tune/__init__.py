"""`kvplan tune`: measure how copies are made best here, for engines that start later."""

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

SCHEMA_VERSION: Final = 2

HOST: Final = "host"
CUDA: Final = "cuda"

_MAX_TRIES: Final = 5  # of copies in host memory, while other processes disturb them


class TunedCuda(NamedTuple):
    """Result of tuning a GPU.

    Attributes:
        name: model of the GPU.
        copies: how it copies now, by direction, in words.
        why_not: why it could not be measured; empty on success.
    """

    name: str
    copies: dict[str, str]
    why_not: str = ""


@click.command("tune", epilog="Example: kvplan tune --only host --dry-run")
@click.option(
    "--only",
    type=click.Choice([HOST, CUDA]),
    help="Measure copies in host memory only, or copies of the first GPU only.",
)
@click.option("--dry-run", is_flag=True, help="Store nothing.")
@json_option
def tune(only: str | None, *, dry_run: bool, as_json: bool) -> ExitCode:
    """Measure how this machine copies best, and store it.

    Copies in host memory are compared with the built-in ones, for a third of a second. On a host
    with CUDA the ways in which the first GPU copies are compared for each size, which takes some
    seconds more. Both are stored by the kind of processor and of GPU in $XDG_CACHE_HOME/kvplan
    (~/.cache/kvplan). Engines that start later copy so, unless KVPLAN_TUNING or kvplan.tuning says
    otherwise. Run it on a machine that does nothing else. Exits with 2 if something could not be
    measured or stored.
    """
    if not dry_run:
        _check_can_store()  # rather than after everything has been measured
    host = _tune_host(dry_run=dry_run) if only != CUDA else None
    cuda = _tune_cuda(dry_run=dry_run, is_asked=only == CUDA) if only != HOST else None
    if as_json:
        write_json(_document(host, cuda))
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
    """Measure the first GPU. Return None if the host has none and none was asked for."""
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
            device.native.name, {str(it): how for it, how in found.words(device).items()}
        )
    finally:
        device.close()


def _document(host: Finding | None, cuda: TunedCuda | None) -> dict[str, object]:
    from kvplan.execution.tuning import this_processor

    return {
        "schema_version": SCHEMA_VERSION,
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
        how = "; ".join(f"{name.replace('_', ' ')}: {it}" for name, it in cuda.copies.items())
        out.print(f"{cuda.name or 'CUDA'}: {cuda.why_not or how}")
