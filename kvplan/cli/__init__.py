"""The `kvplan` command: what is done from a shell; each subcommand is a row of COMMANDS."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import kvplan
from kvplan.cli import info
from kvplan.status import LLMException

__all__ = ["main"]

OK: Final = 0
FAILED: Final = 1
# argparse itself exits with 2 where the command line is not understood.


class Command(NamedTuple):
    """A subcommand: its one-line help, its arguments, and what it does."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def _add_keygen_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", help="the file to make; copy it to every host of the cluster, mode 0600"
    )


def _run_keygen(arguments: argparse.Namespace) -> None:
    """Make a new cluster key in a new file, and say where it is.

    Raises:
        OSError: the file exists, or cannot be made.
    """
    from kvplan.control.auth import ClusterKey  # no other command needs ZeroMQ

    try:
        ClusterKey.generate().save(arguments.path)
    except FileExistsError:
        raise FileExistsError(
            f"{arguments.path} exists, and is left as it is: a new key would shut out every engine "
            "that uses this one. Give another path, or remove the file first"
        ) from None
    sys.stdout.write(f"{arguments.path}: a new cluster key; anyone who can read it can link\n")


COMMANDS: Final = {
    "info": Command(
        "show what this machine has, and what works on it", info.add_arguments, info.run
    ),
    "keygen": Command("make the key of a cluster", _add_keygen_arguments, _run_keygen),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (None: the process's) and return its exit code."""
    parser = argparse.ArgumentParser(prog="kvplan", description="Move KV caches between processes.")
    parser.add_argument("--version", action="version", version=f"kvplan {kvplan.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    chosen = parser.parse_args(arguments)
    try:
        chosen.run(chosen)
    except (LLMException, OSError) as error:
        sys.stderr.write(f"kvplan: {error}\n")
        return FAILED
    return OK
