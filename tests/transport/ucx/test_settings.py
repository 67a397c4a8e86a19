"""What the user may say of UCX, and what comes of it; none of it loads the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvplan import LLMException, LLMStatusCode, Options
from kvplan.transport.ucx import interfaces, modes
from kvplan.transport.ucx.settings import settings_of

BAD_OPTIONS: dict[tuple[str, Any], str] = {
    (
        "ucx_mode",
        "rdma",
    ): r"ucx_mode \(kvplan.ucx_mode\)='rdma' must be one of auto, gathered, one_",
    ("ucx_devices", "eth0;rm"): "must be names of devices with commas between",
    ("ucx_devices", "eth0,,eth1"): "must be names of devices",
    ("ucx_settings", "{"): "is no JSON",
    ("ucx_settings", "[]"): "must be a JSON object of at most 256 settings",
    ("ucx_settings", '{"TLS": "tcp"}'): "has the key 'TLS'; it must be like \"UCX_TLS\"",
    ("ucx_settings", '{"UCX_TLS": 1}'): "UCX_TLS=1; it must be text",
    ("ucx_settings", '{"UCX_TLS": "a\\u0000"}'): "printable",
}


@pytest.mark.parametrize(("field", "value"), BAD_OPTIONS)
def test_an_option_that_cannot_be(field: str, value: str) -> None:
    with pytest.raises(LLMException, match=BAD_OPTIONS[field, value]) as refused:
        Options(**{field: value})
    assert refused.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


def test_options_are_read_from_text_of_the_interface() -> None:
    given = {
        "kvplan.ucx_mode": "gathered",
        "kvplan.ucx_devices": "eth0,mlx5_0:1",
        "kvplan.ucx_settings": '{"UCX_TLS": "tcp"}',
    }
    options = Options.of(given)
    assert (options.ucx_mode, options.ucx_devices) == ("gathered", "eth0,mlx5_0:1")
    assert options.ucx_settings == given["kvplan.ucx_settings"]


@pytest.fixture
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


@pytest.mark.usefixtures("no_variable")
def test_what_is_set_and_who_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplan.transport.ucx.settings.usable_interfaces", lambda: ["eth0", "ib0"])
    assert settings_of("gathered", "", {}) == {"NET_DEVICES": "eth0,ib0"}
    assert settings_of("one_sided", "", {}) == {}
    assert settings_of("gathered", "eth1", {}) == {"NET_DEVICES": "eth1"}
    last = {"UCX_NET_DEVICES": "eth2", "UCX_TLS": "tcp"}
    assert settings_of("gathered", "eth1", last) == {"NET_DEVICES": "eth2", "TLS": "tcp"}
    monkeypatch.setenv("UCX_NET_DEVICES", "eth3")
    assert settings_of("gathered", "", {}) == {}


def test_the_loopback_is_used_only_where_there_is_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    up, running, loopback = 1, 0x40, 8
    flags = {"lo": up | running | loopback, "eth0": up | running, "eth1": up, "none": up | running}
    there = {"lo": 1}
    monkeypatch.setattr(interfaces.socket, "if_nameindex", lambda: enumerate(there, 1))
    monkeypatch.setattr(interfaces, "_flags", lambda asking, name: flags[name])
    monkeypatch.setattr(interfaces, "_has_inet", lambda asking, name: name != "none")
    monkeypatch.setattr(interfaces, "_with_inet6", set)
    assert interfaces.usable_interfaces() == ["lo"]
    there |= {"eth1": 2, "none": 3}
    assert interfaces.usable_interfaces() == ["lo"]
    there |= {"eth0": 4}
    assert interfaces.usable_interfaces() == ["eth0"]


def test_the_mode_follows_the_fabric(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    devices, library = tmp_path / "infiniband", tmp_path / "lib" / "libucp.so.0"
    monkeypatch.setattr(modes, "_RDMA", devices)
    assert modes.choose_mode("one_sided", "") == "one_sided"
    assert modes.choose_mode("auto", str(library)) == "gathered"
    assert "no RDMA device" in modes.why_no_rdma(str(library))
    port = devices / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    assert "no port of an RDMA device is active" in modes.why_no_rdma(str(library))
    (port / "state").write_text("4: ACTIVE\n")
    assert "built without verbs" in modes.why_no_rdma(str(library))
    verbs = library.parent / "ucx" / "libuct_ib.so.0"
    verbs.parent.mkdir(parents=True)
    verbs.touch()
    assert modes.why_no_rdma(str(library)) == ""
    assert modes.choose_mode("auto", str(library)) == "one_sided"
    assert modes.choose_mode("gathered", str(library)) == "gathered"
