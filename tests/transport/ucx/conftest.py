from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvplan.status import LLMException
from kvplan.transport.ucx.link import UcxLink
from kvplan.transport.ucx.transport import UcxTransport
from tests.support.ucx_library import found
from tests.transport.ucx.owner import SHARED_MEMORY, TIMEOUT_MS, UcxOwner


@pytest.fixture(scope="module")
def transport() -> Iterator[UcxTransport]:
    with found():
        transport = UcxTransport(settings=SHARED_MEMORY, max_registrations=64)
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def owner() -> Iterator[UcxOwner]:
    with found():
        owner = UcxOwner()
    yield owner
    owner.close()


@pytest.fixture(scope="module")
def link(transport: UcxTransport, owner: UcxOwner) -> Iterator[UcxLink]:
    try:
        link = transport.connect(owner.metadata(), timeout_ms=TIMEOUT_MS)
    except LLMException as error:
        pytest.skip(f"process_vm_readv is not allowed here: {error}")
    yield link
    link.close()
