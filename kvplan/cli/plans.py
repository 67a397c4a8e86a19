"""Commands over plans in files: `kvplan explain`, `diff` and `replay`."""

from __future__ import annotations

import os
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args
from zipfile import BadZipFile

import click

from kvplan.cli.common import (
    ExitCode,
    json_option,
    picture_option,
    plan_argument,
    write_json,
    write_lines,
    write_text,
)
from kvplan.inspection.diff import is_equivalent
from kvplan.planning.texts import DEFAULT_LIMIT, Format
from kvplan.validation import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.debug import Difference, Wrong
    from kvplan.planning.part import Part
    from kvplan.planning.plan import Plan

EXPLAIN_VERSION: Final = 1


@click.command("explain", epilog="Example: kvplan explain plan.json --format table --limit 8")
@plan_argument("plan")
@click.option(
    "-f",
    "--format",
    "form",
    type=click.Choice(get_args(Format)),
    default="tree",
    show_default=True,
    help="As layers and their blocks, or one row for each descriptor.",
)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    default=DEFAULT_LIMIT,
    show_default=True,
    metavar="N",
    help="Rows of each list before the rest is only counted.",
)
@click.option("--all", "everything", is_flag=True, help="All rows, however many there are.")
@picture_option("html")
@picture_option("svg")
@json_option
def explain(
    plan: Plan,
    form: Format,
    limit: int,
    html: str | None,
    svg: str | None,
    *,
    everything: bool,
    as_json: bool,
) -> ExitCode:
    """Print what a plan copies, from which blocks to which, and how.

    PLAN.json is a file that plan.save(path) wrote, of one cache or of a group of caches; - is
    stdin. The HTML of --html is one file that loads nothing else. Exits with 0, or with 2 if it is
    not a plan.
    """
    drawn = html is not None or svg is not None
    if drawn and as_json:
        raise click.UsageError("--html and --svg cannot be combined with --json")
    if html is not None:
        write_text(plan.to_html(), html)
    if svg is not None:
        write_text(plan.to_svg(), svg)
    rows = None if everything else limit
    if drawn:
        return ExitCode.OK
    if as_json:
        write_json(_explained(plan, rows))
    else:
        write_lines(plan.explain_lines(form, rows))
    return ExitCode.OK


def _explained(plan: Plan, limit: int | None) -> dict[str, Any]:
    return {
        "schema_version": EXPLAIN_VERSION,
        "operation": plan.operation,
        "kind": plan.kind,
        "fingerprint": plan.fingerprint,
        "num_tensor_pairs": plan.num_tensor_pairs,
        "num_descriptors": plan.num_descriptors,
        "nbytes": plan.nbytes,
        "parts": [part.label for part in plan.parts],
        "descriptors": [*islice(_descriptors(plan), limit)],
    }


def _descriptors(plan: Plan) -> Iterator[dict[str, Any]]:
    """Each, with the layers, tensors and rows it came from; offsets are into these tensors."""
    for part, first, *_ in plan.placed():
        for index in range(part.num_descriptors):
            yield _descriptor(part, index) | {"index": first + index}


def _descriptor(part: Part, index: int) -> dict[str, Any]:
    pair, run = divmod(index, part.segments.num_runs)
    (_, src_base), (_, dst_base) = part.pair(pair)
    src, dst, nbytes = part.run_at(run)
    return {
        "index": index,
        **part.origin(index)._asdict(),
        "src_offset": src_base + src,
        "dst_offset": dst_base + dst,
        "nbytes": nbytes,
    }


DIFF_VERSION: Final = 1


@click.command("diff", epilog="Example: kvplan diff expected.json found.json || echo differs")
@plan_argument("old", "A.json")
@plan_argument("new", "B.json")
@picture_option("html")
@json_option
def diff(old: Plan, new: Plan, html: str | None, *, as_json: bool) -> ExitCode:
    """Print how plan B differs from plan A, ending in a verdict.

    Exits with 0 if they are identical or equivalent (the same bytes go to the same places), with
    1 if not, with 2 if one of them is no plan. Names of caches are not compared. One of the two
    may be - for stdin.
    """
    same = is_equivalent(old, new)
    if html is not None:
        if as_json:
            raise click.UsageError("--html and --json cannot be combined")
        write_text(old.to_html(diff=new), html)
        return ExitCode.OK if same else ExitCode.DIFFERENT
    text = old.diff(new)
    if as_json:
        last = " ".join(text[text.rindex("verdict: ") :].split()).removeprefix("verdict: ")
        write_json(
            {
                "schema_version": DIFF_VERSION,
                "same": same,
                "identical": old == new,
                "verdict": last,
                "text": text,
            }
        )
    else:
        write_lines(text.splitlines())
    return ExitCode.OK if same else ExitCode.DIFFERENT


REPLAY_VERSION: Final = 1

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
def replay(
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
    from kvplan import debug
    from kvplan.recording import read

    if atol and expected is None:
        raise click.UsageError("--atol needs --expected: bytes that were copied are the same")
    if bool(recordings) is (cache_id is None):
        raise click.UsageError("--recording and --cache need each other")
    source, found = _tensors(src), _tensors(dst)
    written: dict[str, Any] = {"recordings": [*map(read, recordings)], "cache_id": cache_id}
    if expected is None:
        result = debug.replay(plan, source, found, **written)
    else:
        result = debug.locate(_tensors(expected), found, plan, source=source, atol=atol, **written)
    if as_json:
        differences = [_difference(it) for it in result.differences]
        write_json({"schema_version": REPLAY_VERSION, "differences": differences})
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


def _difference(it: Difference) -> dict[str, Any]:
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
