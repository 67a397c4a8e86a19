"""Routes of transfers: the transport that `auto` chooses, interfaces and ports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.across import network
from tests.across.conftest import MakeEngine
from tests.across.engine import NBYTES, OWN_PROCESSES, Engine
from tools.namespaces import Namespace

SECOND = "eth1"


def check_pull(peer: Engine, user: Engine) -> None:
    peer.hold(seed=1)
    user.hold(seed=None)
    user.link(peer)
    outcome = user.move("pull", peer)
    assert outcome.status == "LLM_SUCCESS", outcome
    user.check(seed=1)


def transport(user: Engine, peer: Engine) -> str:
    return str(user.run(f"result = link_of(holder.datadist, {peer.cluster_id}).transport"))


@pytest.mark.parametrize(
    ("before", "expected"), [((), "local"), (OWN_PROCESSES, "tcp")], ids=["one host", "two hosts"]
)
def test_auto_is_local_only_if_the_peer_is_reachable_locally(
    hosts: list[Namespace], make_engine: MakeEngine, before: tuple[str, ...], expected: str
) -> None:
    peer, user = (
        make_engine(host, number, *before, transport="auto") for number, host in enumerate(hosts, 1)
    )
    before_it = network.received(hosts[1])
    check_pull(peer, user)
    assert transport(user, peer) == expected
    assert (network.received(hosts[1]) - before_it > NBYTES) == (expected == "tcp")


RELAY = """
import socket, sys, threading

def copied(source, target):
    while data := source.recv(1 << 16):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)

listening = socket.create_server((sys.argv[1], 0))
print(listening.getsockname()[1], flush=True)
host, _, port = sys.stdin.readline().strip().rpartition(":")
while True:
    outer, _ = listening.accept()
    inner = socket.create_connection((host, int(port)))
    for ends in ((outer, inner), (inner, outer)):
        threading.Thread(target=copied, args=ends, daemon=True).start()
"""
"""A port mapping that passes connections on, as Docker's proxy does."""


@pytest.mark.parametrize("mapped", [False, True], ids=["all addresses", "port mapping"])
def test_peers_link_to_the_advertised_address(
    three: list[Namespace], make_engine: MakeEngine, mapped: bool
) -> None:
    inside, outside, gateway = three
    anywhere = {"listen_ip_info": "0.0.0.0:0", "transport": "tcp"}
    if mapped:
        ends = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        relay = gateway.start(sys.executable, "-c", RELAY, gateway.address, text=True, **ends)
        expected = f"{gateway.address}:{relay.stdout.readline().strip()}"
        peer = make_engine(inside, 1, advertise=expected, **anywhere)
        assert peer.address == expected
        (port,) = network.listening(inside, peer.pid)
        relay.stdin.write(f"{inside.address}:{port}\n")
        relay.stdin.flush()
    else:
        peer = make_engine(inside, 1, advertise=inside.address, **anywhere)
        (port,) = network.listening(inside, peer.pid)
        assert peer.address == f"{inside.address}:{port}"
    before = network.received(gateway)
    check_pull(peer, make_engine(outside, 2, transport="tcp"))
    assert (network.received(gateway) - before > NBYTES) is mapped


@pytest.fixture(scope="module")
def with_two_cables(make_hosts: Callable[[int], list[Namespace]]) -> list[Namespace]:
    """Two hosts with interfaces eth0 and eth1 each, on two networks."""
    here, there = make_hosts(2)
    ends = ("type", "veth", "peer", "name", SECOND, "netns", str(there.pid))
    here.run("ip", "link", "add", SECOND, *ends)
    for host in (here, there):
        host.run("ip", "address", "add", f"{second_address(host)}/24", "dev", SECOND)
        host.run("ip", "link", "set", SECOND, "up")
    for host in (here, there):
        host.wait_until_up(SECOND)
    return [here, there]


@pytest.mark.parametrize("interface", ["eth0", SECOND])
def test_bytes_use_the_interface_at_which_the_peer_listens(
    with_two_cables: list[Namespace], make_engine: MakeEngine, interface: str
) -> None:
    there, here = with_two_cables
    address = there.address if interface == "eth0" else second_address(there)
    peer = make_engine(there, 1, listen_ip_info=f"{address}:0")
    user = make_engine(here, 2)
    before = {name: network.received(here, name) for name in ("eth0", SECOND)}
    check_pull(peer, user)
    got = {name: network.received(here, name) - old for name, old in before.items()}
    assert got[interface] > NBYTES
    assert sum(got.values()) - got[interface] < NBYTES // 8


def test_all_traffic_uses_one_port(hosts: list[Namespace], make_engine: MakeEngine) -> None:
    """A firewall needs to let only one port through."""
    peer, user = (make_engine(host, number) for number, host in enumerate(hosts, 1))
    check_pull(peer, user)
    for engine in (peer, user):
        port = int(engine.address.rpartition(":")[2])
        assert network.listening(engine.host, engine.pid) == [port]


def second_address(host: Namespace) -> str:
    """Return the address of the host's second interface."""
    return host.address.replace("10.77.", "10.78.")
