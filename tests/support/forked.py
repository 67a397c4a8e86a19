"""`python -c CODE` in a fork of a process that has imported the modules of the code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.support import zygote


def python(
    code: str,
    *arguments: str,
    imported: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the code as a new interpreter would: `sys.argv` has the arguments."""
    return zygote.run(
        "tests.support.forked",
        code,
        *arguments,
        imported=imported,
        environment=os.environ if environment is None else environment,
    )


def main(code: str, *arguments: str) -> None:
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})
