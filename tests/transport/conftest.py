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


@pytest.fixture(scope="module")
def process_of_owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


@pytest.fixture
def renewed_owner(process_of_owner: Owner) -> Owner:
    """The shared process of `owner`, after `renew`: for tests that leave the process as it was."""
    process_of_owner.run("renew()")
    return process_of_owner


@pytest.fixture
def transport() -> Iterator[LocalTransport]:
    with LocalTransport() as transport:
        yield transport
