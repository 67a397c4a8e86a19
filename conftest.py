"""The documents are tests: every Python example of README and docs/ is run, its output compared."""

from __future__ import annotations

import os
import tempfile
from doctest import ELLIPSIS

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_plugins = ["pytester"]  # tests of the pytest plugin run pytest

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS)], patterns=["*.md"]
).pytest()


def pytest_configure(config: pytest.Config) -> None:
    """Leave the key alone of the user who runs the tests; documents know no fixtures."""
    state = tempfile.TemporaryDirectory(prefix="kvplan-state-")
    os.environ["XDG_STATE_HOME"] = state.name
    config.add_cleanup(state.cleanup)
