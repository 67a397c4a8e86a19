"""Replaces itself with kvplan's `llm_datadist`, in processes without our sitecustomize."""

import sys
from importlib import import_module

from kvplan_hook import install  # type: ignore[import-not-found] # this folder is in sys.path

install()
sys.modules[__name__] = import_module("kvplan.llm_datadist")
