"""Costs of this machine in a file: stored at once, read on request, checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvplan
from kvplan import TRANSPORT_COSTS, CostLine, LLMException, Rows, Transfer, TransportCost
from kvplan.inspection.measured_costs import costs_path, load_costs, save_costs, this_machine

MINE = TransportCost(name="local", way="mapped", lines=(CostLine(fixed_us=7, mib_us=3),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvplan/costs.json"


def test_what_is_stored_comes_back(path: Path) -> None:
    assert load_costs(path) is None
    stored = save_costs({"local": MINE, "tcp": TRANSPORT_COSTS["tcp"]}, path)
    assert load_costs(path) == stored
    assert stored.machine == this_machine()
    assert dict(stored.costs) == {"local": MINE, "tcp": TRANSPORT_COSTS["tcp"]}


def test_other_machines_and_other_transports_stay(path: Path) -> None:
    save_costs({"tcp": TRANSPORT_COSTS["tcp"]}, path)
    document = json.loads(path.read_text())
    document["machines"]["another, 4 cores"] = {"of": "a later version"}
    path.write_text(json.dumps(document))
    assert set(save_costs({"local": MINE}, path).costs) == {"local", "tcp"}
    assert json.loads(path.read_text())["machines"]["another, 4 cores"] == {"of": "a later version"}


def test_a_file_of_another_machine_is_none_of_this(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"schema_version": 1, "machines": {"another, 4 cores": {}}}')
    assert load_costs(path) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\0", "Expecting value"),
        ("[]", "must be dict"),
        ('{"schema_version": 2}', "schema_version=2 must be 1"),
        ('{"schema_version": 1}', "machines=None must be dict"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_another_file_is_refused_with_what_to_do(path: Path, text: str, expected: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    for call in (load_costs, lambda it: save_costs({"local": MINE}, it)):
        with pytest.raises(LLMException, match="kvplan tune` makes another") as raised:
            call(path)
        assert str(path) in str(raised.value)
        assert expected in str(raised.value)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "entry",
    [
        [],
        {"measured": "x"},
        {"measured": 3, "costs": {}},
        {"measured": "x", "costs": {"local": {"lines": []}}},
        {"measured": "x", "costs": {"local": {"name": "local", "way": "x", "lines": [{"a": 1}]}}},
        {"measured": "x", "costs": {"local": {"name": 1, "way": "x", "lines": []}}},
    ],
)
def test_an_entry_that_is_no_costs_is_refused(path: Path, entry: Any) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps({"schema_version": 1, "machines": {this_machine(): entry}}))
    with pytest.raises(LLMException, match=r"machines\["):
        load_costs(path)


def test_nothing_is_left_where_it_cannot_be_replaced(path: Path) -> None:
    path.mkdir(parents=True)  # a folder where the file should be
    with pytest.raises(LLMException, match="it is not a regular file"):
        save_costs({"local": MINE}, path)
    assert [it.name for it in path.parent.iterdir()] == ["costs.json"]


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/where/caches/are")
    assert costs_path() == Path("/where/caches/are/kvplan/costs.json")
    for unset in ("", "not/absolute"):  # as the specification of XDG says
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        monkeypatch.setenv("HOME", "/home/of")
        assert costs_path() == Path("/home/of/.cache/kvplan/costs.json")


def test_they_can_be_given_to_any_estimate(path: Path) -> None:
    desc = kvplan.CacheDesc(2, (8, 1024), kvplan.DataType.DT_UINT8)
    plan = kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [2])), local="dst")
    save_costs({"local": MINE}, path)
    found = kvplan.load_costs(path)
    assert found is not None
    # 7 us, and 3 us a MiB of the 2 KiB.
    assert plan.estimate(found.costs["local"]).ms == pytest.approx(0.007 + 0.003 * 2 / 1024)
