"""Programs of a user who runs nothing else, so that a limit counts only their threads."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from textwrap import dedent


def run(program: str) -> None:
    """Run a program that calls `become`, or skip the test: only root can become another user."""
    import pytest  # the program, which imports this module, has no use for it

    if os.getuid() != 0:
        pytest.skip("a user who runs nothing else is needed")
    subprocess.run([sys.executable, "-c", dedent(program)], check=True, timeout=60)


def become() -> None:
    """Become a user without other processes. Import first what that user may not read."""
    user = 100_000 + os.getpid()
    os.setresuid(user, user, user)


def allow_threads(count: int | None) -> None:
    """Let the user have `count` threads from now on; None: as many as the system allows."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (most if count is None else count, most))
