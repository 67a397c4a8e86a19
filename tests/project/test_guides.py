"""Guides that list names of the code: they must agree with it."""

import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

import kvplan
from kvplan.control.messages import PROTOCOL_VERSION
from kvplan.engine.option_kinds import rows_of
from kvplan.engine.options import Options
from kvplan.hixl.options import OwnOptions
from kvplan.planning.plan import SCHEMA_VERSION
from kvplan.recording.format import MAGIC
from kvplan.serving import ExchangeOptions
from kvplan.transport.hccl import metadata as hccl
from kvplan.transport.local import metadata as local
from kvplan.transport.tcp import metadata as tcp
from kvplan.transport.ucx import metadata as ucx
from tools.option_tables import PAGES, written

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PARTS = ("how-to", "reference")

PLACEHOLDERS = {"_name.pyx", "name.c", "test_x.py"}
"""Placeholders for files that a reader creates."""


def test_the_tables_of_options_agree_with_their_rows() -> None:
    wrong = [page.name for page in PAGES if written(page, text := page.read_text()) != text]
    assert wrong == [], "run `make options`"


def test_a_wrong_default_in_a_table_is_detected() -> None:
    page = DOCS / "reference/options.md"
    text = page.read_text()
    other = text.replace("| `max_links` | 512 |", "| `max_links` | 511 |")
    assert other != text == written(page, other)


def test_every_field_of_options_is_a_row() -> None:
    for kind in (Options, ExchangeOptions, OwnOptions):
        assert [row.field for row in rows_of(kind)] == [field.name for field in fields(kind)]
        assert all(f"    {row.field}: " in str(kind.__doc__) for row in rows_of(kind))


def test_every_status_code_is_explained() -> None:
    text = (DOCS / "reference/status-codes.md").read_text()
    explained = set(re.findall(r"^## (LLM_\w+)$", text, re.MULTILINE))
    sources = [
        path.read_text() for path in (ROOT / "kvplan").rglob("*.py") if path.name != "status.py"
    ]
    used = {code for source in sources for code in re.findall(r"LLMStatusCode\.(LLM_\w+)", source)}
    assert explained == (used | {"LLM_FAILED"}) - {"LLM_SUCCESS"}
    assert all(code.name in text for code in kvplan.LLMStatusCode)


def test_every_call_is_in_the_guide() -> None:
    guide = "\n".join(path.read_text() for part in PARTS for path in (DOCS / part).glob("*.md"))
    calls = {
        item for item in dir(kvplan.LlmDataDist) if not item.startswith(("_", "plan_", "submit_"))
    }
    assert not {call for call in calls if not re.search(rf"\b{call}\b", guide)}


def test_no_page_names_a_removed_name() -> None:
    """The changelog and the decisions are excepted, because they describe the past."""
    removed = re.compile(
        r"\b(GroupPlan|RangePlan|memory_report|peer_caches\(|lease_slot|read_cache|TRANSPORT_COSTS"
        r"|timeline\.html|kvplan (bench|estimate|html|completion)\b|tuning=stored)|plan\.groups"
        r"|pip install kvplan(?![\w-])"
    )
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/**/*.md")]
    pages = [page for page in pages if page.name != "CHANGELOG.md" and page.parent.name != "adr"]
    assert len(pages) > 40
    found = [(page.name, word[0]) for page in pages for word in removed.finditer(page.read_text())]
    assert found == []


def test_no_text_has_conflict_markers() -> None:
    texts = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "tests/README.md"]
    marked = [
        path.name
        for path in texts
        if re.search(r"^(<<<<<<< |=======$|>>>>>>> )", path.read_text(), re.MULTILINE)
    ]
    assert marked == []


def test_every_file_that_the_architecture_names_exists() -> None:
    page = (DOCS / "internals/architecture.md").read_text()
    named = set(re.findall(r"`((?:kvplan|kvnative|include|tests|tools|benchmarks)/[\w./]+)`", page))
    assert len(named) > 50
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("page", ["docs/internals/architecture.md", "CONTRIBUTING.md"])
def test_every_file_that_a_guide_names_without_a_folder_exists(page: str) -> None:
    files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    existing = {Path(file).name for file in files}
    named = set(
        re.findall(r"`(?:[\w/]+/)?(\w+\.(?:py|pyx|pxd|c|h|cu))`", (ROOT / page).read_text())
    )
    assert len(named) > 5
    assert sorted(named - existing - PLACEHOLDERS) == []


def test_the_page_of_compatible_versions_agrees_with_the_code() -> None:
    page = (DOCS / "reference/compatibility.md").read_text()
    tags = [str(item.Metadata.__struct_config__.tag) for item in (local, tcp, ucx, hccl)]
    versions = ", ".join("`{}` {}".format(*tag.removeprefix("kvplan.").split()) for tag in tags)
    assert f"| control protocol | {PROTOCOL_VERSION} |" in page
    protocol = (DOCS / "internals/control-protocol.md").read_text()
    assert f"version: 1 byte ({PROTOCOL_VERSION})" in protocol
    assert f"| metadata of a transport | {versions} |" in page
    assert f"`schema_version` {SCHEMA_VERSION} |" in page
    assert f"`{MAGIC.decode().strip()}`" in page
