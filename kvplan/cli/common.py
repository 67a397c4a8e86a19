"""Helpers of all commands: exit codes, arguments, options, JSON, tables and colours."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from math import isnan
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, TypeVar

import click

from kvplan.validation import printable, write_file

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvplan.planning.plan import Plan

_F = TypeVar("_F", bound=Callable[..., Any])

PROGRAM: Final = "kvplan"
STDIN: Final = "-"
NO_POOLS: Final[Any] = {"mem_pool_config": None, "host_mem_pool_config": None}  # of environments

_WIDTH: Final = 200
"""Characters of a line. A narrower terminal wraps lines, as truncated numbers would be wrong."""


class ExitCode(IntEnum):
    """Exit codes, like those of `diff`, `cmp` and `grep` (docs/reference/command.md).

    A command returns one of them, or None for OK. `main` maps exceptions to the last three.
    """

    OK = 0
    DIFFERENT = 1
    """The command worked, and its answer is no. For example, two plans differ."""
    TROUBLE = 2
    """The command failed because of an argument, a file or a peer. stderr has the reason."""
    INTERRUPTED = 130
    """Interrupted by Ctrl-C: 128 + SIGINT, as a shell reports it."""
    CLOSED = 141
    """The reader of the output has exited (`| head`): 128 + SIGPIPE."""


class Number(click.FloatRange):
    """A number in a range. `click.FloatRange` alone would accept NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if isnan(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number


def json_option(function: _F) -> _F:
    """Add the option `--json`; its parameter is `as_json`."""
    option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
    return option(function)


def plan_argument(name: str, metavar: str = "PLAN.json") -> Callable[[_F], _F]:
    """Add an argument for a plan: a file that `plan.save` wrote, or `-` for stdin."""
    return click.argument(name, metavar=metavar, type=click.Path(), callback=_read_plan)


def _read_plan(_: click.Context, __: click.Parameter, path: str) -> Plan:
    from kvplan.planning.schema import load_plan, read_plan  # slow, and only some commands need it

    if path != STDIN:
        return load_plan(path)
    return read_plan(stdin("a plan"), "stdin")


def stdin(what: str) -> BinaryIO:
    """Return the standard input; refuse a closed one. `what` names what is read, for the error."""
    if sys.stdin is None:
        raise click.UsageError(f"stdin is closed; redirect {what} to it")
    return sys.stdin.buffer


def picture_option(name: Literal["html", "svg"]) -> Callable[[_F], _F]:
    """Add the option `--html FILE` or `--svg FILE`; its parameter has the same name."""
    return click.option(
        f"--{name}",
        type=click.Path(),
        metavar="FILE",
        help=f"Write a picture as {name.upper()} to this file instead; - is stdout.",
    )


def write_text(text: str, path: str) -> None:
    """Write a document to a file, or to stdout for `-`."""
    if path == STDIN:
        click.echo(text)
    else:
        write_file(path, text)


def write_json(document: Mapping[str, Any], version: int = 1) -> None:
    """Print a document of `--json`, with the version of its schema first."""
    sys.stdout.write(json.dumps({"schema_version": version, **document}, indent=2) + "\n")


def console(*, fitted: bool = False) -> Console:
    """Return a console for tables and colours. It uses colours on a terminal without NO_COLOR.

    The console prints data unchanged, without markup, emoji or highlighted numbers. A `fitted` one
    is as wide as the terminal, for output that fills the screen.
    """
    from rich.console import Console  # slow, and not needed for plain text or JSON

    return Console(
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=not fitted,
        width=None if fitted else _WIDTH,
    )


def table(*columns: str) -> Table:
    """Return a plain table. A column name that begins with `>` is for numbers."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        is_number = name.startswith(">")
        made.add_column(
            name.removeprefix(">"),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
        )
    return made


_STYLES: Final = tuple(
    (re.compile(pattern), style)
    for pattern, style in (
        (r"\s*(verdict: )?(group \S+: )?identical\b", "green"),
        (r"\s*verdict: equivalent", "green"),
        (r"\s*verdict: ", "bold red"),
        (r"\s*group .*: different", "red"),
        (r"\s*[-]  ", "red"),
        (r"\s*[+]  ", "green"),
        (r".*\b(transposing|REINTERPRETED)\b", "yellow"),
        (r"\s*over ", "cyan"),
        (r"\s*(group|plan) ", "bold"),
        (r"[a-z_]+  .*plan [0-9a-f]{6}$", "bold"),
        (r"\s*#  ", "bold"),
    )
)
"""Styles of lines; the first matching pattern counts."""


def write_plain(*lines: str) -> None:
    """Print lines without colours; print `?` for control characters, which a file may contain."""
    sys.stdout.writelines(f"{printable(line)}\n" for line in lines)


def write_lines(lines: Iterable[str]) -> None:
    """Print lines one by one, with colours on a terminal."""
    out, lines = console(), map(printable, lines)  # names of caches come from files
    if not out.is_terminal or out.no_color:
        out.file.writelines(f"{line}\n" for line in lines)
        return
    for line in lines:
        style = next((style for pattern, style in _STYLES if pattern.match(line)), "")
        out.print(line, style=style, overflow="ignore", crop=False, no_wrap=True)
