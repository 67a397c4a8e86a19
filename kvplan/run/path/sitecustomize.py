"""Runs at the start of each Python process under the launcher; finds `llm_datadist` in this folder.

PYTHONPATH alone would do, were it not for the program's own folder, which comes before it and may
hold another `llm_datadist`. Any Python 3 may get here, at every start: this takes little time and
nothing but the standard library.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs 5 ms


class FolderFirst:
    """A finder that looks for our two names here before any other place."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Answer for our two names only."""
        if name in ("llm_datadist", "llm_datadist_v1"):
            return PathFinder.find_spec(name, [FOLDER])
        return None


def hand_on() -> None:
    """Run the sitecustomize that this one stands before, in its name."""
    others = [folder for folder in sys.path if folder != FOLDER]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, FolderFirst)
hand_on()
