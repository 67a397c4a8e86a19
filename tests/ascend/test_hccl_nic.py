"""The network port of a device: its address, and the reasons for which no link is made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.transport.hccl.addresses import DeviceAddress, device_ip_of, why_not
from tests.ascend.hccl_ends import A2, two_ends
from tests.ascend.hccl_side import DEADLINE_S, Side, link_both, on_a_host_of_its_own
from tests.ascend.hccl_sides import MakeSide
from tests.ascend.simulator import Controls, Log
from tests.support.refusals import refused

TOOL = """#!/bin/sh
# As that of the driver: "hccn_tool -i 4 -ip -g", with -inet6 for addresses of IPv6.
case "$*" in
    "-i 4 -ip -g") printf 'ipaddr:10.1.0.5\\nnetmask:255.255.0.0\\n' ;;
    "-i 6 -ip -inet6 -g") printf 'ipaddr:fd00::7\\nprefix length:64\\n' ;;
    *) echo "no ip" >&2; exit 1 ;;
esac
"""


def test_addresses_of_both_families_are_read_from_the_file(tmp_path: Path) -> None:
    conf = tmp_path / "hccn.conf"
    conf.write_text("IPv6address_1=fd00::1\naddress_1=10.1.0.1\nIPv6address_2=fd00::2\n")
    where = {"KVPLAN_HCCN_CONF": str(conf)}
    assert device_ip_of(1, where) == "10.1.0.1"
    assert device_ip_of(2, where) == "fd00::2"
    assert device_ip_of(3, where) is None


def test_the_ports_address_is_read_from_the_file(tmp_path: Path) -> None:
    conf = tmp_path / "hccn.conf"
    conf.write_text("netmask_1=255.255.0.0\naddress_1=10.1.0.1\naddress_10 = fe80::1\n")
    where = {"KVPLAN_HCCN_CONF": str(conf)}
    assert device_ip_of(1, where) == "10.1.0.1"
    assert device_ip_of(10, where) == "fe80::1"
    assert device_ip_of(2, where) is None
    assert device_ip_of(1, {"KVPLAN_HCCN_CONF": str(tmp_path / "none")}) is None
    conf.write_text("address_1=10.1\n")
    with pytest.raises(LLMException, match=r"address_1 is '10\.1'; it must be an IP address"):
        device_ip_of(1, where)


@pytest.mark.parametrize("is_in_path", [False, True])
def test_the_tool_is_used_if_the_file_is_absent(tmp_path: Path, is_in_path: bool) -> None:
    folder = tmp_path / "driver" / "tools"
    folder.mkdir(parents=True)
    (folder / "hccn_tool").write_text(TOOL)
    (folder / "hccn_tool").chmod(0o755)
    where = {"KVPLAN_HCCN_CONF": str(tmp_path / "none"), "PATH": "/usr/bin:/bin"}
    if is_in_path:
        where |= {"PATH": f"{folder}:/usr/bin:/bin", "KVPLAN_ASCEND_DRIVER": str(tmp_path)}
    else:
        where["KVPLAN_ASCEND_DRIVER"] = str(tmp_path / "driver")
    assert device_ip_of(4, where) == "10.1.0.5"
    assert device_ip_of(6, where) == "fd00::7"
    assert device_ip_of(5, where) is None


def test_addresses_of_two_families_are_refused() -> None:
    here = DeviceAddress("1.0", "a", "0", "10.1.0.1")
    there = DeviceAddress("1.0", "b", "1", "fd00::2")
    assert "10.1.0.1 and fd00::2 are an IPv4 and an IPv6 address" in (why_not(here, there) or "")


@pytest.mark.parametrize(
    ("pcie", "roce"), [("1", "1"), ("0", None), (None, "0")], ids=["both", "no pcie", "no roce"]
)
def test_variables_that_hccl_refuses_are_named(
    make_side: MakeSide, monkeypatch: pytest.MonkeyPatch, pcie: str | None, roce: str | None
) -> None:
    for name, value in (("HCCL_INTRA_PCIE_ENABLE", pcie), ("HCCL_INTRA_ROCE_ENABLE", roce)):
        if value is not None:
            monkeypatch.setenv(name, value)
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "HCCL_INTRA_PCIE_ENABLE"):
        make_side(0)


@pytest.mark.parametrize("value", ["60", "119", "7201", "2 min", "-120"])
def test_a_timeout_that_hccl_refuses_is_named(
    make_side: MakeSide, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", value)
    with refused(
        LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        rf"HCCL_CONNECT_TIMEOUT='{value}' is not in \[120, 7200\]",
    ):
        make_side(0)


@pytest.mark.parametrize("value", ["120", "7200"])
def test_a_valid_timeout_is_accepted(
    make_side: MakeSide, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", value)
    one, two = (
        make_side(number, local_comm_res=on_a_host_of_its_own(number)) for number in range(2)
    )
    assert [link.transport for link in link_both(one, two)] == ["hccl", "hccl"]


# ---- links over RDMA that HCCL refuses ----


@pytest.fixture
def sides(make_side: MakeSide) -> tuple[Side, Side]:
    one, two = (
        make_side(number, local_comm_res=on_a_host_of_its_own(number)) for number in range(2)
    )
    return one, two


@pytest.fixture
def change(simulator: Controls) -> Iterator[Any]:
    """A function that changes a setting for a test."""
    before = {"device_ips": "", "tls": 0, "max_links": 512}
    yield simulator.set
    for name, value in before.items():
        simulator.set(name, value)


def why_not_linked(one: Side, two: Side) -> str:
    with refused(LLMStatusCode.LLM_LINK_FAILED) as error:
        link_both(one, two, timeout_ms=1000)
    return str(error.value)


def test_an_address_that_the_device_has_lost_is_named(
    sides: tuple[Side, Side], change: Any
) -> None:
    change("device_ips", "10.9.0.1,10.1.0.2")
    message = why_not_linked(*sides)
    assert "is 10.1.0.1 still the address of device 0 (physical 0)?" in message
    assert "hccn_tool -i 0 -ip -g" in message
    change("device_ips", "10.1.0.1,10.1.0.2")
    link_both(*sides)


def test_a_port_in_use_is_named(sides: tuple[Side, Side], sim_folder: Path) -> None:
    with two_ends(sim_folder, A2) as others:
        connection = others.connect(4096)
        message = why_not_linked(*sides)
        assert "port 16666 of device" in message
        assert "device_port of its own" in message
        assert "HCCL_NPU_SOCKET_PORT_RANGE=auto" in message
        connection.close()
    link_both(*sides)


def test_encryption_at_only_one_end_is_named(sides: tuple[Side, Side], change: Any) -> None:
    change("tls", 1)
    assert "TLS is on at only one end (`hccn_tool -i" in why_not_linked(*sides)
    change("tls", 3)
    link_both(*sides)


def test_exhausted_queue_pairs_are_named(sides: tuple[Side, Side], change: Any) -> None:
    first = link_both(*sides)
    change("max_links", 1)
    message = why_not_linked(*sides)
    assert "has 1 connection" in message
    assert "512" in message
    change("max_links", 512)
    link_both(*sides, session=b"another")
    del first


def test_connections_are_limited_by_queue_pairs(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, sim_log: Log
) -> None:
    """The refusal comes before any call of HCCL, and the message names the remedy."""
    first = link_both(*sides)
    monkeypatch.setattr("kvplan.transport.hccl.device.MAX_LINKS", 1)
    sim_log.restart()
    message = why_not_linked(*sides)
    assert re.search(r"device \d has 1 connections of this engine, of at most 1 ", message)
    assert "unlink peers first" in message
    assert sim_log.calls("HcclCommInitClusterInfoMemConfig") == []
    for item in first:
        item.close()
    for side in sides:
        assert side.transport._background.wait(DEADLINE_S)
    link_both(*sides, session=b"another")
