"""`make docs`: no warning, no broken link, no file of another server, and every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from selenium.webdriver.support.ui import WebDriverWait
from sphinx.util.inventory import InventoryFile

import kvplan
from kvplan import llm_datadist
from tests.support.browser import chromium, resize

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as the Makefile builds it."""
    folder = tmp_path_factory.mktemp("site")
    makefile = (ROOT / "Makefile").read_text()
    (arguments,) = re.findall(r"\$\(BIN\)/sphinx-build (.*) build/site$", makefile, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *arguments.split(), folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.fixture(scope="module")
def names(site: Path) -> dict[str, str]:
    """Each Python name that the site describes, with its page."""
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    return {
        name: item.uri.partition("#")[0]
        for kind, items in inventory.items()
        if kind.startswith("py:")
        for name, item in items.items()
    }


class Page(HTMLParser):
    """The anchors of a page (`ids`), its links, and the files that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attrs}
        self.ids |= {of[name] for name in ("id", "name") if name in of}
        if tag == "a" and "href" in of:
            self.links.add(of["href"])
        elif tag == "link":
            self.loads.add(of["href"])
        elif "src" in of:
            self.loads.add(of["src"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}


def test_every_link_has_a_target(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme in {"http", "https"}:
                continue
            target = path.parent.joinpath(unquote(url.path)).resolve() if url.path else path
            if not target.is_file() or (
                url.fragment and unquote(url.fragment) not in pages[target].ids
            ):
                broken.append((str(path.relative_to(site)), link))
    assert len(pages) > 50
    assert broken == []


def test_no_file_is_loaded_from_another_server(site: Path, pages: dict[Path, Page]) -> None:
    """The site works without a network: its fonts, scripts, styles and pictures are its own."""
    for path, page in pages.items():
        loads = {urlsplit(load) for load in page.loads}
        assert {load for load in loads if load.netloc} == set()
        files = [path.parent / load.path for load in loads if load.scheme != "data" and load.path]
        assert [file for file in files if not file.is_file()] == []
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert styles
    assert [
        match
        for text in styles
        for match in re.findall(r"(?:url\(|@import)\W*(?:https?:)?//", text)
    ] == []


def test_every_public_name_is_described(names: dict[str, str]) -> None:
    of_engine = {item for item in dir(kvplan.LlmDataDist) if not item.startswith("_")}
    assert of_engine > {"pull_blocks", "finalize"}
    wanted = {f"kvplan.LlmDataDist.{item}" for item in of_engine} | {
        f"kvplan.{item}" for item in kvplan.__all__
    }
    assert wanted - {"kvplan.reference"} - set(names) == set()
    assert "kvplan.planning.reference.execute" in names


def test_the_official_surface_is_described(names: dict[str, str]) -> None:
    of_kvplan = {item for item in llm_datadist.__all__ if hasattr(kvplan, item)}
    of_kvplan = {item for item in of_kvplan if getattr(kvplan, item) is getattr(llm_datadist, item)}
    assert {f"kvplan.{item}" for item in of_kvplan} <= set(names)
    own = {*llm_datadist.__all__} - of_kvplan | {"install", "in_use", "LLMDataDist.link_clusters"}
    assert {f"kvplan.llm_datadist.{answer}" for answer in own} - set(names) == set()
    manager = "kvplan.llm_datadist.v2.cache_manager.CacheManager"
    assert {f"{manager}.{name}" for name in ("pull_blocks", "transfer_cache_async")} <= set(names)


def test_documents_and_examples_import_public_names(names: dict[str, str]) -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")]
    imported = {
        module
        for text in texts
        for module in re.findall(r"\b(?:from|import) (kvplan[\w.]*)", text.read_text())
    }
    assert "kvplan.engine.prometheus" in imported
    assert [
        item for item in imported if not any(name.startswith(f"{item}.") for name in names)
    ] == []


def test_sections_of_docstrings_become_lists(site: Path) -> None:
    """Sections of arguments and errors become lists, not running text."""
    page = (site / "docs/reference/api/engine.html").read_text()
    described = page.split('id="kvplan.LlmDataDist.link_clusters"')[1].split('id="kvplan.Llm')[0]
    for title in ("Parameters", "Returns", "Raises"):
        assert f"<dt>{title}" in described or re.search(rf"<dt[^>]*>{title}", described)
    assert "<strong>timeout_ms</strong>" in described


LAID_OUT = """
const found = [], columns = 120;
const tooWide = (it) => it.scrollWidth > it.clientWidth + 1;
if (document.documentElement.scrollWidth > innerWidth) found.push("the page");
for (const it of document.querySelectorAll("pre")) {
  const widest = Math.max(...it.innerText.split("\\n").map((line) => line.length));
  if (widest <= columns && tooWide(it)) found.push(it.innerText.slice(0, 60));
}
for (const cell of document.querySelectorAll("table.docutils td, table.docutils th")) {
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    for (const word of walker.currentNode.textContent.matchAll(/[\\w.]+/g)) {
      const range = document.createRange();
      range.setStart(walker.currentNode, word.index);
      range.setEnd(walker.currentNode, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map((it) => Math.round(it.top)));
      if (lines.size > 1) found.push(word[0]);
    }
  }
}
return found;
"""


def test_plans_fit_and_words_in_tables_stay_whole(site: Path, tmp_path: Path) -> None:
    """The tables fit windows of 1,400 pixels and more, and no page scrolls sideways."""
    with chromium(tmp_path) as driver:
        for width in (1400, 1920):
            resize(driver, width)
            for name in ("how-to/planning", "reference/options", "internals/architecture"):
                driver.get((site / f"docs/{name}.html").as_uri())
                assert driver.execute_script(LAID_OUT) == []
        resize(driver, 1400)
        (icon,) = driver.find_elements("css selector", ".toc-content-icon")
        contents = driver.find_element("css selector", ".toc-drawer")
        assert contents.location["x"] >= 1380  # out of sight
        icon.click()
        WebDriverWait(driver, 60, 0.02).until(lambda _: contents.location["x"] < 1300)
