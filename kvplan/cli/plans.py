"""Plans and transports as arguments of commands: read, checked, and completed by the shell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from kvplan.inspection.cost import TRANSPORT_COSTS
from kvplan.planning.files import load_plan, read_plan

if TYPE_CHECKING:
    from kvplan.planning.groups import AnyPlan

_F = TypeVar("_F", bound=Callable[..., Any])

STDIN: Final = "-"


def plan_argument(name: str, metavar: str = "PLAN.json") -> Callable[[_F], _F]:
    """Give a command a plan: the file that `plan.save` wrote, or `-` for stdin."""
    return click.argument(
        name,
        metavar=metavar,
        type=click.Path(),
        callback=_read,
        shell_complete=_complete,
    )


def plan_option(option: str, name: str, text: str) -> Callable[[_F], _F]:
    """The same as an option, which need not be given."""
    return click.option(
        option,
        name,
        metavar="PLAN.json",
        type=click.Path(),
        callback=_read,
        shell_complete=_complete,
        help=text,
    )


def picture_option(kind: str, text: str) -> Callable[[_F], _F]:
    """Give a command `--html` or `--svg`, a file to write, as the parameter of that name."""
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option(f"--{kind}", kind, metavar="FILE", type=path, help=text)


def transport_option(name: str, text: str, *, multiple: bool = False) -> Callable[[_F], _F]:
    """Give a command `--transport`, one of those that have costs, as the parameter `name`."""
    choice = click.Choice([*TRANSPORT_COSTS])
    return click.option("-t", "--transport", name, type=choice, multiple=multiple, help=text)


def _read(context: click.Context, _: click.Parameter, value: str | None) -> AnyPlan | None:
    # The shell completes the line: no file is read for that.
    if value is None or context.resilient_parsing:
        return None
    if value != STDIN:
        return load_plan(value)
    if sys.stdin is None:
        raise click.UsageError("stdin is closed, and a plan was to come from there")
    return read_plan(sys.stdin.buffer, "stdin")


def _complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """JSON files and folders; where there are no such files, whatever the shell itself finds."""
    folder, slash, start = incomplete.rpartition("/")
    try:
        entries = sorted(Path(folder + slash or ".").iterdir())
    except OSError:
        entries = []
    fitting = [it for it in entries if it.name.startswith(start or ".") == bool(start)]
    if not any(it.suffix == ".json" for it in fitting):
        return [CompletionItem(incomplete, type="file")]
    return [
        CompletionItem(f"{folder}{slash}{it.name}{'/' if it.is_dir() else ''}")
        for it in fitting
        if it.suffix == ".json" or it.is_dir()
    ]
