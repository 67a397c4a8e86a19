"""`make docs`: every public name has its place in the reference, and nothing of it is a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvplan
from kvplan import llm_datadist

ROOT = Path(__file__).parents[2]


def write_reference(folder: Path, tool: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, tool, folder], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    done = write_reference(folder, ROOT / "tools/api_reference.py")
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def names_on(page: Path) -> set[str]:
    return set(re.findall(r'<(?:section|div) id="([\w.]+)"', page.read_text()))


def test_every_public_name_is_described(reference: Path) -> None:
    methods = {f"LlmDataDist.{it}" for it in dir(kvplan.LlmDataDist) if not it.startswith("_")}
    assert methods > {"LlmDataDist.pull_blocks", "LlmDataDist.finalize"}
    names = set(kvplan.__all__) - {"reference"}  # a module, with a page of its own
    assert names | methods <= names_on(reference / "kvplan.html")
    assert names_on(reference / "kvplan/planning/reference.html") == {"execute"}


def test_the_official_surface_is_described(reference: Path) -> None:
    names = {*llm_datadist.__all__, "install", "in_use", "LLMDataDist.link_clusters"}
    assert names <= names_on(reference / "kvplan/llm_datadist.html")
    manager = names_on(reference / "kvplan/llm_datadist/v2/cache_manager.html")
    assert {"CacheManager.pull_blocks", "CacheManager.transfer_cache_async"} <= manager


def test_what_documents_and_examples_import_is_public(reference: Path) -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.py")]
    imported = {
        module
        for text in texts
        for module in re.findall(r"\b(?:from|import) (kvplan[\w.]*)", text.read_text())
    }
    assert "kvplan.engine.prometheus" in imported
    pages = {reference / f"{module.replace('.', '/')}.html" for module in imported}
    assert [page for page in pages if not page.is_file()] == []


def test_docstrings_are_read_as_they_are_written(reference: Path) -> None:
    """Sections of arguments and errors are lists, not running text."""
    page = (reference / "kvplan.html").read_text()
    described = page.split('<div id="LlmDataDist.link_clusters"')[1].split('<div id="Llm')[0]
    for title in ("Arguments:", "Returns:", "Raises:"):
        assert re.search(rf"<h6[^>]*>{title}</h6>", described)
    assert "<strong>timeout_ms:</strong>" in described


def test_a_name_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    tool = tmp_path / "tools/api_reference.py"
    tool.parent.mkdir()
    source = (ROOT / "tools/api_reference.py").read_text()
    tool.write_text(source.replace('    "kvplan.cli",', '    "kvplan.no_such_module",'))
    done = write_reference(tmp_path / "pages", tool)
    assert done.returncode == 1
    assert "kvplan.no_such_module" in done.stderr
