"""Options for UCX, and the settings that follow from them; none of it loads the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvplan import LLMStatusCode, Options
from kvplan.transport.ucx import library
from kvplan.transport.ucx.library import why_no_rdma
from tests.support.refusals import refused

BAD_OPTIONS: dict[tuple[str, Any], str] = {
    ("ucx_devices", "eth0;rm"): "must be names of devices, separated by commas",
    ("ucx_devices", "eth0,,eth1"): "must be names of devices",
    ("ucx_settings", "{"): "is not JSON",
    ("ucx_settings", "[]"): "must be a JSON object of at most 256 settings",
    ("ucx_settings", '{"TLS": "tcp"}'): "has the key 'TLS'; it must be like \"UCX_TLS\"",
    ("ucx_settings", '{"UCX_TLS": 1}'): "UCX_TLS=1; it must be text",
    ("ucx_settings", '{"UCX_TLS": "a\\u0000"}'): "printable",
}


@pytest.mark.parametrize(("field", "value"), BAD_OPTIONS)
def test_an_impossible_option_is_refused(field: str, value: str) -> None:
    with refused(LLMStatusCode.LLM_PARAM_INVALID, BAD_OPTIONS[field, value]):
        Options(**{field: value})


def test_options_are_parsed_from_text() -> None:
    given = {
        "kvplan.ucx_devices": "mlx5_0:1,mlx5_1:1",
        "kvplan.ucx_settings": '{"UCX_TLS": "rc"}',
    }
    options = Options.of(given)
    assert options.ucx_devices == given["kvplan.ucx_devices"]
    assert options.ucx_settings == given["kvplan.ucx_settings"]


def test_the_missing_parts_of_rdma_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices, found = tmp_path / "infiniband", tmp_path / "lib" / "libucp.so.0"
    monkeypatch.setattr(library, "_RDMA", devices)
    assert "no RDMA device" in why_no_rdma(str(found))
    port = devices / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    assert "no port of an RDMA device is active" in why_no_rdma(str(found))
    (port / "state").write_text("4: ACTIVE\n")
    assert "built without verbs" in why_no_rdma(str(found))
    assert why_no_rdma("") == ""
    verbs = found.parent / "ucx" / "libuct_ib.so.0"
    verbs.parent.mkdir(parents=True)
    verbs.touch()
    assert why_no_rdma(str(found)) == ""
