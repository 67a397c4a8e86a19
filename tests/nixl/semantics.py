"""A program for two implementations of NIXL, which prints the outcome of each row as JSON.

`python -m tests.nixl.semantics PACKAGE` imports PACKAGE (`nixl_cu12`, `kvplan.nixl`). A row is a
small use of two agents in one process. Its outcome is a value that JSON has, or the name of the
exception.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

from tests.nixl import agent_rows, transfer_rows, value_rows
from tests.nixl.world import ROWS, World

__all__ = ["ROWS", "agent_rows", "transfer_rows", "value_rows"]


def main() -> None:
    package = sys.argv[1]
    api, bindings = import_module(f"{package}._api"), import_module(f"{package}._bindings")
    wanted = sys.argv[2:]
    for name, call in ROWS.items():
        if wanted and name not in wanted:
            continue
        try:
            outcome = call(World(api, bindings))
        except Exception as error:
            outcome = f"the row raised {type(error).__name__}: {error}"
        print(json.dumps([name, outcome], default=repr), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
