"""Networks that are slow, lossy or distant: every byte still arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest

from tests.across import network
from tests.across.conftest import MakeEngine
from tests.across.engine import NBYTES
from tests.across.long_cable import long_cable
from tools.namespaces import Namespace, NamespacesError

DELAY_MS = 10


@contextmanager
def whole(*_: Namespace) -> Iterator[None]:
    """Leave the network unchanged."""
    yield


@contextmanager
def slow(*hosts: Namespace) -> Iterator[None]:
    """Limit the rate, which also makes queues overflow."""
    for host in hosts:
        network.limit(host, "200mbit")
    yield


@contextmanager
def lossy(*hosts: Namespace) -> Iterator[None]:
    for host in hosts:
        network.lose(host, percent=1)
    yield


@contextmanager
def distant(*hosts: Namespace) -> Iterator[None]:
    """Delay packets by the kernel, or by a `long_cable` where the kernel cannot."""
    try:
        for host in hosts:
            host.shape("netem", "delay", f"{DELAY_MS}ms")
    except NamespacesError:
        with long_cable(*hosts, DELAY_MS / 1000):
            yield
    else:
        yield


@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize("conditions", [whole, slow, lossy, distant])
def test_every_byte_arrives(
    hosts: list[Namespace],
    make_engine: MakeEngine,
    conditions: Callable[..., AbstractContextManager[None]],
    direction: str,
) -> None:
    with ExitStack() as opened:
        try:
            opened.enter_context(conditions(*hosts))
        except NamespacesError as error:
            pytest.skip(str(error))
        peer, user = (make_engine(host, number) for number, host in enumerate(hosts, 1))
        source, target = (peer, user) if direction == "pull" else (user, peer)
        source.hold(seed=1)
        target.hold(seed=None)
        user.link(peer)
        before = network.received(target.host)
        outcome = user.move(direction, peer)
        assert outcome.status == "LLM_SUCCESS", outcome
        target.check(seed=1)
        assert network.received(target.host) - before > NBYTES, "they took another way"
