"""link(comm_name, ..., rank_table): members on several hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import numpy as np
import pytest

from kvplan.links import RegisterMemStatus
from kvplan.links.rendezvous import Location, locate
from tests.links.end import End, settle
from tests.support.refusals import refused

MakeEnd = Callable[..., End]
OK = RegisterMemStatus.OK


def test_across_hosts_by_the_rank_table(make_end: MakeEnd, comm_dir: str) -> None:
    # Addresses of this host that no other process uses.
    high, middle, low = os.getpid().to_bytes(3, "big")
    one, other = (f"127.{first + high}.{middle}.{low}" for first in (1, 128))
    hosts = {one: [("0", "0"), ("1", "1")], other: [("0", "2")]}
    table = json.dumps(
        {
            "version": "1.2",
            "server_list": [
                {
                    "server_id": host,
                    "device": [{"device_id": device, "rank_id": rank} for device, rank in devices],
                }
                for host, devices in hosts.items()
            ],
        }
    )
    ends = [make_end(i, listen="", comm_dir=comm_dir) for i in (1, 2, 3)]
    ids = [end.links.comm_link("hosts", {1: 0, 2: 1, 3: 2}, table) for end in ends]
    assert [settle(end, comm_id) for end, comm_id in zip(ends, ids, strict=True)] == [OK] * 3
    address = {state.cluster_id: state.address for state in ends[2].links.status()}
    assert address == {1: f"{one}:26900", 2: f"{one}:26901"}
    assert ends[1].status(1).address.startswith("ipc://")


def test_a_port_that_two_communicators_share_is_open_as_long_as_one_of_them(
    make_end: MakeEnd, comm_dir: str
) -> None:
    high, middle, low = os.getpid().to_bytes(3, "big")
    hosts = [f"127.{first + high}.{middle}.{low}" for first in (1, 128)]
    servers = [
        {"server_id": host, "device": [{"device_id": "3", "rank_id": rank}]}
        for host, rank in zip(hosts, "01", strict=True)
    ]
    table = json.dumps({"version": "1.2", "server_list": servers})
    one, two, three = (
        make_end(i, listen="", comm_dir=comm_dir, link_total_time=5) for i in (1, 2, 3)
    )
    first, second = (
        one.links.comm_link(name, {1: 0, other: 1}, table) for name, other in (("a", 2), ("b", 3))
    )
    assert settle(two, two.links.comm_link("a", {1: 0, 2: 1}, table)) is OK
    assert settle(one, first) is OK
    one.links.comm_unlink(first)
    assert settle(three, three.links.comm_link("b", {1: 0, 3: 1}, table)) is OK
    assert settle(one, second) is OK
    assert three.status(1).address == f"{hosts[0]}:26903"
    one.links.comm_unlink(second)
    third = one.links.comm_link("a", {1: 0, 2: 1}, table)  # the port is free again for the next one
    two.links.comm_unlink(1)
    assert settle(two, two.links.comm_link("a", {1: 0, 2: 1}, table)) is OK
    assert settle(one, third) is OK


def test_waiting_for_other_hosts_without_a_key_warns(make_end: MakeEnd) -> None:
    server = {"server_id": "0.0.0.0", "device": [{"rank_id": "0"}]}
    other = {"server_id": "10.0.0.1", "device": [{"rank_id": "1"}]}
    table = json.dumps({"version": "1.2", "server_list": [server, other]})
    end = make_end(1, listen="", comm_port=0)
    with pytest.warns(RuntimeWarning, match="0.0.0.0.*without a cluster key"):
        comm_id = end.links.comm_link("hosts", {1: 0, 2: 1}, table)
    end.links.comm_unlink(comm_id)
    caller = make_end(2, listen="")
    caller.links.comm_unlink(caller.links.comm_link("hosts", {1: 1, 2: 1}, table))


def test_version_1_0_of_a_rank_table() -> None:
    table = {
        "version": "1.0",
        "server_count": "1",
        "status": "completed",
        "server_list": [
            {
                "server_id": "10.0.0.1",
                "device": [{"device_id": "3", "device_ip": "10.1.0.1", "rank_id": "7"}],
            }
        ],
    }
    assert locate(json.dumps(table), {7}) == {7: Location("10.0.0.1", 3)}
    assert locate(np.str_(json.dumps(table)), {7}) == {7: Location("10.0.0.1", 3)}
    assert locate("", {0, 1}) == {0: Location(), 1: Location()}


def test_a_server_is_at_its_host_ip() -> None:
    servers = [
        {"server_id": name, "host_ip": f"10.0.0.{name}", "device": [{"rank_id": rank}]}
        for name, rank in (("1", "0"), ("2", "1"))
    ]
    table = {"version": "1.2", "server_list": servers}
    assert locate(json.dumps(table), {0, 1}) == {0: Location("10.0.0.1"), 1: Location("10.0.0.2")}


def test_a_port_of_a_rank_table_above_65535_is_refused(make_end: MakeEnd) -> None:
    """Port 65535 is accepted. Of two clusters on different hosts only the lower one uses a port."""
    servers = [
        {
            "server_id": "127.0.0.1",
            "device": [{"rank_id": "0"}, {"rank_id": "2", "device_id": "4"}],
        },
        {"server_id": "127.0.0.2", "device": [{"rank_id": "1", "device_id": "4"}]},
    ]
    table = json.dumps({"version": "1.2", "server_list": servers})
    high = make_end(2, listen="", comm_port=65532)
    refusal = (
        r"rank_table: device_id=4 is out of range \[0, 3\]: members on other hosts meet at port "
        r"comm_port=65532 \+ device_id"
    )
    for members in ({1: 1, 2: 2}, {1: 0, 2: 1, 3: 2}):
        with refused("LLM_PARAM_INVALID", refusal):
            high.links.comm_link("name", members, table)
    for members in ({1: 0, 2: 2}, {1: 0, 2: 1}):
        high.links.comm_unlink(high.links.comm_link("name", members, table))
    lower = make_end(4, listen="", comm_port=65531)
    lower.links.comm_unlink(lower.links.comm_link("name", {1: 1, 4: 2}, table))
