from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvplan.engine.options import Options
from kvplan.engine.pools import PoolConfig
from kvplan.engine.registry import CacheRegistry
from kvplan.transport.local import LocalTransport

POOL = 1 << 20  # bytes of the device pool of `registry`
MAX_RANGES = 16  # that peers may be offered at once


@pytest.fixture
def transport() -> Iterator[LocalTransport]:
    with LocalTransport(max_registrations=MAX_RANGES) as made:
        yield made


@pytest.fixture
def changes() -> list[list[int]]:
    """The ids that were offered after each change."""
    return []


@pytest.fixture
def registry(transport: LocalTransport, changes: list[list[int]]) -> Iterator[CacheRegistry]:
    options = Options(mem_pool_config=PoolConfig(POOL, page_shift=12), max_tensors=8)
    made = CacheRegistry((transport,), options, lambda: changes.append(list(made.offered())))
    yield made
    made.close()
    # Whatever a test did, nothing is offered any more.
    assert transport.metadata() == transport.metadata([])
