from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest

from kvplan import LlmDataDist, LLMException, LlmRole, Options, Transfers
from tests.ascend.fixtures import sim_folder, simulator
from tests.cuda_sim.simulator import cuda_simulator
from tests.faults.gate import DEADLINE_S, Gate
from tests.faults.peer import Peer
from tests.support.over_tcp import engine_of
from tests.support.places import LISTEN, parametrize

MakeEngine = Callable[..., LlmDataDist]
MakePeer = Callable[..., Peer]
__all__ = ["cuda_simulator", "sim_folder", "simulator"]  # fixtures
Attempt = Callable[[Callable[[], object]], "Future[LLMException | None]"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, "machine", ["host"])


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> str:
    """The machine that links the engines: see tests/support/places.py."""
    libraries = {"ucx": "ucx", "ascend": "simulator", "cuda": "cuda_simulator"}
    if library := libraries.get(request.param):
        request.getfixturevalue(library)
    return str(request.param)


@pytest.fixture
def needs_no_running_peer(machine: str) -> None:
    """A skip over TCP, where the peer's process must run for its memory to be reached."""
    if machine == "tcp":
        pytest.skip("requests are served by the peer's process, though not by its Python")


@pytest.fixture
def first_unconfirmed(machine: str) -> tuple[int, ...]:
    """The possible first unconfirmed descriptors, if memory went when one descriptor was posted.

    The server of a request looks before and after it, and may reach it when the memory is already
    gone. UCX and HCCL look likewise for each batch. On the host, one look at the end is for all
    descriptors.
    """
    return (0,) if machine == "host" else (0, 1)


@pytest.fixture
def make_engine(machine: str) -> Iterator[MakeEngine]:
    """A function that makes initialized engines in this process; the fixture finalizes them."""
    with ExitStack() as held:

        def make(
            cluster_id: int, *, transfers: Transfers | None = None, **options: Any
        ) -> LlmDataDist:
            kind = engine_of(machine)
            engine = held.enter_context(kind(cluster_id, LlmRole.MIX, transfers=transfers))
            engine.initialize(Options(**{"listen_ip_info": LISTEN, **options}))
            return engine

        yield make


@pytest.fixture(scope="session")
def idle() -> Iterator[dict[str, list[Peer]]]:
    """Processes without an engine, by machine. Starting one takes longer than most tests."""
    peers: dict[str, list[Peer]] = defaultdict(list)
    yield peers
    for peer in (item for them in peers.values() for item in them):
        peer.close()


@pytest.fixture
def make_peer(machine: str, idle: dict[str, list[Peer]]) -> Iterator[MakePeer]:
    """A function that makes engines in processes of their own."""
    made: list[Peer] = []

    def make(cluster_id: int, **options: Any) -> Peer:
        ready = idle[machine]
        peer = ready.pop() if ready else Peer(machine)
        made.append(peer)
        peer.start(cluster_id, **options)
        return peer

    yield make
    for peer in made:
        if peer.dead:
            peer.close()
        else:
            peer.resume()
            peer.run("datadist.finalize(); del datadist")
            idle[machine].append(peer)


@pytest.fixture
def peer(make_peer: MakePeer) -> Peer:
    """A process with the engine of cluster 1."""
    return make_peer(1)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate that holds the transfers of the engine `gated`."""
    gate = Gate()
    yield gate
    gate.close()


@pytest.fixture
def gated(gate: Gate, make_engine: MakeEngine) -> Iterator[MakeEngine]:
    """A function that makes an engine whose transfers stop after the first descriptor."""
    transfers = Transfers(1, gate.wrap)

    def make(cluster_id: int, **options: Any) -> LlmDataDist:
        return make_engine(cluster_id, transfers=transfers, **options)

    yield make
    gate.open()
    transfers.close(cancel=True)


@pytest.fixture
def attempt(gate: Gate, gated: MakeEngine) -> Iterator[Attempt]:
    """A function that runs a call in a thread; the future has its LLMException, or None."""
    threads = []

    def begin(call: Callable[[], object]) -> Future[LLMException | None]:
        outcome: Future[LLMException | None] = Future()

        def run() -> None:
            try:
                call()
            except LLMException as error:
                outcome.set_result(error)
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return outcome

    yield begin
    gate.open()
    for thread in threads:
        thread.join(DEADLINE_S)
