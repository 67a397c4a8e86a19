"""The `kvplan` command: what is done from a shell; each subcommand is a row of COMMANDS."""

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
    """A subcommand: its one-line help, and the module of its function, loaded when it is used.

    The function has the name of the subcommand; it is a click.Command that returns an `ExitCode`,
    or None for OK.
    """

    help: str
    module: str


COMMANDS: Final = {
    "explain": Command("Print what a plan copies, from where to where.", "kvplan.cli.plans"),
    "diff": Command("Print how two plans differ.", "kvplan.cli.plans"),
    "trace": Command("List what was recorded, and who wrote a block.", "kvplan.cli.trace"),
    "replay": Command("Find what is wrong in a cache after a plan.", "kvplan.cli.plans"),
    "top": Command("Show what this user's engines do, now.", "kvplan.cli.top"),
    "info": Command("Show what this machine has, and what works on it.", "kvplan.cli.info"),
    "ping": Command("Link with an engine, and measure what lies between.", "kvplan.cli.engines"),
    "tune": Command("Measure how this machine copies best.", "kvplan.cli.tune"),
    "keygen": Command("Make the key of a cluster.", "kvplan.cli.engines"),
}


class _Commands(click.Group):
    """COMMANDS, each loaded when it is used: none waits for the libraries of another."""

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
    help="Plan, read, test and execute transfers of an LLM's KV cache.",
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
    """Run the command with these arguments (None: the process's) and return its exit code."""
    if sys.stderr is None:  # closed by the shell: there is nothing to complain to
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stderr.write(f"{PROGRAM}: stdout is closed; > /dev/null leaves it open\n")
        return int(ExitCode.TROUBLE)
    _make_printable()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with GROUP.make_context(PROGRAM, given) as context:
            code = GROUP.invoke(context)
        sys.stdout.flush()  # where a closed pipe is noticed at the latest
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
    """In one line: of the system's errors the file and its words, without the number."""
    if not isinstance(error, OSError) or not error.strerror:
        text = str(error)
    elif error.filename is None:
        text = error.strerror
    else:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    return printable(text)


def _explain_usage(misused: click.UsageError) -> None:
    """What was wrong with the line, and how it should look."""
    lines = [f"{PROGRAM}: {misused.format_message()}"]
    if misused.ctx is not None:
        lines.append(misused.ctx.get_usage())
        lines.append(f"Try '{misused.ctx.command_path} --help'.")
    sys.stderr.write("\n".join(lines) + "\n")


def _make_printable() -> None:
    """Let what the locale's encoding has not (an arrow in ASCII) come out as `?`, and not fail."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")


def _forget_output() -> None:
    """Keep the interpreter from writing what is left to the closed pipe, and complaining."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
