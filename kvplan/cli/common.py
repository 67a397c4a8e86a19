"""Helpers of all commands: exit codes, arguments that are plans, JSON, tables, and colours."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import click

from kvplan.validation import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.table import Table

    from kvplan.planning.plan import Plan

_F = TypeVar("_F", bound=Callable[..., Any])

PROGRAM: Final = "kvplan"
STDIN: Final = "-"

_WIDTH: Final = 200
"""Columns that a table may take. A narrow terminal wraps its lines: cut numbers would be wrong."""


class ExitCode(IntEnum):
    """What a command ends with, as `diff`, `cmp` and `grep` do (docs/reference/command.md).

    A command returns one of them, or None for OK. What it raises becomes TROUBLE.
    """

    OK = 0
    DIFFERENT = 1
    """It did what it was asked, and the answer is no: plans differ, kvplan does not work here."""
    TROUBLE = 2
    """It could not do what it was asked: an argument, a file, a peer. stderr says why."""
    INTERRUPTED = 130
    """By Ctrl-C, as a shell says it: 128 + SIGINT."""
    CLOSED = 141
    """Nothing reads its output any more (`| head`): 128 + SIGPIPE."""


def json_option(function: _F) -> _F:
    """Give a command `--json`; its parameter is `as_json`."""
    option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
    return option(function)


def plan_argument(name: str, metavar: str = "PLAN.json") -> Callable[[_F], _F]:
    """Give a command the plan of a file that `plan.save` wrote, or of stdin as `-`."""
    return click.argument(name, metavar=metavar, type=click.Path(), callback=_read_plan)


def _read_plan(_: click.Context, __: click.Parameter, path: str) -> Plan:
    from kvplan.planning.schema import load_plan, read_plan  # not every command has plans

    if path != STDIN:
        return load_plan(path)
    if sys.stdin is None:
        raise click.UsageError("stdin is closed, and a plan was to come from there")
    return read_plan(sys.stdin.buffer, "stdin")


def picture_option(name: Literal["html", "svg"]) -> Callable[[_F], _F]:
    """Give a command `--html FILE` or `--svg FILE`; its parameter has the same name."""
    return click.option(
        f"--{name}",
        type=click.Path(),
        metavar="FILE",
        help=f"Draw a picture as {name.upper()} into this file instead; - is stdout.",
    )


def write_text(text: str, path: str) -> None:
    """Write a document that replaces the file, or goes to stdout for `-`."""
    if path == STDIN:
        click.echo(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def write_json(document: dict[str, Any]) -> None:
    """Print one document; `schema_version` is among its fields."""
    assert "schema_version" in document, "programs must be able to tell what they read"
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def console(*, stderr: bool = False, fitted: bool = False) -> Console:
    """Where tables and colours go: rich leaves colours out without a terminal, and for NO_COLOR.

    What is printed is data: brackets in it are not markup, `:name:` no emoji, numbers not lit up.
    One that is `fitted` is as wide as the terminal: what fills the screen has to know its lines.
    """
    from rich.console import Console  # not what prints plain text or JSON

    return Console(
        stderr=stderr,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=not fitted,
        width=None if fitted else _WIDTH,
    )


def table(*columns: str) -> Table:
    """A plain table; a column whose name begins with `>` is one of numbers."""
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
"""The first that fits counts."""


def write_lines(lines: Iterable[str]) -> None:
    """Print each line when it comes, with colours on a terminal.

    Names in plans are whatever a file says.
    """
    out, lines = console(), map(printable, lines)
    if not out.is_terminal or out.no_color:
        out.file.writelines(f"{line}\n" for line in lines)
        return
    for line in lines:
        style = next((style for pattern, style in _STYLES if pattern.match(line)), "")
        out.print(line, style=style, overflow="ignore", crop=False, no_wrap=True)
