"""The `kvplan` command. Logic that the library lacks does not belong here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, NamedTuple

import click

import kvplan
from kvplan.cli.common import PROGRAM, ExitCode
from kvplan.status import LLMException
from kvplan.validation import printable

__all__ = ["main"]


class Command(NamedTuple):
    """A subcommand: its one-line help, and its module, which is loaded on use.

    The module has a click.Command with the name of the subcommand. The command returns an
    `ExitCode`, or None for OK.
    """

    help: str
    module: str


COMMANDS: Final = {
    "explain": Command("Show what a plan copies, from where to where.", "kvplan.cli.plans"),
    "diff": Command("Show how two plans differ.", "kvplan.cli.plans"),
    "check": Command("Check a plan, or placements of weights.", "kvplan.cli.check"),
    "trace": Command("List recorded transfers; find who wrote a block.", "kvplan.cli.trace"),
    "replay": Command("Find wrong bytes in a cache after a transfer.", "kvplan.cli.plans"),
    "top": Command("Show the running engines of this user.", "kvplan.cli.top"),
    "info": Command("Show whether kvplan works on this machine, and how.", "kvplan.cli.info"),
    "ping": Command("Link with an engine, and measure the link.", "kvplan.cli.engines"),
    "tune": Command("Measure the fastest way to copy on this machine.", "kvplan.cli.tune"),
    "keygen": Command("Make a cluster key.", "kvplan.cli.engines"),
}


class _Commands(click.Group):
    """A group of COMMANDS; each command loads only the libraries that it needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        row = COMMANDS.get(cmd_name)
        if row is None:
            return None
        command = getattr(import_module(row.module), cmd_name)
        assert isinstance(command, click.Command), row.module
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, row.help) for name, row in COMMANDS.items()])


GROUP: Final = _Commands(
    PROGRAM,
    help="Read plans and recordings of KV cache transfers; look at engines and machines.",
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=lambda context, _, wanted: _print_version(context) if wanted else None,
            help="Print the version.",
        )
    ],
)


def _print_version(context: click.Context) -> None:
    click.echo(f"{PROGRAM} {kvplan.__version__}")
    context.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with arguments (None: those of the process); return its exit code."""
    if sys.stderr is None:  # closed by the shell
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stderr.write(f"{PROGRAM}: stdout is closed; redirect it to /dev/null instead\n")
        return int(ExitCode.TROUBLE)
    _make_printable()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with GROUP.make_context(PROGRAM, given) as context:
            code = GROUP.invoke(context)
        sys.stdout.flush()  # raises if the pipe is closed
    except click.exceptions.Exit as ended:  # --help, --version
        return ended.exit_code
    except click.exceptions.NoArgsIsHelpError as misused:
        sys.stderr.write(f"{misused.format_message()}\n")
    except click.UsageError as misused:
        _explain_usage(misused)
    except click.ClickException as error:
        sys.stderr.write(f"{PROGRAM}: {error.format_message()}\n")
    except (KeyboardInterrupt, click.Abort):
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        _forget_output()
        return int(ExitCode.CLOSED)
    except (LLMException, OSError) as error:
        sys.stderr.write(f"{PROGRAM}: {_reason(error)}\n")
    else:
        return int(code or ExitCode.OK)
    return int(ExitCode.TROUBLE)


def _reason(error: LLMException | OSError) -> str:
    """Return an error as one line; for a system error, its file and message."""
    if not isinstance(error, OSError) or not error.strerror:
        return printable(str(error))
    named = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return printable(named + error.strerror)


def _explain_usage(misused: click.UsageError) -> None:
    """Print the error in the arguments, and the usage."""
    lines = [f"{PROGRAM}: {misused.format_message()}"]
    if misused.ctx is not None:
        lines.append(misused.ctx.get_usage())
        lines.append(f"Try '{misused.ctx.command_path} --help'.")
    sys.stderr.write("\n".join(lines) + "\n")


def _make_printable() -> None:
    """Print `?` for characters that the locale's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")


def _forget_output() -> None:
    """Discard output that the interpreter would still write to the closed pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
