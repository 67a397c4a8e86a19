from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvplan.control.auth import ClusterKey
from kvplan.control.loop import ControlLoop
from tests.control.conversation import Conversation, ListeningProcess, check_callbacks


@pytest.fixture
def loop() -> Iterator[ControlLoop]:
    loop = ControlLoop("test-control")
    loop.start()
    yield loop
    loop.stop()


@pytest.fixture
def far_loop() -> Iterator[ControlLoop]:
    loop = ControlLoop("test-far-control")
    loop.start()
    yield loop
    loop.stop()


@pytest.fixture(params=[False, True], ids=["open", "encrypted"])
def conversation(
    request: pytest.FixtureRequest, loop: ControlLoop, far_loop: ControlLoop
) -> Conversation:
    return Conversation(loop, far_loop, ClusterKey.generate() if request.param else None)


@pytest.fixture
def process() -> Iterator[ListeningProcess]:
    process = ListeningProcess()
    yield process
    process.close()


@pytest.fixture(autouse=True)
def _no_callback_failed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that no callback of a loop in this process raised: asyncio only logs that."""
    yield
    check_callbacks(caplog)
