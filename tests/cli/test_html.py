"""`kvplan html`: the picture that a plan draws of itself, in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvplan.cli import main
from tests.cli.running import command, push, refused
from tests.support.plans import joined

PLAN, OTHER = push([7, 8, 2]), push([7, 2, 8])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    PLAN.save("plan.json")
    OTHER.save("other.json")
    joined({"full": PLAN}).save("groups.json")
    return tmp_path


def test_it_is_what_the_plan_draws(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["html", "plan.json"]) == 0
    assert capsys.readouterr().out == f"plan.html: {PLAN!r}\n"
    assert Path("plan.html").read_text() == PLAN.to_html()
    assert main(["html", "plan.json", "-o", "picture.svg"]) == 0
    assert Path("picture.svg").read_text() == PLAN.to_svg()
    assert main(["html", "groups.json", "-o", "deeper.htm"]) == 0
    assert Path("deeper.htm").read_text() == joined({"full": PLAN}).to_html()


def test_a_comparison(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["html", "plan.json", "--diff", "other.json", "-o", "d.html", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    written = Path("d.html").read_bytes()
    assert written.decode() == PLAN.to_html(diff=OTHER)
    assert found == {"schema_version": 1, "path": "d.html", "nbytes": len(written)}


def test_from_stdin_to_stdout(folder: Path) -> None:
    plan = (folder / "plan.json").read_text()
    assert command("html", "-", "-o", "-", stdin=plan).stdout == PLAN.to_html() + "\n"


def test_a_browser_is_given_the_file(folder: Path) -> None:
    browser, seen = folder / "browser", folder / "seen"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {seen}\n')
    browser.chmod(0o755)
    output = folder / "a picture.html"
    done = command("html", folder / "plan.json", "-o", output, "--open", BROWSER=str(browser))
    assert (done.returncode, done.stderr) == (0, "")
    assert seen.read_text() == output.as_uri()


def test_without_a_browser_it_is_written_all_the_same(folder: Path) -> None:
    none = {"BROWSER": "/bin/false", "PATH": ""}
    done = command("html", folder / "plan.json", "-o", folder / "a.html", "--open", **none)
    assert done.returncode == 2
    assert f"no browser can be started here; {folder}/a.html is there" in done.stderr
    assert (folder / "a.html").read_text() == PLAN.to_html()


def test_what_cannot_be_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["plan.json", "-o", "a.png"], "a.png must end in .html, .htm, .svg"),
        (["plan.json", "-o", "a.svg", "--diff", "other.json"], "and not as SVG"),
        (["plan.json", "--diff", "groups.json"], "the other one of groups"),
        (["plan.json", "-o", "-", "--json"], "neither shown nor described"),
    ):
        assert main(["html", *arguments]) == 2
        assert expected in capsys.readouterr().err
    missing = folder / "missing/a.html"
    assert refused("html", folder / "plan.json", "-o", missing) == (
        f"{missing}: No such file or directory"
    )
