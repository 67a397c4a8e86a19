"""`kvplan bench`: a short table of what this machine does, beside its own limits."""

from __future__ import annotations

from collections.abc import Callable
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
from kvplan.inspection.units import nbytes_text
from kvplan.status import LLMException

if TYPE_CHECKING:
    from kvplan.cli.measuring.pair import Pair
    from kvplan.cli.measuring.samples import Sample
    from kvplan.cli.measuring.sizes import Shape

SCHEMA_VERSION: Final = 1

_QUICK_S: Final = 2.0
_TENSORS: Final = 32
_BLOCKS: Final = 32
_BLOCK_NBYTES: Final = 64 << 10
_LARGE: Final = _TENSORS * _BLOCKS * _BLOCK_NBYTES
_SMALL: Final = 2 * _BLOCK_NBYTES // 16
_BURST: Final = 16
"""Small transfers in a row."""


class Row(NamedTuple):
    """One thing that was measured.

    Attributes:
        what: is done.
        nbytes: that it moves.
        seconds: the median; None: it does not work here.
        limit: what the machine does without kvplan.
        limit_seconds: that takes; None: this is the limit itself.
        why_not: it does not work.
    """

    what: str
    nbytes: int
    seconds: float | None
    limit: str = ""
    limit_seconds: float | None = None
    why_not: str = ""

    @property
    def is_small(self) -> bool:
        """Whether its time counts, and not its rate."""
        return self.nbytes < _LARGE

    @property
    def ratio(self) -> float | None:
        """Of the limit's rate: 1 is as fast."""
        if self.seconds is None or self.limit_seconds is None:
            return None
        return self.limit_seconds / self.seconds


@click.command("bench", epilog="Example: kvplan bench --quick")
@click.option("--quick", is_flag=True, help=f"Take {_QUICK_S:g} seconds: less repeatable.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    metavar="S",
    help="Seconds to measure for, in all; starting takes some more.",
)
@json_option
def command(seconds: float, *, quick: bool, as_json: bool) -> ExitCode:
    """Measure this machine: pulls between two processes, beside what it does without kvplan.

    Each row is the median of many, done in turn with its limit: memcpy by as many threads as
    there are cores, process_vm_readv, or one plain socket. A small pull is 2 blocks of 4 KiB, a
    large one 1,024 blocks of 64 KiB; about 900 MB of memory are used. Nothing is stored; `kvplan
    tune` measures what `kvplan estimate` needs. Exits with 2 if nothing works here.
    """
    seconds = _QUICK_S if quick else seconds
    rows: list[Row] = []
    with progress_shown("measuring") as progress:
        rows += _over_memory(seconds / 2, lambda share: progress(share / 2))
        rows += _over_tcp(seconds / 2, lambda share: progress((1 + share) / 2))
    if as_json:
        write_json({"schema_version": SCHEMA_VERSION, "rows": [_as_json(it) for it in rows]})
    else:
        _write(rows)
    works = any(it.seconds is not None for it in rows if it.limit)
    return ExitCode.OK if works else ExitCode.TROUBLE


def _shapes(*, registered: bool = False) -> tuple[Shape, Shape]:
    """Of the small transfers and of the large ones; twice the blocks that are moved at once."""
    from kvplan.cli.measuring.sizes import Shape

    return (
        Shape(2, 64, _SMALL // 2, registered),
        Shape(_TENSORS, 2 * _BLOCKS, _BLOCK_NBYTES, registered),
    )


def _pulls(pair: Pair, first: int) -> tuple[Sample, Sample]:
    """A small one and a large one, of the two caches from `first` on."""
    return pair.pull(first, 2, 1), pair.pull(first + 1, _TENSORS, _BLOCKS)


def _over_memory(seconds: float, progress: Callable[[float], object]) -> list[Row]:
    from kvplan.cli.measuring.limits import copies, process_reads
    from kvplan.cli.measuring.pair import linked
    from kvplan.cli.measuring.samples import measure

    with copies(_LARGE) as large, copies(_SMALL) as small:
        limits = [*large.values(), small[1]]
        try:
            with linked("local", (*_shapes(), *_shapes(registered=True)), _LARGE) as pair:
                mapped, registered = _pulls(pair, 0), _pulls(pair, 2)
                reads = [process_reads(pair, it) for it in (_SMALL, _LARGE)]
                for sample in (small[1], mapped[0], registered[0], reads[0]):
                    sample.burst = _BURST
                measure([*limits, *mapped, *registered, *reads], seconds, progress)
        except LLMException as error:
            measure(limits, seconds, progress)
            best = min(it.median for it in large.values())
            return [_copy_row(large, best), _failed("pull, local", error)]
    best = min(it.median for it in large.values())
    memcpy = [small[1].median, best]
    return [
        _copy_row(large, best),
        *_rows("pull, allocated cache (local)", mapped, "memcpy", memcpy),
        *_rows(
            "pull, registered memory (local)",
            registered,
            "process_vm_readv",
            [it.median for it in reads],
        ),
    ]


def _over_tcp(seconds: float, progress: Callable[[float], object]) -> list[Row]:
    from kvplan.cli.measuring.limits import socket_reads
    from kvplan.cli.measuring.pair import linked
    from kvplan.cli.measuring.samples import measure

    try:
        with (
            linked("tcp", _shapes(), _LARGE) as pair,
            socket_reads(pair, (_SMALL, _LARGE)) as plain,
        ):
            pulls = _pulls(pair, 0)
            pulls[0].burst = plain[0].burst = _BURST
            measure([*pulls, *plain], seconds, progress)
    except LLMException as error:
        return [_failed("pull over tcp", error)]
    limits = [it.median for it in plain]
    return _rows("pull over loopback (tcp)", pulls, "a plain socket", limits)


def _rows(what: str, pulls: tuple[Sample, Sample], limit: str, limits: list[float]) -> list[Row]:
    return [
        Row(f"{what}, {nbytes_text(nbytes)}", nbytes, pull.median, limit, limit_s)
        for nbytes, pull, limit_s in zip((_SMALL, _LARGE), pulls, limits, strict=True)
    ]


def _copy_row(large: dict[int, Sample], best: float) -> Row:
    threads = next(number for number, it in large.items() if it.median == best)
    text = f"memcpy, {nbytes_text(_LARGE)}, {threads} thread{'' if threads == 1 else 's'}"
    return Row(text, _LARGE, best)


def _failed(what: str, error: LLMException) -> Row:
    return Row(what, _LARGE, None, "?", None, str(error))


def _as_json(row: Row) -> dict[str, object]:
    return {
        "what": row.what,
        "nbytes": row.nbytes,
        "us": None if row.seconds is None else 1e6 * row.seconds,
        "gigabytes_per_s": None if row.seconds is None else row.nbytes / row.seconds / 1e9,
        "limit": row.limit,
        "limit_us": None if row.limit_seconds is None else 1e6 * row.limit_seconds,
        "of_limit": row.ratio,
        "why_not": row.why_not,
    }


def _write(rows: list[Row]) -> None:
    out = console()
    shown = table("what", ">here", "limit", ">limit here", ">of the limit")
    for row in rows:
        if row.seconds is None:
            shown.add_row(row.what, "-", row.why_not)
            continue
        ratio = row.ratio
        shown.add_row(
            row.what,
            _figure(row, row.seconds),
            row.limit,
            "" if row.limit_seconds is None else _figure(row, row.limit_seconds),
            "" if ratio is None else f"{ratio:.2f}",
        )
    write_table(out, shown)


def _figure(row: Row, seconds: float) -> str:
    """As a time where it is small, else as a rate."""
    if row.is_small:
        return f"{1e6 * seconds:.1f} us"
    return f"{row.nbytes / seconds / 1e9:.2f} GB/s"
