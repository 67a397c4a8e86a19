"""`kvplan info`: what this machine has, what kvplan can do with it, and why not more."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Final

from kvplan.cli.info import apart, host, text

SCHEMA_VERSION: Final = 1
"""Of `--json`: rises when a field changes its meaning or goes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument("--json", action="store_true", help="the same for programs")
    parser.add_argument(
        "--device-id",
        type=int,
        default=0,
        metavar="N",
        help="the device that transports and copies are tried with (llm.DeviceId), default 0",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60,
        metavar="SECONDS",
        help="that looking at the accelerator and UCX may take, default 60",
    )


def run(arguments: argparse.Namespace) -> None:
    """Look, and print what was found; what cannot be looked at is a part of that."""
    found = {
        "schema_version": SCHEMA_VERSION,
        **host.describe(),
        **apart.look(arguments.device_id, arguments.timeout),
    }
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        sys.stdout.write(text.render(found))
