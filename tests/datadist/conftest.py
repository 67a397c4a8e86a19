from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvplan import Cache, ClusterInfo, LlmDataDist, LlmRole, Transfers
from tests.ascend.fixtures import sim_folder, simulator
from tests.cuda_sim.simulator import cuda_simulator
from tests.datadist.machine import Machine, machine_of
from tests.datadist.offered import BLOCKS, OFFER, SLOTS
from tests.datadist.peer import Peer
from tests.support.left import check_nothing_left
from tests.support.places import LISTEN, parametrize

MakeEngine = Callable[..., LlmDataDist]
MakePeer = Callable[[], Peer]
__all__ = ["cuda_simulator", "sim_folder", "simulator"]  # fixtures

PATIENCE_MS = "30000"  # the default of 1,000 ms is short for a loaded machine


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, "machine", ["host", "ascend"])


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """The machine that a test runs on. The test's engines must leave nothing on a device."""
    if request.param.startswith("ascend"):
        request.getfixturevalue("simulator")
    elif request.param == "cuda":
        request.getfixturevalue("cuda_simulator")
    machine = machine_of(request.param, cluster_id=2)
    before = machine.left()  # by a test that failed
    yield machine
    gc.collect()
    check_nothing_left(machine.left, before)


@pytest.fixture
def make_engine(machine: Machine) -> Iterator[MakeEngine]:
    """A function that makes initialized engines, which are finalized after the test."""
    with ExitStack() as held:

        def make(
            cluster_id: int,
            *,
            listen: bool = False,
            transfers: Transfers | None = None,
            **options: str,
        ) -> LlmDataDist:
            item = machine.engine(cluster_id, LlmRole.MIX, transfers=transfers)
            engine = held.enter_context(item)
            address = {"ListenIpInfo": LISTEN} if listen else {}
            engine.initialize({"SyncKvCacheWaitTime": PATIENCE_MS, **address, **options})
            return engine

        yield make


@pytest.fixture
def engine(make_engine: MakeEngine) -> LlmDataDist:
    """An engine of cluster 2 without links."""
    return make_engine(2)


@pytest.fixture
def pair(make_engine: MakeEngine) -> tuple[LlmDataDist, LlmDataDist]:
    """Engines of clusters 1 and 2 in this process, which the second has linked."""
    owner, user = make_engine(1, listen=True), make_engine(2)
    link(user, owner)
    return owner, user


def link(user: LlmDataDist, owner: LlmDataDist) -> None:
    assert owner.listen_address is not None
    user.link_clusters([ClusterInfo(owner.cluster_id, owner.listen_address)]).raise_for_status()


@pytest.fixture(scope="session")
def idle() -> Iterator[dict[str, list[Peer]]]:
    """Idle processes by machine, because starting one takes longer than most tests."""
    peers: dict[str, list[Peer]] = defaultdict(list)
    yield peers
    for peer in (item for them in peers.values() for item in them):
        peer.close()


@pytest.fixture
def make_peer(machine: Machine, idle: dict[str, list[Peer]]) -> Iterator[MakePeer]:
    """A function that makes engines of cluster 1, each in its own process."""
    made: list[Peer] = []

    def make() -> Peer:
        if ready := idle[machine.name]:
            made.append(ready.pop())
            made[-1].begin()
        else:
            made.append(Peer(machine.name))
        return made[-1]

    yield make
    for peer in made:
        left: dict[str, int] = {}
        try:
            if not peer.dead:
                left = peer.end()
        except BaseException:
            peer.dead = True
            raise
        finally:
            if peer.dead:
                peer.close()
            else:
                idle[machine.name].append(peer)
        assert left == {}


@pytest.fixture
def peer(make_peer: MakePeer) -> Peer:
    """An engine of cluster 1 in another process."""
    return make_peer()


@pytest.fixture
def user(make_engine: MakeEngine, peer: Peer) -> LlmDataDist:
    """An engine of cluster 2 in this process, linked with the peer."""
    user = make_engine(2)
    user.link_clusters([ClusterInfo(1, peer.address)], timeout_ms=5000).raise_for_status()
    return user


@pytest.fixture
def offered(peer: Peer) -> None:
    peer.run(OFFER)


@pytest.fixture
def slots(user: LlmDataDist) -> Cache:
    return user.allocate_cache(SLOTS)


@pytest.fixture
def blocks(user: LlmDataDist) -> Cache:
    return user.allocate_blocks_cache(BLOCKS)
