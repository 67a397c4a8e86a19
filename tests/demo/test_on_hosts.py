"""Tests of the demo on two hosts: the cache crosses a network, and the tokens are the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.disaggregated import __main__ as demo
from examples.disaggregated.hosts import TWO_HOSTS
from tests.demo.test_demo import run
from tests.demo.test_on_device import PROMPT, SHORT
from tools.namespaces import NamespacesError, refusal


@pytest.mark.usefixtures("tiny_model")
def test_the_demo_between_two_hosts(tmp_path: Path) -> None:
    if reason := refusal():
        pytest.skip(reason)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT)
    done = run("--hosts=2", f"--prompt={prompt}", *SHORT)
    assert done.stderr == ""  # asserted first, so that a failure shows all of stderr
    assert done.returncode == 0
    assert f"== {TWO_HOSTS} ==" in done.stdout
    assert re.search(r"prefill: listening on 10\.77\.0\.1:\d+\n", done.stdout)
    assert "decode: linked over tcp: " in done.stdout
    for how in ("pulled", "pushed", "pushed layer by layer", "gathered"):
        assert re.search(rf"IDENTICAL: all \d+ token ids .* was {how} ", done.stdout)
    assert done.stdout.count("CHANGED: from token") == 2


def test_the_demo_explains_why_it_cannot_make_two_hosts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_count: int) -> None:
        raise NamespacesError("no program ip: apt install iproute2")

    monkeypatch.setattr("sys.argv", ["demo", "--hosts=2"])
    monkeypatch.setattr(demo, "check_installed", lambda: None)
    monkeypatch.setattr("tools.namespaces.namespaces", refuse)
    assert demo.main() == 2
    error = capsys.readouterr().err
    assert error == "cannot start: two hosts cannot be made: no program ip: apt install iproute2\n"


def test_two_hosts_with_a_device_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.arguments(["--hosts=2", "--device=simulated"])
    assert stop.value.code == 2
    assert "--hosts 2 has its KV caches in host memory" in capsys.readouterr().err
