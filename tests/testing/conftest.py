from __future__ import annotations

import pytest

from tests.testing.folder import Folder


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Folder:
    for name in ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS"):  # otherwise output is complete
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    return Folder(pytester)
