"""What the guides list is what there is: they cannot fall behind the code."""

import re
from dataclasses import fields
from pathlib import Path

import kvplan
from kvplan.control.messages import PROTOCOL_VERSION
from kvplan.engine.option_rows import ROWS
from kvplan.engine.options import Options
from kvplan.planning.plan import SCHEMA_VERSION
from kvplan.recording.format import MAGIC
from kvplan.transport.hccl import metadata as hccl
from kvplan.transport.local import metadata as local
from kvplan.transport.tcp import metadata as tcp
from kvplan.transport.ucx import metadata as ucx

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PARTS = ("how-to", "reference")


def test_every_option_is_in_the_guide() -> None:
    guide = (DOCS / "reference/options.md").read_text()
    table = {
        word for row in guide.splitlines() if row[:3] == "| `" for word in row.split("`")[1::2]
    }
    keys = {key for row in ROWS for key in row.keys} - {"llm.listenIpInfo"}  # in the text
    assert not (keys | {it.name for it in fields(Options)}) - table


def test_the_defaults_of_options_are_those_of_the_guide() -> None:
    row = re.compile(r"^\|[^|]*\| `(\w+)` \| ([^|]+?) \|", re.MULTILINE)
    rows = row.findall((DOCS / "reference/options.md").read_text())
    # Not of an instance: the suite has larger timeouts (see be_patient of tests/support/peer.py).
    values = {it.name: it.default for it in fields(Options)}
    defaults = {name: default.strip("`") for name, default in rows if name in values}
    assert len(defaults) > 15
    words: dict[object, str] = {None: "none", "": "empty"}
    for name, default in defaults.items():
        value = values[name]
        said = words.get(value, str(int(value) if isinstance(value, bool) else value))
        assert (name, said) == (name, default)


def test_every_status_code_is_explained() -> None:
    text = (DOCS / "reference/status-codes.md").read_text()
    explained = set(re.findall(r"^## (LLM_\w+)$", text, re.MULTILINE))
    sources = [it.read_text() for it in (ROOT / "kvplan").rglob("*.py") if it.name != "status.py"]
    used = {code for source in sources for code in re.findall(r"LLMStatusCode\.(LLM_\w+)", source)}
    assert explained == (used | {"LLM_FAILED"}) - {"LLM_SUCCESS"}
    assert all(code.name in text for code in kvplan.LLMStatusCode)


def test_every_call_is_in_the_guide() -> None:
    guide = "\n".join(it.read_text() for part in PARTS for it in (DOCS / part).glob("*.md"))
    calls = {it for it in dir(kvplan.LlmDataDist) if not it.startswith(("_", "plan_", "submit_"))}
    assert not {call for call in calls if not re.search(rf"\b{call}\b", guide)}


def test_no_page_names_what_is_gone() -> None:
    """Not of the changelog and the decisions, which say what was before."""
    gone = re.compile(
        r"\b(GroupPlan|RangePlan|memory_report|peer_caches\(|lease_slot|read_cache|TRANSPORT_COSTS"
        r"|timeline\.html|kvplan (bench|estimate|html|completion)\b|tuning=stored)|plan\.groups"
        r"|pip install kvplan(?![\w-])"
    )
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/**/*.md")]
    pages = [page for page in pages if page.name != "CHANGELOG.md" and page.parent.name != "adr"]
    assert len(pages) > 40
    found = [(page.name, word[0]) for page in pages for word in gone.finditer(page.read_text())]
    assert found == []


def test_every_file_that_the_architecture_names_exists() -> None:
    page = (DOCS / "internals/architecture.md").read_text()
    named = set(re.findall(r"`((?:kvplan|kvnative|include|tests|tools|benchmarks)/[\w./]+)`", page))
    assert len(named) > 50
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_versions_that_work_together_are_those_of_the_code() -> None:
    page = (DOCS / "reference/compatibility.md").read_text()
    tags = [str(it.Metadata.__struct_config__.tag) for it in (local, tcp, ucx, hccl)]
    said = ", ".join("`{}` {}".format(*tag.removeprefix("kvplan.").split()) for tag in tags)
    assert f"| control protocol | {PROTOCOL_VERSION} |" in page
    assert f"| metadata of a transport | {said} |" in page
    assert f"`schema_version` {SCHEMA_VERSION} |" in page
    assert f"`{MAGIC.decode().strip()}`" in page
