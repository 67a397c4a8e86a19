"""`kvplan explain` and `diff`, of plans in files."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvplan
from kvplan import Plan, Rows, Transfer
from kvplan.cli import main
from tests.cli.running import HEADS_FIRST, TOKENS_FIRST, command, push, refused
from tests.support.plans import joined
from tests.support.zygote import ROOT

PLAN = push([7, 8, 2])


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    return path


def groups(*names: str) -> Plan:
    plans = {
        "full": kvplan.plan(
            Transfer(Rows(TOKENS_FIRST, [1, 2]), Rows(TOKENS_FIRST, [3, 4])), local="dst"
        ),
        "window": kvplan.plan(
            Transfer(Rows(HEADS_FIRST, [1, 5]), Rows(HEADS_FIRST, [3, 4])), local="dst"
        ),
    }
    return joined({name: plans[name] for name in names})


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    code = main([*map(str, arguments)])
    said = capsys.readouterr()
    assert said.err == ""
    return code, said.out


def document(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    _, out = printed(capsys, *arguments, "--json")
    found: dict[str, Any] = json.loads(out)
    assert found["schema_version"] == 1
    return found


class TestExplain:
    def test_explain_prints_the_text_of_the_plan(
        self, plan: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert printed(capsys, "explain", plan) == (0, PLAN.explain() + "\n")
        table = PLAN.explain("table", 2) + "\n"
        assert printed(capsys, "explain", plan, "-f", "table", "-n", "2") == (0, table)
        everything = PLAN.explain("table", None) + "\n"
        assert printed(capsys, "explain", plan, "-f", "table", "--all") == (0, everything)

    def test_a_picture_is_written_to_a_file(
        self, plan: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        html, svg = plan.with_name("a.html"), plan.with_name("a.svg")
        assert printed(capsys, "explain", plan, "--html", html, "--svg", svg) == (0, "")
        assert html.read_text() == PLAN.to_html()
        assert svg.read_text() == PLAN.to_svg()
        missing = plan.with_name("missing") / "a.html"
        assert refused("explain", plan, "--html", missing) == (
            f"{missing}: No such file or directory"
        )

    def test_groups_are_explained_by_name(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        both = groups("full", "window")
        both.save(tmp_path / "groups.json")
        assert printed(capsys, "explain", tmp_path / "groups.json")[1] == both.explain() + "\n"
        found = document(capsys, "explain", tmp_path / "groups.json", "--all")
        assert found["parts"] == ["full", "window"]
        assert [entry["index"] for entry in found["descriptors"]] == list(
            range(both.num_descriptors)
        )
        assert {entry["part"] for entry in found["descriptors"]} == {"full", "window"}

    def test_json_has_each_descriptor(self, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
        found = document(capsys, "explain", plan, "-n", "3")
        assert found["fingerprint"] == PLAN.fingerprint
        assert (found["num_descriptors"], len(found["descriptors"])) == (8, 3)
        # Blocks of 16 x 4 x 32 elements of 2 bytes: 4 KiB. Block 9 goes to block 2.
        second = found["descriptors"][1]
        assert (second["src_offset"], second["dst_offset"]) == (9 * 4096, 2 * 4096)
        assert (second["nbytes"], second["tokens"], second["kv"]) == (4096, [[32, 47]], "K")

    def test_a_plan_is_read_from_stdin(self) -> None:
        given = json.dumps(PLAN.to_dict())
        assert command("explain", "-", stdin=given).stdout == PLAN.explain() + "\n"

    def test_html_is_the_picture_of_the_plan(
        self, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert printed(capsys, "explain", plan, "--html", tmp_path / "plan.html") == (0, "")
        assert (tmp_path / "plan.html").read_text() == PLAN.to_html()
        assert printed(capsys, "explain", plan, "--html", "-") == (0, PLAN.to_html() + "\n")
        both = command("explain", plan, "--html", "-", "--json")
        assert (both.returncode, both.stdout) == (2, "")
        assert "cannot be combined" in both.stderr
        missing = tmp_path / "missing/a.html"
        assert refused("explain", plan, "--html", missing) == (
            f"{missing}: No such file or directory"
        )


class TestDiff:
    def test_a_picture_and_a_document_are_not_combined(self, plan: Path) -> None:
        html = plan.with_name("a.html")
        done = command("diff", plan, plan, "--html", html, "--json")
        assert (done.returncode, done.stdout, html.exists()) == (2, "", False)
        assert "--html and --json cannot be combined" in done.stderr

    @pytest.mark.parametrize(
        ("other", "code", "verdict"),
        [
            (PLAN, 0, "identical"),
            (push([7, 8, 2], coalesce=False), 0, "equivalent"),
            (push([7, 2, 8]), 1, "different bytes"),
            (push([7, 8, 2], HEADS_FIRST), 1, "different caches"),
            (
                groups("full"),
                1,
                "part (unnamed) only in the old plan; part full only in the new plan",
            ),
        ],
        ids=["identical", "equivalent", "blocks", "layout", "groups"],
    )
    def test_the_exit_code_is_that_of_diff(
        self,
        other: Any,
        code: int,
        verdict: str,
        plan: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        other.save(tmp_path / "other.json")
        got, out = printed(capsys, "diff", plan, tmp_path / "other.json")
        assert got == code
        assert out.splitlines()[-1].strip().startswith(f"verdict: {verdict}")
        found = document(capsys, "diff", plan, tmp_path / "other.json")
        assert (found["same"], found["identical"]) == (code == 0, verdict == "identical")
        assert found["verdict"].startswith(verdict)

    def test_groups_are_compared_by_name_and_place(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name, names in {
            "a": ("full", "window"),
            "b": ("window", "full"),
            "c": ("full",),
        }.items():
            groups(*names).save(tmp_path / name)
        codes = [printed(capsys, "diff", tmp_path / "a", tmp_path / letter)[0] for letter in "abc"]
        assert codes == [0, 1, 1]

    def test_html_is_the_picture_of_both(
        self, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = push([7, 2, 8])
        other.save(tmp_path / "other.json")
        picture = tmp_path / "changed.html"
        assert printed(capsys, "diff", plan, tmp_path / "other.json", "--html", picture) == (1, "")
        assert picture.read_text() == PLAN.to_html(diff=other)
        assert picture.read_text().count("<svg ") == 2
        groups("full").save(tmp_path / "parts.json")
        assert printed(capsys, "diff", plan, tmp_path / "parts.json", "--html", picture) == (1, "")


class TestRefusals:
    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"\x89PNG\r\n\x1a\n\0\0", "it is not JSON"),
            (b"", "it is not JSON"),
            (b"[1, 2]", "it is [1, 2], and a plan is an object"),
            (b"[" * 100_000, "nested too deeply"),
            (b'{"schema_version": 99}', "schema_version=99 must be 3"),
            (b'{"schema_version": 3, "parts": [{}]}', "document is not a plan: parts[0]"),
            (
                json.dumps(PLAN.to_dict()).replace('"num_slices": 3', '"num_slices": -1').encode(),
                "num_slices=-1 is out of range",
            ),
        ],
        ids=["binary", "empty", "list", "nested", "version", "part", "field"],
    )
    def test_the_file_and_the_fault_are_named(
        self, content: bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "broken.json"
        path.write_bytes(content)
        assert main(["explain", str(path)]) == 2
        out, said = capsys.readouterr()
        assert (out, said.count("\n")) == ("", 1)
        assert said.startswith(f"kvplan: {path}")
        assert expected in said

    def test_a_missing_file_a_folder_and_a_file_that_is_too_large(
        self, plan: Path, tmp_path: Path
    ) -> None:
        missing = tmp_path / "missing.json"
        assert refused("explain", missing) == f"{missing}: No such file or directory"
        assert f"{tmp_path} is not a regular file" in refused("diff", plan, tmp_path)
        large = tmp_path / "large.json"
        with large.open("wb") as file:
            file.truncate(300 << 20)  # takes no room on the disk
        assert refused("explain", large) == (
            f"{large} has more than 128 MiB, the maximum for a plan (LLM_PARAM_INVALID)"
        )

    @pytest.mark.parametrize(
        "line",
        ["explain {}", "diff {0} {0}", "trace {}", "replay {plan} {0} {0}", "check {}"],
        ids=lambda line: line.split()[0],
    )
    def test_a_fifo_is_not_waited_for(self, line: str, plan: Path, tmp_path: Path) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        said = refused(*line.format(fifo, plan=plan).split())
        assert f"{fifo} is not a regular file" in said


class TestOutput:
    def test_a_pipe_that_closes_early_is_not_an_error(self, tmp_path: Path) -> None:
        desc = TOKENS_FIRST
        many = kvplan.plan(
            Transfer(Rows(desc, range(16)), Rows(desc, range(15, -1, -1)), coalesce=False),
            local="dst",
        )
        many.save(tmp_path / "many.json")
        shell = f"{sys.executable} -m kvplan explain {tmp_path / 'many.json'} -f table --all | :"
        done = subprocess.run(
            ["bash", "-c", f"{shell}; echo ${{PIPESTATUS[0]}}"],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.stderr == ""
        assert done.stdout in ("141\n", "0\n")  # 0: the output fitted before the pipe closed

    @pytest.mark.parametrize(
        ("command", "closed", "expected"),
        [
            ("explain", ">&-", "kvplan: stdout is closed"),
            ("explain", "<&-", "kvplan: stdin is closed"),
            ("check", "<&-", "kvplan: stdin is closed"),
            ("explain", "2>&-", ""),
        ],
    )
    def test_a_stream_that_the_shell_has_closed(
        self, command: str, closed: str, expected: str
    ) -> None:
        shell = f"{sys.executable} -m kvplan {command} - {closed}"
        done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(expected)
        assert "Traceback" not in done.stderr

    def test_a_name_in_a_file_does_not_command_the_terminal(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        evil = PLAN.to_dict()
        evil["parts"][0]["src"]["name"] = "\x1b]0;mine\x07"
        evil["parts"][0]["dst"]["name"] = "two\nlines"
        path = tmp_path / "evil.json"
        path.write_text(json.dumps(evil))
        _, out = printed(capsys, "explain", path)
        assert out.splitlines()[0].startswith("push_blocks  B2B   ?]0;mine? -> two")
        assert "\x1b" not in out
        missing = f"{tmp_path}/\x1b[2J"
        assert main(["explain", missing]) == 2
        assert "\x1b" not in capsys.readouterr().err

    def test_a_full_disk_is_reported(self, plan: Path) -> None:
        shell = f"{sys.executable} -m kvplan explain {plan} > /dev/full"
        done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (2, "kvplan: No space left on device\n")
        for option in ("--html", "--svg"):  # the error names the file
            done = command("explain", plan, option, "/dev/full")
            said = "kvplan: /dev/full: No space left on device\n"
            assert (done.returncode, done.stderr) == (2, said)

    def test_colours_are_for_terminals_and_not_with_no_color(self, plan: Path) -> None:
        assert "\x1b[" not in command("explain", plan).stdout
        assert "\x1b[" in on_a_terminal("explain", str(plan))
        assert "\x1b[" not in on_a_terminal("explain", str(plan), NO_COLOR="1")
        assert "\x1b[" not in on_a_terminal("explain", str(plan), TERM="dumb")

    def test_colours_do_not_change_the_text(self, plan: Path) -> None:
        coloured = on_a_terminal("explain", str(plan), COLUMNS="20")
        plain = "".join(part.split("m", 1)[-1] for part in coloured.split("\x1b["))
        assert plain.replace("\r\n", "\n") == PLAN.explain() + "\n"

    def test_an_encoding_without_the_letters_is_not_an_error(self, tmp_path: Path) -> None:
        named = groups("full").by_part()["full"]
        joined({"größe": named}).save(tmp_path / "named.json")
        ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
        done = command("explain", tmp_path / "named.json", **ascii_only)
        assert (done.returncode, done.stderr) == (0, "")
        assert "part gr??e" in done.stdout


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """Return the output of the command to a terminal."""
    ours, theirs = pty.openpty()
    clean = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "CI")}
    with subprocess.Popen(
        [sys.executable, "-m", "kvplan", *arguments],
        cwd=ROOT,
        env=clean | {"TERM": "xterm-256color"} | environment,
        stdout=theirs,
    ) as process:
        os.close(theirs)
        written = bytearray()
        try:
            while piece := os.read(ours, 65536):
                written += piece
        except OSError:  # a terminal reports so that its other end has closed
            pass
        os.close(ours)
    assert process.returncode == 0
    return written.decode()
