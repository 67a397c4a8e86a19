"""Reads the command line; each subcommand is a row of COMMANDS."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import kvplan
from kvplan.cli import info, keygen
from kvplan.status import LLMException

OK: Final = 0
FAILED: Final = 1
# argparse itself exits with 2 where the command line is not understood.


class Command(NamedTuple):
    """A subcommand: its one-line help, its arguments, and what it does."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


COMMANDS: Final = {
    "info": Command(
        "tell what this machine has, and what works on it", info.add_arguments, info.run
    ),
    "keygen": Command("make the key of a cluster", keygen.add_arguments, keygen.run),
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
