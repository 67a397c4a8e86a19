"""The `kvplan` command: what is done from a shell."""

from kvplan.cli.command import main

__all__ = ["main"]
