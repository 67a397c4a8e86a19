from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvplan.transport.local import LocalTransport
from tests.transport.owner import Owner


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


@pytest.fixture
def transport() -> Iterator[LocalTransport]:
    with LocalTransport() as transport:
        yield transport
