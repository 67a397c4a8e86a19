"""Becomes kvplan's `llm_datadist_v1` when it is imported: under the launcher it is found first."""

import sys
from importlib import import_module

import_module("llm_datadist")  # installs both
sys.modules[__name__] = import_module("kvplan.llm_datadist.v1")
