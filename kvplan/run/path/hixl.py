"""On import, replaces itself with the installed `hixl`, or with kvplan's."""

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

from kvplan_hook import FOLDER, find_kvplan  # type: ignore[import-not-found] # in sys.path

spec = PathFinder.find_spec(__name__, [folder for folder in sys.path if folder != FOLDER])
# A folder without __init__.py is a namespace package, not an installation.
if spec is not None and spec.loader is not None and spec.origin is not None:
    sys.modules[__name__] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
else:
    find_kvplan()
    sys.modules[__name__] = ours = import_module("kvplan.hixl")
    # The original package gets its names from this extension module.
    sys.modules["hixl.hixl"] = ours
