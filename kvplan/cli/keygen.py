"""`kvplan keygen PATH`: a new cluster key in a new file."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument(
        "path", help="the file to make; copy it to every host of the cluster, mode 0600"
    )


def run(arguments: argparse.Namespace) -> None:
    """Make the key, and say where it is.

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
    sys.stdout.write(f"{arguments.path}: a new cluster key; whoever can read it can link\n")
