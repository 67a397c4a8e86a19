"""Two ends of a conversation: in one process, where tests can inspect both, or in two."""

from __future__ import annotations

import queue
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvplan.control.auth import ClusterKey, Keys
from kvplan.control.channel import Channel
from kvplan.control.connecting import Server, connect
from kvplan.control.endpoint import Endpoint
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import Body, Sync, Synced
from tests.support.peer import Peer

DEADLINE_S = 30.0
LOCAL = Endpoint.parse("127.0.0.1:0")


class Recorder:
    """A handler that records what it receives, and answers with what `answer` returns."""

    def __init__(self) -> None:
        self.heard: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.channels: list[Channel] = []
        self.answer: Callable[[Channel, Body], Awaitable[Body]] = _synced

    async def on_request(self, channel: Channel, body: Body) -> Body:
        self.channels.append(channel)
        self.heard.put(("request", body))
        return await self.answer(channel, body)

    def on_notice(self, channel: Channel, body: Body) -> None:
        self.heard.put(("notice", body))

    def on_lost(self, channel: Channel, reason: str) -> None:
        self.heard.put(("lost", reason))

    def next(self) -> tuple[str, Any]:
        return self.heard.get(timeout=DEADLINE_S)


async def _synced(_channel: Channel, _body: Body) -> Body:
    return Synced(version=1)


class Conversation:
    """A server on `far_loop` and a channel to it on `loop`, with a recorder at each end."""

    def __init__(
        self,
        loop: ControlLoop,
        far_loop: ControlLoop,
        key: ClusterKey | None,
        endpoint: Endpoint = LOCAL,
    ) -> None:
        self.loop, self.far_loop = loop, far_loop
        self.near, self.far = Recorder(), Recorder()
        self.key = key
        self.server = far_loop.run(Server.listen(far_loop, endpoint, self.far, Keys(key)))
        self.channel = self.connect()

    def connect(self) -> Channel:
        return self.loop.run(
            connect(self.loop, self.server.endpoint, self.near, Keys(self.key), DEADLINE_S)
        )

    def request(self, body: Body, timeout_s: float = DEADLINE_S) -> Body:
        return self.loop.run(self.channel.request(body, timeout_s))

    def notify(self, body: Body) -> None:
        self.loop.run(self.channel.notify(body))

    def far_channel(self) -> Channel:
        """Return the server's end, which surely exists once it has answered."""
        self.request(Sync())
        assert self.far.next() == ("request", Sync())
        return self.far.channels[-1]


def call(loop: ControlLoop, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function, not a coroutine, on the loop's thread."""

    async def run() -> Any:
        return function(*args)

    return loop.run(run())


def check_callbacks(caplog: pytest.LogCaptureFixture) -> None:
    """Check after a test that no callback of a loop has raised."""
    records = [record for when in ("setup", "call") for record in caplog.get_records(when)]
    messages = [record.getMessage() for record in records]
    assert [message for message in messages if message.startswith("event=exception")] == []


class ListeningProcess(Peer):
    """A process with a server; `state()` returns what it reports about itself."""

    module = "tests.control.listening"

    def __init__(self, *arguments: str) -> None:
        super().__init__(*arguments)
        self.endpoint = Endpoint.parse(self.run("result = endpoint"))

    @property
    def address(self) -> tuple[str, int]:
        return self.endpoint.host, self.endpoint.port

    def state(self) -> dict[str, Any]:
        return dict(self.run("result = state()"))
