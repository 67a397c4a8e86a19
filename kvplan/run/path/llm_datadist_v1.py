"""Becomes kvplan's `llm_datadist_v1` when it is imported; see `llm_datadist.py`."""

import sys
from importlib import import_module

from kvplan_hook import install  # type: ignore[import-not-found] # this folder is in sys.path

install()
sys.modules[__name__] = import_module("kvplan.llm_datadist.v1")
