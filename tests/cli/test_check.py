"""`kvplan check`, of plans and of placements of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan import load_plan
from kvplan.cli import main
from tests.cli.running import command, push, refused
from tests.planning.placements import manifest


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    code = main([*map(str, arguments)])
    said = capsys.readouterr()
    assert said.err == ""
    return code, said.out


def written(folder: Path, name: str, document: dict[str, Any]) -> Path:
    path = folder / name
    path.write_text(json.dumps(document))
    return path


def test_a_valid_plan_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "plan.json", push([7, 8, 2]).to_dict())
    code, out = printed(capsys, "check", path)
    assert code == 0
    assert out.startswith(f"{path}: a plan: <Plan push_blocks B2B L0-1 x 3 blocks: 8 desc")
    code, out = printed(capsys, "check", path, "--json")
    assert (code, json.loads(out)["valid"], json.loads(out)["document"]) == (0, True, "plan")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_slices", -1, "parts[0]: num_slices=-1 is out of range [0, 9223372036854775807]"),
        ("kind", "B2C", "parts[0]: kind='B2C' must be one of ['C2C', 'C2B', 'B2B']"),
        ("dst_tensors", [0, 5], "dst_tensors=range(0, 5) must be a non-empty range"),
    ],
)
def test_a_plan_is_refused_by_field_value_and_range(
    field: str, value: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = push([7, 8, 2]).to_dict()
    document["parts"][0][field] = value
    path = written(tmp_path, "plan.json", document)
    code, out = printed(capsys, "check", path)
    assert code == 1
    assert out.startswith(f"{path}: document is not a plan: ")
    assert message in out
    code, out = printed(capsys, "check", path, "--json")
    assert (code, json.loads(out)["valid"]) == (1, False)
    assert message in json.loads(out)["error"]


def test_json_that_is_nested_too_deeply_is_not_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("[" * 100_000 + "]" * 100_000)
    code, out = printed(capsys, "check", path)
    assert code == 1
    assert out == f"{path} is not a plan: it is nested too deeply\n"


def test_bytes_written_twice_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = push([7, 8, 2]).to_dict()
    segments = document["parts"][0]["segments"]
    segments["dst_offsets"][1] = segments["dst_offsets"][0]
    code, out = printed(capsys, "check", written(tmp_path, "plan.json", document))
    assert code == 1
    assert "segments 0 and 1 write the same destination bytes" in out


def test_a_reshard_is_planned_and_each_byte_written_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path, "tp4.json", manifest(4))
    target = written(tmp_path, "tp2.json", manifest(2, pp=2))
    code, out = printed(capsys, "check", target, "--from", source, "--save", tmp_path / "plans")
    assert code == 0
    assert out.splitlines()[:3] == [
        f"{target}: weights of model, generation 1: 7 tensors on 4 participants, each covered",
        f"{source}: weights of model, generation 1: 7 tensors on 4 participants, each covered",
        "d0-p0-t0: 2.3 KiB in 21 copies from d0-p0-t0, d0-p0-t1; each byte is written once",
    ]
    plan = load_plan(tmp_path / "plans/d0-p1-t1.json")
    assert {part.source for part in plan.parts} == {2, 3}
    code, out = printed(capsys, "check", target, "--from", source, "--json")
    assert json.loads(out)["participants"]["d0-p1-t1"]["fingerprint"] == plan.fingerprint


def test_each_participant_has_a_plan_of_its_own_whatever_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = json.dumps(manifest(2)).replace("d0-p0-t0", "host/0").replace("d0-p0-t1", "host:0")
    source, target = written(tmp_path, "tp4.json", manifest(4)), tmp_path / "tp2.json"
    target.write_text(names)
    code, _ = printed(capsys, "check", target, "--from", source, "--save", tmp_path / "plans")
    assert code == 0
    found = {path.name: load_plan(path) for path in (tmp_path / "plans").iterdir()}
    assert found.keys() == {"host%2F0.json", "host%3A0.json"}
    assert found["host%2F0.json"] != found["host%3A0.json"]


def test_a_placement_without_some_elements_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = manifest(4)
    del document["parts"][3]["fragments"][0]
    path = written(tmp_path, "tp4.json", document)
    code, out = printed(capsys, "check", path)
    assert code == 1
    assert "tensor 'embed.weight': fragments" in out
    assert "hold 384 of its 512 elements" in out


def test_a_plan_or_a_placement_is_checked_from_stdin() -> None:
    done = command("check", "-", stdin=json.dumps(push([7, 8, 2]).to_dict()))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("-: a plan: <Plan push_blocks ")
    done = command("check", "-", "--json", stdin=json.dumps(manifest(4)))
    found = json.loads(done.stdout)
    assert (done.returncode, found["valid"], found["document"]) == (0, True, "weights")
    assert found["participants"] == 4
    empty = command("check", "-")
    assert (empty.returncode, empty.stderr) == (1, "")
    assert empty.stdout.startswith("- is not a plan: ")


def test_unreadable_input_exits_with_2(tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    assert refused("check", missing) == f"{missing}: No such file or directory"
    path = written(tmp_path, "plan.json", push([7, 8, 2]).to_dict())
    assert "--save needs --from" in refused_usage("check", path, "--save", tmp_path)
    assert "Missing argument" in refused_usage("check")


def refused_usage(*arguments: str | Path) -> str:
    done = command(*arguments)
    assert done.returncode == 2
    return done.stderr


def test_check_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = printed(capsys, "check", "--schema")
    assert (code, json.loads(out)["$id"]) == (0, "urn:kvplan:plan:3")
