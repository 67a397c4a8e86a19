from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvplan.engine.options import Options
from kvplan.engine.pools import PoolConfig
from kvplan.engine.registry import CacheRegistry
from kvplan.transport.local import LocalTransport

POOL = 1 << 20  # bytes of the device pool of `registry`
MAX_RANGES = 16  # maximum number of offered ranges


@pytest.fixture
def transport() -> Iterator[LocalTransport]:
    with LocalTransport(max_registrations=MAX_RANGES) as made:
        yield made


@pytest.fixture
def changes() -> list[list[int]]:
    """The offered ids after each change."""
    return []


@pytest.fixture
def registry(transport: LocalTransport, changes: list[list[int]]) -> Iterator[CacheRegistry]:
    options = Options(mem_pool_config=PoolConfig(POOL, page_shift=12), max_tensors=8)
    made = CacheRegistry((transport,), options, lambda: changes.append(list(made.survey(dict))))
    yield made
    made.close()
    # After each test, no memory may be offered any more.
    assert transport.metadata() == transport.metadata([])
