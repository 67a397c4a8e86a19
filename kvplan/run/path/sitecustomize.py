"""Runs at the start of each Python process under the launcher, and puts our finder first.

The modules beside this one are not enough: the program's own folder comes before PYTHONPATH and
may have another `llm_datadist`.
"""

import sys
from importlib.machinery import PathFinder

from kvplan_hook import FOLDER, Hook, report_at_exit  # type: ignore[import-not-found] # this folder is in sys.path


def run_hidden() -> None:
    """Run the sitecustomize that this module hides, under its name."""
    others = [folder for folder in sys.path if folder != FOLDER]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, Hook)
report_at_exit()
run_hidden()
