"""Which way bytes take: what `auto` chooses, which interface, which ports."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.across import network
from tests.across.conftest import MakeEngine
from tests.across.engine import NBYTES, OWN_PROCESSES, Engine
from tools.namespaces import Namespace

PORTS = range(31_000, 31_100)
SECOND = "eth1"


def moved(peer: Engine, user: Engine) -> None:
    peer.hold(seed=1)
    user.hold(seed=None)
    user.link(peer)
    outcome = user.move("pull", peer)
    assert outcome.status == "LLM_SUCCESS", outcome
    user.check(seed=1)


def transport(user: Engine, peer: Engine) -> str:
    return str(user.run(f"result = link_of(it.datadist, {peer.cluster_id}).transport"))


@pytest.mark.parametrize(
    ("before", "expected"), [((), "local"), (OWN_PROCESSES, "ucx")], ids=["one host", "two hosts"]
)
def test_auto_is_local_only_where_that_works(
    hosts: list[Namespace], make_engine: MakeEngine, before: tuple[str, ...], expected: str
) -> None:
    peer, user = (
        make_engine(host, number, *before, transport="auto") for number, host in enumerate(hosts, 1)
    )
    before_it = network.received(hosts[1])
    moved(peer, user)
    assert transport(user, peer) == expected
    assert (network.received(hosts[1]) - before_it > NBYTES) == (expected == "ucx")


@pytest.fixture(scope="module")
def with_two_cables(make_hosts: Callable[[int], list[Namespace]]) -> list[Namespace]:
    """Two hosts with interfaces eth0 and eth1 each, of two networks."""
    here, there = make_hosts(2)
    ends = ("type", "veth", "peer", "name", SECOND, "netns", str(there.pid))
    here.run("ip", "link", "add", SECOND, *ends)
    for host in (here, there):
        address = host.address.replace("10.77.", "10.78.")
        host.run("ip", "address", "add", f"{address}/24", "dev", SECOND)
        host.run("ip", "link", "set", SECOND, "up")
    for host in (here, there):
        host.wait_until_up(SECOND)
    return [here, there]


@pytest.mark.parametrize("interface", ["eth0", SECOND, ""])
def test_the_interface_that_was_asked_for(
    with_two_cables: list[Namespace], make_engine: MakeEngine, interface: str
) -> None:
    """Without one, UCX takes what it likes."""
    peer, user = (
        make_engine(host, number, ucx_devices=interface)
        for number, host in enumerate(with_two_cables, 1)
    )
    before = {name: network.received(user.host, name) for name in ("eth0", SECOND)}
    moved(peer, user)
    got = {name: network.received(user.host, name) - old for name, old in before.items()}
    assert sum(got.values()) > NBYTES
    if interface:
        assert got[interface] > NBYTES


def test_the_ports_that_were_asked_for(hosts: list[Namespace], make_engine: MakeEngine) -> None:
    """What a firewall must let through."""
    settings = json.dumps({"UCX_TCP_PORT_RANGE": f"{PORTS[0]}-{PORTS[-1]}"})
    peer, user = (
        make_engine(host, number, ucx_settings=settings) for number, host in enumerate(hosts, 1)
    )
    moved(peer, user)
    for engine in (peer, user):
        control = int(engine.address.rpartition(":")[2])
        ports = network.listening(engine.host, engine.pid)
        assert control in ports
        assert set(ports) - {control} <= set(PORTS), ports
        assert set(ports) - {control}
