"""`kvplan replay`: a plan executed again on dumps, and what differs from what it has left."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zipfile import BadZipFile

import click

from kvplan.cli.common import ExitCode, json_option, plan_argument, write_json
from kvplan.cli.paint import write_lines
from kvplan.validation import open_regular

if TYPE_CHECKING:
    from kvplan.debug import Difference, Wrong
    from kvplan.planning.plan import Plan

SCHEMA_VERSION: Final = 1

_dump = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)


@click.command(
    "replay",
    epilog="Example: kvplan replay plan.json prefill.npz decode.npz",
)
@plan_argument("plan")
@click.argument("src", metavar="SRC.npz", type=_dump)
@click.argument("dst", metavar="DST.npz", type=_dump)
@click.option(
    "--expected",
    metavar="RIGHT.npz",
    type=_dump,
    help="What DST.npz should hold. Default: what the plan makes of SRC.npz.",
)
@click.option(
    "--atol",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="X",
    help="With --expected: elements may differ by so much. Default: no bit may.",
)
@click.option(
    "--recording",
    "recordings",
    metavar="FILE",
    type=_dump,
    multiple=True,
    help="Of the engine that has DST.npz, then of its peers: who wrote the block that is wrong?",
)
@click.option("--cache", "cache_id", type=int, metavar="ID", help="With --recording: of the cache.")
@json_option
def command(
    plan: Plan,
    src: Path,
    dst: Path,
    *,
    expected: Path | None,
    atol: float,
    recordings: tuple[Path, ...],
    cache_id: int | None,
    as_json: bool,
) -> ExitCode:
    """Find out which bytes of a cache are wrong after a plan, where they are from and whose.

    SRC.npz has the tensors of the source, DST.npz those of the destination after the transfer, each
    as np.savez(path, *tensors) wrote them: the tensors of the cache in their order. The plan is
    executed again by the reference executor, and the result compared with DST.npz. Exits with 0 if
    nothing differs, with 1 if something does, and with 2 if that could not be found out.
    """
    from kvplan.debug import locate, replay
    from kvplan.recording import read

    if atol and expected is None:
        raise click.UsageError("--atol needs --expected: bytes that were copied are the same")
    if bool(recordings) is (cache_id is None):
        raise click.UsageError("--recording and --cache need each other")
    source, found = _tensors(src), _tensors(dst)
    written: dict[str, Any] = {"recordings": [*map(read, recordings)], "cache_id": cache_id}
    if expected is None:
        result = replay(plan, source, found, **written)
    else:
        result = locate(_tensors(expected), found, plan, source=source, atol=atol, **written)
    if as_json:
        differences = [_as_json(it) for it in result.differences]
        write_json({"schema_version": SCHEMA_VERSION, "differences": differences})
    else:
        write_lines(result.lines())
    return ExitCode.DIFFERENT if result else ExitCode.OK


def _tensors(path: Path) -> list[Any]:
    """The arrays of a dump, in the order in which they were written."""
    import numpy as np

    try:
        with os.fdopen(open_regular(path), "rb") as file:
            dump = np.load(file, allow_pickle=False)
            if isinstance(dump, np.ndarray):
                raise click.ClickException(f"{path} has one array; np.savez writes several")
            with dump:
                return [dump[name] for name in dump.files]
    except (ValueError, BadZipFile, EOFError) as error:
        raise click.ClickException(f"{path} is no dump of tensors (np.savez): {error}") from None


def _as_json(it: Difference) -> dict[str, Any]:
    return {
        "part": it.part.label,
        "plan": it.part.fingerprint,
        "wrong_nbytes": it.wrong_nbytes,
        "elsewhere_nbytes": it.elsewhere_nbytes,
        "layers": it.layers,
        "kv": it.kv,
        "heads": it.heads,
        "tokens": it.tokens,
        "rows": it.rows,
        "first": None if it.first is None else _first(it.first),
    }


def _first(it: Wrong) -> dict[str, Any]:
    known = {field.name: getattr(it, field.name) for field in fields(it)}
    return known | {"writes": None if it.writes is None else [str(write) for write in it.writes]}
