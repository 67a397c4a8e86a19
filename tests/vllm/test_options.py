"""The options of kv_connector_extra_config."""

from __future__ import annotations

from typing import Any

import pytest

from kvplan.vllm.options import ConnectorOptions
from tests.support.refusals import refused


def test_the_defaults_hold_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPLAN_EXPLAIN", raising=False)
    options = ConnectorOptions.of({})
    assert (options.mode, options.explain) == ("pull", False)
    assert options.exchange.lease_ttl_ms == 30_000


def test_time_limits_and_options_of_the_engine_are_options() -> None:
    given = {"lease_ttl_ms": 5, "engine": {"kvplan.encrypt": "1"}, "listen": "10.0.0.1:26000"}
    options = ConnectorOptions.of(given)
    assert options.exchange.lease_ttl_ms == 5
    assert options.engine == {"kvplan.encrypt": "1"}
    assert [options.listen_of(number) for number in (0, 3)] == ["10.0.0.1:26000", "10.0.0.1:26003"]
    assert ConnectorOptions().listen_of(3) == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [
        ("", ""),
        ("node-1", "node-1"),
        ("10.0.0.1:36000", "10.0.0.1:36003"),
        ("[::1]", "[::1]"),
        ("[::1]:36000", "[::1]:36003"),
    ],
)
def test_workers_behind_a_port_mapping_have_ports_in_a_row(advertise: str, expected: str) -> None:
    assert ConnectorOptions(advertise=advertise).advertised_of(3) == expected


@pytest.mark.parametrize(("text", "explain"), [("1", True), ("0", False), ("", False)])
def test_the_environment_can_set_explain(
    monkeypatch: pytest.MonkeyPatch, text: str, explain: bool
) -> None:
    monkeypatch.setenv("KVPLAN_EXPLAIN", text)
    assert ConnectorOptions.of({}).explain is explain
    assert ConnectorOptions.of({"explain": True}).explain


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"mode": "both"}, "mode='both' must be one of pull, push"),
        (
            {"lease_ttl": 5},
            "kv_connector_extra_config has 'lease_ttl'; known are advertise, ",
        ),
        ({"listen": "10.0.0.1"}, "listen='10.0.0.1' must be \"ip:port\""),
        ({"listen": "10.0.0.1:70000"}, 'must be "ip:port"'),
        ({"advertise": "0.0.0.0:26000"}, "advertise='0.0.0.0:26000' must be"),
        ({"pull_timeout_ms": 0}, "pull_timeout_ms=0 must be > 0"),
    ],
)
def test_invalid_options_are_refused(extra: dict[str, Any], match: str) -> None:
    with refused("LLM_PARAM_INVALID", match):
        ConnectorOptions.of(extra)


def test_values_of_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="explain"):
        ConnectorOptions.of({"explain": "yes"})
    with pytest.raises(TypeError, match=r"kvplan\.encrypt"):
        ConnectorOptions.of({"engine": {"kvplan.encrypt": 1}})
