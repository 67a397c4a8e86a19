"""Hosts made of network namespaces, and engines on them, whose processes are reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvplan.control.auth import ClusterKey
from tests.across import network
from tests.across.engine import Engine
from tools.namespaces import Namespace, NamespacesError, namespaces

MakeEngine = Callable[..., Engine]
Idle = dict[int, list[Engine]]


@pytest.fixture(scope="session")
def make_hosts() -> Iterator[Callable[[int], list[Namespace]]]:
    """A function that makes a number of hosts on one network."""
    with ExitStack() as opened:

        def make(count: int) -> list[Namespace]:
            try:
                return opened.enter_context(namespaces(count))
            except NamespacesError as error:
                pytest.skip(str(error))

        yield make


@pytest.fixture(scope="session")
def cable(make_hosts: Callable[[int], list[Namespace]]) -> list[Namespace]:
    """Two hosts, joined by a cable."""
    return make_hosts(2)


@pytest.fixture(scope="session")
def three(make_hosts: Callable[[int], list[Namespace]]) -> list[Namespace]:
    """Three hosts on one network."""
    return make_hosts(3)


@pytest.fixture
def hosts(cable: list[Namespace]) -> Iterator[list[Namespace]]:
    """Two hosts, joined by a cable that is restored after the test."""
    yield cable
    if not network.is_plugged(cable[0]):
        network.plug(*cable)
    network.mend(*cable)


@pytest.fixture(scope="session")
def idle() -> Iterator[Idle]:
    """Processes without an engine, by host. Starting a process takes longer than most tests."""
    engines: Idle = {}
    yield engines
    for engine in (engine for idle_engines in engines.values() for engine in idle_engines):
        engine.close()


@pytest.fixture(scope="session")
def cluster_key(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The key file of all engines; without a key, no engine listens on a network."""
    file = tmp_path_factory.mktemp("across") / "cluster.key"
    ClusterKey.generate().save(file)
    return str(file)


@pytest.fixture
def make_engine(idle: Idle, cluster_key: str) -> Iterator[MakeEngine]:
    """A function that makes an engine on a host, with a cluster id and options.

    `before` are words that precede the command of its process.
    """
    with ExitStack() as held:

        def make(host: Namespace, cluster_id: int, *before: str, **options: object) -> Engine:
            ready = idle.setdefault(host.pid, [])
            if ready and not before:
                engine = ready.pop()
            else:
                engine = Engine(host, *before)
            held.callback(finish, engine, None if before else ready)
            engine.start(cluster_id, **{"cluster_key_file": cluster_key, **options})
            return engine

        yield make


def finish(engine: Engine, ready: list[Engine] | None) -> None:
    """End an engine. Its process is kept for reuse in `ready`, or ends as well."""
    try:
        if not engine.dead:
            engine.resume()
            engine.run("holder.end()")
    except BaseException:
        engine.dead = True
        raise
    finally:
        if engine.dead or ready is None:
            engine.close()
        else:
            ready.append(engine)


@pytest.fixture
def pair(hosts: list[Namespace], make_engine: MakeEngine) -> tuple[Engine, Engine]:
    """Linked engines of clusters 1 and 2 on two hosts; only the first one's cache is filled."""
    owner, user = (make_engine(host, number) for number, host in enumerate(hosts, 1))
    owner.hold(seed=1)
    user.hold(seed=None)
    user.link(owner)
    return owner, user
