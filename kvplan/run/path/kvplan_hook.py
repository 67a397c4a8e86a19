"""Installs kvplan's `llm_datadist` when it is first imported, and costs next to nothing until then.

Any Python may run this at its start, so it needs little of the standard library and nothing else;
one older than 3.7 prints a line that it cannot, and continues.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing costs 3 ms
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import MetaPathFinder
    from importlib.machinery import ModuleSpec

FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


class Hook:
    """A finder for our two names and the modules below them, in place of any other."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: None = None
    ) -> ModuleSpec | None:
        """Install, and return what the installed finder finds."""
        if name.partition(".")[0] in ("llm_datadist", "llm_datadist_v1"):
            return install().find_spec(name, path, target)
        return None


def find_kvplan() -> None:
    """Let kvplan be imported, also where it is not installed."""
    try:
        import kvplan  # noqa: F401 - is it there?
    except ModuleNotFoundError:
        # It runs from a source tree, in which the program was not started.
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(FOLDER))))  # noqa: PTH120


def install() -> MetaPathFinder:
    """Call kvplan's own `install`, and return its finder."""
    find_kvplan()
    from kvplan.llm_datadist import installation

    installation.install(quiet=True)  # the launcher has reported it
    return installation.finder
