from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvplan.control.auth import ClusterKey
from kvplan.control.loop import ControlLoop
from tests.control.conversation import Conversation
from tests.control.streams.link import Link, new_link


@pytest.fixture(scope="module")
def loop() -> Iterator[ControlLoop]:
    loop = ControlLoop("test-dials")
    loop.start()
    yield loop
    loop.stop()


@pytest.fixture(scope="module")
def far_loop() -> Iterator[ControlLoop]:
    loop = ControlLoop("test-accepts")
    loop.start()
    yield loop
    loop.stop()


@pytest.fixture(scope="module", params=[False, True], ids=["open", "encrypted"])
def conversation(
    request: pytest.FixtureRequest, loop: ControlLoop, far_loop: ControlLoop
) -> Conversation:
    return Conversation(loop, far_loop, ClusterKey.generate() if request.param else None)


@pytest.fixture
def link(conversation: Conversation) -> Iterator[Link]:
    link = new_link(conversation)
    yield link
    link.near.close()
    link.far.close()
