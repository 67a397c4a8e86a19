from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvplan.transport.tcp.link import TcpLink
from kvplan.transport.tcp.transport import TcpTransport
from tests.transport.tcp.owner import CONNECTIONS, Owner


@pytest.fixture(
    params=[
        (1, False),
        pytest.param((CONNECTIONS, False), marks=pytest.mark.slow),
        (CONNECTIONS, True),
    ],
    ids=["one connection", "three", "three, encrypted"],
)
def transport(request: pytest.FixtureRequest) -> Iterator[TcpTransport]:
    connections, encrypt = request.param
    with TcpTransport(connections=connections, encrypt=encrypt) as transport:
        yield transport


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


@pytest.fixture
def link(transport: TcpTransport, owner: Owner) -> Iterator[TcpLink]:
    link = owner.link(transport)
    yield link
    link.close()
