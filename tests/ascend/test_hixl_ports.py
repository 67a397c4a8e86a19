"""HIXL's client/server mode: the option that selects it, and the ports that two ends use."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from kvplan import LLMStatusCode
from kvplan.transport.hccl.addresses import DeviceAddress
from kvplan.transport.hccl.metadata import Metadata
from kvplan.transport.hccl.ports import (
    Port,
    ServerAddress,
    match,
    packed_pair,
    requested,
    why_unreachable,
)
from tests.ascend.hccl_side import Side
from tests.ascend.hccl_sides import MakeSide
from tests.ascend.hixl_side import ADDRESS, resources
from tests.support.refusals import refused

EID = "00000000007f0200001000000df14900"


def eid(number: int) -> str:
    return f"{EID}{number:x}"[-32:]


def at(*ports: Port, network: str = "superpod1_1") -> ServerAddress:
    return ServerAddress("10.0.0.1", 26000, network, ports)


def bus(number: int, protocol: Any = "ub_ctp", **more: str) -> Port:
    return Port(protocol, eid(number), "device", **more)


ROCE = [Port("roce", f"10.1.0.{number}", "device") for number in (1, 2)]
UBOE = [Port("uboe", f"10.3.0.{number}", "device") for number in (1, 2)]
HCCS = [Port("hccs", str(number), "device") for number in (0, 1)]


@pytest.mark.parametrize(
    ("here", "there", "protocol"),
    [
        ([bus(1)], [bus(2)], "ub_ctp"),
        ([ROCE[0], UBOE[0], HCCS[0], bus(1)], [ROCE[1], UBOE[1], HCCS[1], bus(2)], "ub_ctp"),
        ([ROCE[0], UBOE[0], HCCS[0]], [ROCE[1], UBOE[1], HCCS[1]], "hccs"),
        ([ROCE[0], UBOE[0]], [ROCE[1], UBOE[1]], "uboe"),
        ([ROCE[0], UBOE[0]], [ROCE[1]], "roce"),
        ([bus(1, plane="a")], [bus(2, plane="b")], None),
        ([bus(1)], [bus(2, "ub_tp")], None),
        ([bus(1)], [bus(2, dst_eid=eid(3))], None),
        ([bus(1)], [bus(2, dst_eid=eid(1))], "ub_ctp"),
        ([bus(10)], [bus(2, dst_eid=f"0x{eid(10).upper()}")], "ub_ctp"),
        ([bus(1)], [bus(1)], None),  # its own port
        ([ROCE[0]], [UBOE[0]], None),
    ],
)
def test_ports_of_one_network_are_paired(
    here: list[Port], there: list[Port], protocol: str | None
) -> None:
    found = match(at(*here), at(*there))
    assert (found and found[0].protocol) == protocol
    assert (why_unreachable(at(*here), at(*there)) is None) is (found is not None)


def test_buses_and_hccs_end_with_the_network() -> None:
    here, there = [bus(1), HCCS[0], ROCE[0]], at(bus(2), HCCS[1], ROCE[1], network="superpod2_1")
    assert match(at(*here), there) == (ROCE[0], ROCE[1])
    reason = why_unreachable(at(*here[:2]), there)
    assert reason is not None
    assert "'superpod1_1'" in reason
    assert "'superpod2_1'" in reason


def test_a_direct_port_is_preferred() -> None:
    direct = bus(2, dst_eid=eid(4))
    found = match(at(bus(1), direct), at(bus(3), bus(4, dst_eid=eid(2))))
    assert found is not None
    assert found[0] == direct


def test_structs_have_the_vendors_layout() -> None:
    """The struct EndpointDesc has protocol, kind and bytes of the address, place, four numbers."""
    device = DeviceAddress("1.2", "host", "5", super_device_id="77", super_pod_id="3")
    own, peer = (device, at(bus(1), HCCS[0])), (device, at(bus(2), HCCS[1]))
    local, remote, protocol = packed_pair(own, peer)
    assert protocol == "ub_ctp"
    expected = struct.pack("<ii16s20xiIIII96x", 4, 3, bytes.fromhex(eid(1)), 0, 5, 0, 0, 0)
    assert local == expected
    assert remote[8:24] == bytes.fromhex(eid(2))
    local, _, _ = packed_pair((device, at(HCCS[0])), (device, at(HCCS[1])))
    assert struct.unpack_from("<iiI32xiIIII", local) == (0, 2, 0, 0, 5, 77, 0, 3)
    local, _, _ = packed_pair((device, at(ROCE[0])), (device, at(ROCE[1])))
    assert struct.unpack_from("<ii4B", local) == (1, 0, 10, 1, 0, 1)


UB_PORT = {"protocol": "ub_ctp", "comm_id": eid(1), "placement": "device"}
UB = {"protocol": "ub_ctp", "comm_id": "12", "placement": "device"}


@pytest.mark.parametrize(
    ("changes", "address", "status", "reason"),
    [
        ({"endpoint_list": [UB]}, ADDRESS, "PARAM_INVALID", "32 hexadecimal digits"),
        ({"endpoint_list": [UB | {"protocol": "roce"}]}, ADDRESS, "PARAM_INVALID", "IP address"),
        ({"endpoint_list": [UB | {"protocol": "tcp"}]}, ADDRESS, "PARAM_INVALID", "protocol"),
        ({"endpoint_list": [UB | {"placement": "nic"}]}, ADDRESS, "PARAM_INVALID", "placement"),
        ({"endpoint_list": []}, ADDRESS, "FEATURE_NOT_ENABLED", "kvplan does not generate them"),
        ({"net_instance_id": ""}, ADDRESS, "PARAM_INVALID", "net_instance_id is ''"),
        ({}, "", "FEATURE_NOT_ENABLED", "give kvplan.hixl_address"),
        ({}, "0.0.0.0", "PARAM_INVALID", "that peers connect to"),
        ({}, ADDRESS, "FEATURE_NOT_ENABLED", "no HIXL library: "),
    ],
)
def test_invalid_options_are_refused(
    make_side: MakeSide, changes: dict[str, Any], address: str, status: str, reason: str
) -> None:
    """The options are checked in this order. The simulated CANN of this process is 8.5."""
    with refused(LLMStatusCode[f"LLM_{status}"]) as error:
        make_side(0, local_comm_res=resources(0, **changes), hixl_address=address)
    assert reason in str(error.value)


@pytest.mark.parametrize("given", ["", "{", "[]", '{"version": "1.2"}', '{"version": 1.3}'])
def test_other_versions_do_not_select_the_mode(given: str) -> None:
    assert requested(given, "") is None
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "only with llm.LocalCommRes of version 1.3"):
        requested(given, ADDRESS)


def test_numbers_of_a_device_may_be_listed() -> None:
    """The vendor's parser reads the numbers; kvplan asks the driver."""
    numbers = {"phy_device_id": 3, "super_device_id": 4, "super_pod_id": 0}
    given = requested(resources(0, endpoint_list=[UB_PORT | {"device_info": numbers}]), ADDRESS)
    assert given is not None
    assert given.ports == (bus(1),)


@pytest.mark.parametrize("count", [64, 65])
def test_peers_accept_as_many_ports_as_the_option(count: int) -> None:
    ports = [UB_PORT | {"comm_id": eid(number)} for number in range(count)]
    if count > 64:
        with refused(LLMStatusCode.LLM_PARAM_INVALID, "lists 65 ports of devices; at most 64"):
            requested(resources(0, endpoint_list=ports), ADDRESS)
        return
    given = requested(resources(0, endpoint_list=ports), ADDRESS)
    assert given is not None
    packed = msgspec.msgpack.encode(at(*given.ports))
    assert msgspec.msgpack.decode(packed, type=ServerAddress) == at(*given.ports)


@pytest.mark.parametrize("pod", ["x234567890", "-000000001", "4294967296"])
def test_a_super_pod_of_a_peer_must_be_a_number(one: Side, pod: str) -> None:
    """HIXL's struct has room for 4 bytes; rank tables of HCCL have any text."""
    theirs = Metadata.from_bytes(one.transport.metadata())
    device = msgspec.structs.replace(
        theirs.device, version="1.2", super_device_id="1", super_pod_id="0123456789"
    )
    for server, is_valid in ((None, True), (at(ROCE[0]), False)):
        blob = msgspec.structs.replace(theirs, device=device, server=server).to_bytes()
        blob = blob.replace(b"0123456789", pod.encode())
        if is_valid:
            assert Metadata.from_bytes(blob).device.super_pod_id == pod
            continue
        with refused(LLMStatusCode.LLM_PARAM_INVALID, f"super_pod_id is {pod}"):
            Metadata.from_bytes(blob)


def test_rules_of_hccls_environment_do_not_apply(
    make_side: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "1")
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "no HIXL library: "):
        make_side(0, local_comm_res=resources(0), hixl_address=ADDRESS)


def test_only_one_end_uses_hixl(one: Side) -> None:
    theirs = Metadata.from_bytes(one.transport.metadata())
    metadata = msgspec.structs.replace(theirs, server=at(bus(1))).to_bytes()
    assert "only the peer uses HIXL's" in (one.transport.refusal(metadata) or "")
