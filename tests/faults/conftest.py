from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest

from kvplan import LlmDataDist, LLMException, LlmRole, Options, Transfers
from tests.faults.gate import DEADLINE_S, Gate
from tests.faults.peer import Peer

MakeEngine = Callable[..., LlmDataDist]
MakePeer = Callable[..., Peer]
Attempt = Callable[[Callable[[], object]], "Future[LLMException | None]"]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Makes initialized engines in this process, and finalizes them."""
    with ExitStack() as held:

        def make(
            cluster_id: int, *, transfers: Transfers | None = None, **options: Any
        ) -> LlmDataDist:
            engine = held.enter_context(LlmDataDist(cluster_id, LlmRole.MIX, transfers=transfers))
            engine.initialize(Options(**{"listen_ip_info": "127.0.0.1:0", **options}))
            return engine

        yield make


@pytest.fixture(scope="session")
def idle() -> Iterator[list[Peer]]:
    """Processes without an engine: to start one takes longer than most tests."""
    peers: list[Peer] = []
    yield peers
    for peer in peers:
        peer.close()


@pytest.fixture
def make_peer(idle: list[Peer]) -> Iterator[MakePeer]:
    """Makes engines in processes of their own."""
    made: list[Peer] = []

    def make(cluster_id: int, **options: Any) -> Peer:
        peer = idle.pop() if idle else Peer()
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
            idle.append(peer)


@pytest.fixture
def peer(make_peer: MakePeer) -> Peer:
    """A process with the engine of cluster 1."""
    return make_peer(1)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Holds the transfers of the engine `gated`."""
    gate = Gate()
    yield gate
    gate.close()


@pytest.fixture
def gated(gate: Gate, make_engine: MakeEngine) -> Iterator[MakeEngine]:
    """Makes an engine whose transfers stand still after the first descriptor."""
    transfers = Transfers(1, gate.wrap)

    def make(cluster_id: int, **options: Any) -> LlmDataDist:
        return make_engine(cluster_id, transfers=transfers, **options)

    yield make
    gate.open()
    transfers.close(cancel=True)


@pytest.fixture
def attempt(gate: Gate, gated: MakeEngine) -> Iterator[Attempt]:
    """Makes a call in a thread of its own; what comes is the LLMException that it raised."""
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
