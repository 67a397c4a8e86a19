from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvplan import Transfers, hixl
from tests.ascend.fixtures import sim_folder, simulator
from tests.faults.gate import Gate
from tests.hixl.peer import Peer
from tests.hixl.places import Memory, Place, free_name, registered
from tests.support.peer import be_patient
from tests.support.places import parametrize

MakeEngine = Callable[..., hixl.Hixl]
MakePeer = Callable[[], Peer]
__all__ = ["sim_folder", "simulator"]  # fixtures

be_patient(hixl.Hixl)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, "place", ["host"])


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """The memory of the engines of this process, and their transport."""
    if request.param == "ascend":
        request.getfixturevalue("simulator")
    return Place(request.param, 2)


@pytest.fixture
def make_engine(place: Place) -> Iterator[MakeEngine]:
    """A function that makes initialized engines in this process; the fixture finalizes them."""
    with ExitStack() as held:

        def make(
            name: str = "127.0.0.1", transfers: Transfers | None = None, **options: str
        ) -> hixl.Hixl:
            engine = hixl.Hixl(transfers=transfers)
            held.callback(engine.finalize)
            assert engine.initialize(name, place.options | options) == hixl.SUCCESS
            return engine

        yield make


@pytest.fixture
def engine(make_engine: MakeEngine) -> hixl.Hixl:
    """An engine that listens nowhere, and is not connected."""
    return make_engine()


@pytest.fixture(scope="session")
def idle() -> Iterator[dict[str, list[Peer]]]:
    """Processes without an engine, by place, because starting one takes longer than most tests."""
    peers: dict[str, list[Peer]] = defaultdict(list)
    yield peers
    for peer in (item for them in peers.values() for item in them):
        peer.close()


@pytest.fixture
def make_peer(place: Place, idle: dict[str, list[Peer]]) -> Iterator[MakePeer]:
    """A function that makes listening engines, each in a process of its own."""
    made, ready = [], idle[place.name]

    def make() -> Peer:
        if ready:
            made.append(ready.pop())
            made[-1].begin()
        else:
            made.append(Peer(place.name))
        return made[-1]

    yield make
    ready.extend(peer for peer in made if peer.retire("engine.finalize()"))


@pytest.fixture
def peer(make_peer: MakePeer) -> Peer:
    return make_peer()


@pytest.fixture
def memory(engine: hixl.Hixl, place: Place) -> Memory:
    """Registered memory of the engine."""
    return registered(engine, place)


@pytest.fixture
def connected(engine: hixl.Hixl, peer: Peer) -> hixl.Hixl:
    """The engine, connected with the peer."""
    assert engine.connect(peer.name, 10_000) == hixl.SUCCESS
    return engine


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


@pytest.fixture
def gated(make_engine: MakeEngine, gate: Gate) -> Iterator[hixl.Hixl]:
    """An engine whose transfers stop after their first descriptor."""
    with Transfers(1, wrap=gate.wrap) as transfers:
        engine = make_engine(free_name(), transfers)
        yield engine
        gate.open()
        engine.finalize()
