"""Becomes kvplan's `llm_datadist` when it is imported: under the launcher it is found first."""

import sys
from importlib import import_module
from pathlib import Path

try:
    import kvplan  # noqa: F401 - is it installed?
except ModuleNotFoundError:
    # It runs from a source tree, in which the program was not started.
    sys.path.append(str(Path(__file__).parents[3]))

from kvplan.llm_datadist.installation import ROOTS, install

install(quiet=True)  # the launcher has said it
sys.modules[__name__] = import_module(ROOTS[__name__])
