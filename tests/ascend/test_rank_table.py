"""Rank tables: both ends compute the same table, from devices or from the user's resources."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvplan import LLMStatusCode
from kvplan.device import ascend
from kvplan.transport.hccl.addresses import (
    DeviceAddress,
    device_address,
    read_local_comm_res,
    table_of,
    why_not,
)
from tests.support.refusals import refused

A2 = {
    "version": "1.0",
    "server_list": [
        {"server_id": "10.0.0.1", "device": [{"device_id": "3", "device_ip": "192.168.1.3"}]}
    ],
    "status": "completed",
}
A3 = {
    "version": "1.2",
    "server_list": [
        {
            "server_id": "10.0.0.2",
            "device": [{"device_id": "1", "device_ip": "192.168.1.9", "super_device_id": "65537"}],
        }
    ],
    "super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "10.0.0.2"}]}],
    "status": "completed",
}

ips = st.ip_addresses().map(str)
numbers = st.integers(0, 15).map(str)
hosts = st.sampled_from(["10.0.0.1", "10.0.0.10", "10.0.0.2", "host-a"])


@st.composite
def addresses(draw: st.DrawFn) -> DeviceAddress:
    version = draw(st.sampled_from(["1.0", "1.2"]))
    host = draw(hosts)
    pods = {"super_device_id": draw(numbers), "super_pod_id": f"pod of {host[0]}"}
    return DeviceAddress(
        version,
        host,
        draw(numbers),
        draw(ips),
        draw(st.none() | st.integers(1, 65535).map(str)),
        **(pods if version == "1.2" else {}),
    )


def refusal(text: str) -> str:
    with refused(LLMStatusCode.LLM_PARAM_INVALID) as caught:
        read_local_comm_res(text)
    return str(caught.value)


def changed(document: dict[str, Any], path: str, value: object) -> str:
    """Return `document` as JSON with another value at `path` ("a.0.b"), or without it for None."""
    copy = json.loads(json.dumps(document))
    *steps, last = path.split(".")
    at = copy
    for step in steps:
        at = at[int(step)] if isinstance(at, list) else at[step]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return json.dumps(copy)


@given(addresses(), addresses())
def test_both_ends_compute_one_table_and_each_its_own_rank(
    here: DeviceAddress, there: DeviceAddress
) -> None:
    assume(why_not(here, there) is None)
    ours, theirs = table_of(here, there), table_of(there, here)
    assert ours.text == theirs.text
    assert (ours.rank, ours.remote_rank) == (theirs.remote_rank, theirs.rank)
    assert {ours.rank, theirs.rank} == {0, 1}


@given(addresses(), addresses())
def test_ranks_follow_the_order_of_texts_and_the_lower_version_wins(
    here: DeviceAddress, there: DeviceAddress
) -> None:
    assume(why_not(here, there) is None)
    table = json.loads(table_of(here, there).text)
    assert table["version"] == min(here.version, there.version)
    servers = table["server_list"]
    assert table["server_count"] == str(len(servers))
    assert [server["server_id"] for server in servers] == sorted({here.server_id, there.server_id})
    devices = [(server["server_id"], item) for server in servers for item in server["device"]]
    assert [item["rank_id"] for _, item in devices] == ["0", "1"]
    named = [(host, item["device_id"], item["device_ip"]) for host, item in devices]
    assert named == sorted(named)
    is_pods = table["version"] == "1.2"
    assert ("super_pod_list" in table) is is_pods
    assert all(("super_device_id" in item) is is_pods for _, item in devices)
    if is_pods:
        in_pods = [
            item["server_id"] for pod in table["super_pod_list"] for item in pod["server_list"]
        ]
        assert sorted(in_pods) == [server["server_id"] for server in servers]


@given(addresses())
def test_an_address_is_read_as_it_was_written(device_address: DeviceAddress) -> None:
    assert (
        msgspec.json.decode(msgspec.json.encode(device_address), type=DeviceAddress)
        == device_address
    )


def test_resources_of_the_user_are_read() -> None:
    a2 = read_local_comm_res(json.dumps(A2))
    assert a2 == DeviceAddress("1.0", "10.0.0.1", "3", "192.168.1.3")
    a3 = read_local_comm_res(json.dumps(A3))
    assert a3 == DeviceAddress("1.2", "10.0.0.2", "1", "192.168.1.9", None, "65537", "0")


def test_the_table_of_a_pair_has_hccls_format() -> None:
    here = read_local_comm_res(json.dumps(A2))
    there = read_local_comm_res(json.dumps(A3))
    assert json.loads(table_of(there, here).text) == {
        "version": "1.0",
        "server_count": "2",
        "server_list": [
            {
                "server_id": "10.0.0.1",
                "device": [{"device_id": "3", "device_ip": "192.168.1.3", "rank_id": "0"}],
            },
            {
                "server_id": "10.0.0.2",
                "device": [{"device_id": "1", "device_ip": "192.168.1.9", "rank_id": "1"}],
            },
        ],
        "status": "completed",
    }


def test_two_devices_of_one_host_are_one_server() -> None:
    one = DeviceAddress("1.0", "h", "10")
    two = DeviceAddress("1.0", "h", "2")
    assert json.loads(table_of(two, one).text)["server_list"] == [
        {
            "server_id": "h",
            "device": [{"device_id": "10", "rank_id": "0"}, {"device_id": "2", "rank_id": "1"}],
        }
    ]


@pytest.mark.parametrize(
    ("document", "path", "value", "reason"),
    [
        (A2, "version", "2.0", r"version is '2.0'; expected `str` matching regex '^1\\.[02]"),
        (A2, "version", None, "missing required field `version`"),
        (
            A2,
            "status",
            "initializing",
            "status is 'initializing'; expected `str` matching",
        ),
        (A2, "server_list", [], "server_list is []; expected `array` of length 1"),
        (A2, "server_list.0.server_id", "", "server_list[0].server_id is ''"),
        (A2, "server_list.0.device", {}, "server_list[0].device is {}"),
        (A2, "server_list.0.device.0.device_id", 3, "server_list[0].device[0].device_id is 3"),
        (A2, "server_list.0.device.0.device_id", "03", "device[0].device_id is '03'"),
        (A2, "server_list.0.device.0.device_ip", "1.2.3", "device[0]: device_ip is '1.2.3'"),
        (A2, "server_list.0.device.0.device_port", "0", "device[0]: device_port is '0'"),
        (A2, "server_list.0.device.0.rank_id", "0", "unknown field `rank_id`"),
        (A2, "server_count", "1", "unknown field `server_count`"),
        (A3, "super_pod_list", None, "super_pod_list"),
        (A3, "super_pod_list.0.server_list.0.server_id", "x", "it must be '10.0.0.2'"),
        (A3, "server_list.0.device.0.super_device_id", None, "super_device_id"),
        (A3, "server_list.0.device.0.super_device_id", "-1", "super_device_id is '-1'"),
    ],
)
def test_an_error_of_the_user_is_named(
    document: dict[str, Any], path: str, value: object, reason: str
) -> None:
    message = refusal(changed(document, path, value))
    assert "llm.LocalCommRes" in message
    assert reason in message


def test_text_that_is_not_json_is_refused() -> None:
    assert "cannot be decoded" in refusal("{")


def test_one_device_cannot_be_both_ends() -> None:
    device_address = DeviceAddress("1.0", "h", "0", "1.1.1.1")
    assert "give each engine a DeviceId of its own" in (
        why_not(device_address, device_address) or ""
    )


def test_two_hosts_need_the_addresses_of_both_devices() -> None:
    here, there = DeviceAddress("1.0", "a", "0", "1.1.1.1"), DeviceAddress("1.0", "b", "5")
    with refused(LLMStatusCode.LLM_LINK_FAILED, r"device_ip of the peer's device 5.*hccn.conf"):
        table_of(here, there)
    assert "of this device 5" in (why_not(there, here) or "")


def test_one_address_for_two_devices_is_refused() -> None:
    here, there = (
        DeviceAddress("1.0", "a", "0", "1.1.1.1"),
        DeviceAddress("1.0", "b", "0", "1.1.1.1"),
    )
    assert "the same device_ip" in (why_not(here, there) or "")


def test_devices_of_one_super_pod_need_no_addresses() -> None:
    here = DeviceAddress("1.2", "a", "0", super_device_id="1", super_pod_id="0")
    there = DeviceAddress("1.2", "b", "0", super_device_id="2", super_pod_id="0")
    assert json.loads(table_of(here, there).text)["super_pod_list"] == [
        {"super_pod_id": "0", "server_list": [{"server_id": "a"}, {"server_id": "b"}]}
    ]
    twice = DeviceAddress("1.2", "b", "0", super_device_id="1", super_pod_id="0")
    assert "the same super_device_id, 1" in (why_not(here, twice) or "")
    elsewhere = DeviceAddress("1.2", "b", "0", super_device_id="1", super_pod_id="1")
    assert "device_ip of this device 0 is unknown" in (why_not(here, elsewhere) or "")


def test_an_address_that_only_one_side_knows_is_used_by_neither() -> None:
    here, there = DeviceAddress("1.0", "a", "0", "1.1.1.1"), DeviceAddress("1.0", "a", "1")
    assert "device_ip" not in table_of(here, there).text


@pytest.mark.parametrize(("pod", "number"), [(-1, 7), (3, -1), (-1, -1), (0, 0)])
def test_a_device_without_a_number_in_a_super_pod_is_in_none(pod: int, number: int) -> None:
    native = SimpleNamespace(physical_id=5, attribute={405: pod, 403: number}.get)
    device: Any = SimpleNamespace(native=native, product=ascend.A3, name="Ascend910_9391")
    found = device_address(device, "")
    in_pod = (pod, number) == (0, 0)
    assert (found.version, found.device_id) == ("1.2" if in_pod else "1.0", "5")
    numbers = ("0", "0") if in_pod else (None, None)
    assert (found.super_pod_id, found.super_device_id) == numbers


@pytest.mark.parametrize("product", [ascend.A2, ascend.A3, ascend.A950, None])
def test_only_devices_of_a2_have_no_super_pod(product: ascend.Product | None) -> None:
    device: Any = SimpleNamespace(product=product, name="Ascend910B1")
    if product is ascend.A2:
        with refused("LLM_PARAM_INVALID", "version is '1.2'; it must be '1.0' for Ascend910B1"):
            device_address(device, json.dumps(A3))
    else:
        assert device_address(device, json.dumps(A3)).super_pod_id == "0"


def test_one_host_in_two_pods_is_refused() -> None:
    here = DeviceAddress("1.2", "a", "0", super_device_id="1", super_pod_id="0")
    there = DeviceAddress("1.2", "a", "1", super_device_id="2", super_pod_id="1")
    assert "two super pods" in (why_not(here, there) or "")
