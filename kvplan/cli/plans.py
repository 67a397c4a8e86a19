"""Commands over plans in files: `kvplan explain`, `diff` and `replay`."""

from __future__ import annotations

import os
import zlib
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from zipfile import BadZipFile

import click

from kvplan.cli.common import (
    ExitCode,
    Number,
    json_option,
    picture_option,
    plan_argument,
    write_json,
    write_lines,
    write_text,
)
from kvplan.inspection.diff import is_equivalent
from kvplan.planning.texts import DEFAULT_LIMIT, Format
from kvplan.validation import INT64_MAX, open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.debug import Difference, Wrong
    from kvplan.planning.part import Part
    from kvplan.planning.plan import Plan


@click.command("explain", epilog="Example: kvplan explain plan.json --format table --limit 8")
@plan_argument("plan")
@click.option(
    "-f",
    "--format",
    "form",
    type=click.Choice(get_args(Format)),
    default="tree",
    show_default=True,
    help="Layers with their blocks, or one row for each descriptor.",
)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    default=DEFAULT_LIMIT,
    show_default=True,
    metavar="N",
    help="Maximum number of rows of each list.",
)
@click.option("--all", "everything", is_flag=True, help="Show all rows.")
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
    """Show what a plan copies: from which blocks, to which blocks, and how.

    PLAN.json is a file that plan.save(path) wrote; - is stdin. The file of --html is complete and
    loads no other file. Exits with 0, or with 2 if PLAN.json is not a plan.
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
    """Yield each descriptor with its layers, tensors and rows, and its offsets in these tensors."""
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


@click.command("diff", epilog="Example: kvplan diff expected.json found.json || echo differs")
@plan_argument("old", "A.json")
@plan_argument("new", "B.json")
@picture_option("html")
@json_option
def diff(old: Plan, new: Plan, html: str | None, *, as_json: bool) -> ExitCode:
    """Show how plan B differs from plan A, with a verdict at the end.

    Names of caches are not compared. One of the two files may be - for stdin. Exits with 0 if the
    plans are identical or equivalent: they copy the same bytes to the same places. Exits with 1 if
    they differ, with 2 if one file is not a plan.
    """
    same = is_equivalent(old, new)
    if html is not None:
        if as_json:
            raise click.UsageError("--html and --json cannot be combined")
        write_text(old.to_html(diff=new), html)
        return ExitCode.OK if same else ExitCode.DIFFERENT
    text = old.diff(new)
    if as_json:
        verdict = " ".join(text[text.rindex("verdict: ") :].split()).removeprefix("verdict: ")
        write_json({"same": same, "identical": old == new, "verdict": verdict, "text": text})
    else:
        write_lines(text.splitlines())
    return ExitCode.OK if same else ExitCode.DIFFERENT


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
    help="Expected content of DST.npz. Default: the result of the plan on SRC.npz.",
)
@click.option(
    "--atol",
    type=Number(min=0),
    default=0.0,
    metavar="X",
    help="With --expected: allowed difference of elements. Default: none.",
)
@click.option(
    "--recording",
    "recordings",
    metavar="FILE",
    type=_dump,
    multiple=True,
    help="Recording of the engine with DST.npz, then of its peers: finds out which transfer wrote "
    "the wrong block.",
)
@click.option(
    "--cache",
    "cache_id",
    type=click.IntRange(0, INT64_MAX),
    metavar="ID",
    help="With --recording: ID of the cache.",
)
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
    """Find the wrong bytes in a cache after a transfer, and where they belong.

    SRC.npz has the tensors of the source, DST.npz those of the destination after the transfer, as
    np.savez(path, *tensors) writes the tensors of a cache in their order. Without --expected, the
    reference executor executes the plan again. Its result is compared with DST.npz. Exits with 0
    if they are equal, with 1 if they differ, and with 2 if a file cannot be read.
    """
    from kvplan import debug
    from kvplan.recording import read

    if atol and expected is None:
        raise click.UsageError("--atol needs --expected: copied bytes are always equal")
    if bool(recordings) is (cache_id is None):
        raise click.UsageError("--recording and --cache must be given together")
    source, found = _tensors(src), _tensors(dst)
    written: dict[str, Any] = {"recordings": [*map(read, recordings)], "cache_id": cache_id}
    if expected is None:
        result = debug.replay(plan, source, found, **written)
    else:
        result = debug.locate(_tensors(expected), found, plan, source=source, atol=atol, **written)
    if as_json:
        differences = [_difference(difference) for difference in result.differences]
        write_json({"differences": differences})
    else:
        write_lines(result.lines())
    return ExitCode.DIFFERENT if result else ExitCode.OK


def _tensors(path: Path) -> list[Any]:
    """Return the arrays of a dump, in their order."""
    import numpy as np

    with os.fdopen(open_regular(path), "rb") as file:
        try:
            dump = np.load(file, allow_pickle=False)
            if isinstance(dump, np.ndarray):
                raise click.ClickException(f"{path} has one array; write the tensors with np.savez")
            with dump:
                return [dump[name] for name in dump.files]
        except (ValueError, BadZipFile, EOFError, OSError, RuntimeError, zlib.error):
            # Without NumPy's text, which may advise to unpickle the file.
            raise click.ClickException(f"{path} is not a file of np.savez, or is damaged") from None


def _difference(difference: Difference) -> dict[str, Any]:
    return {
        "part": difference.part.label,
        "plan": difference.part.fingerprint,
        "wrong_nbytes": difference.wrong_nbytes,
        "elsewhere_nbytes": difference.elsewhere_nbytes,
        "layers": difference.layers,
        "kv": difference.kv,
        "heads": difference.heads,
        "tokens": difference.tokens,
        "rows": difference.rows,
        "first": None if difference.first is None else _first(difference.first),
    }


def _first(wrong: Wrong) -> dict[str, Any]:
    known = {field.name: getattr(wrong, field.name) for field in fields(wrong)}
    return known | {
        "writes": None if wrong.writes is None else [str(write) for write in wrong.writes]
    }
