"""The sending half of a `Notifier`, compared with a model after each of many random calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

import pytest

from kvplan.control.messages import Notified, Notify
from kvplan.control.notifying import WINDOW, Notifier, connect
from kvplan.status import LLMException, LLMStatusCode, busy
from tests.control.test_direct import taken

CONCURRENT = 8
"""Requests of a link that may be unanswered at a time."""

TIMEOUT_S = 3600.0  # nothing waits for it


class Call(NamedTuple):
    """A message of the sender."""

    data: bytes
    task: asyncio.Future[Any] | None  # None: sent in the background
    token: object  # of `defer`; None if the caller waits


class Wire:
    """The messages that the sender has sent, and the receiver has not answered."""

    def __init__(self) -> None:
        self.unanswered: dict[bytes, tuple[Notify, asyncio.Future[Notified]]] = {}

    async def typed_request(self, message: Notify, expected: type, timeout_s: float) -> Notified:
        assert expected is Notified
        assert timeout_s == TIMEOUT_S
        answer = asyncio.get_running_loop().create_future()
        self.unanswered[message.data] = message, answer
        try:
            return await answer
        finally:
            del self.unanswered[message.data]


class Model:
    """A reference sender: the order of calls, answers and packets determines what must be sent."""

    def __init__(self, *, is_near: bool) -> None:
        self.is_near = is_near  # the receiver can connect
        self.calls: list[bytes] = []  # without an outcome; those on the wire are the first ones
        self.on_wire: dict[bytes, bool] = {}  # True: with an offer
        self.newest = self.newest_answered = b""
        self.is_connected = self.was_answered = False
        self.tokens = 0
        self.credits, self.has_room, self.unread = 0, True, 0

    def update(self) -> None:
        """Put calls on the wire for which there is room now."""
        for data in self.calls[:CONCURRENT]:
            if data not in self.on_wire:
                may_offer = not self.was_answered and not any(self.on_wire.values())
                self.on_wire[data] = may_offer
                self.newest = data

    def end(self, data: bytes) -> bool:
        """Forget a call, and return True if it made an offer."""
        self.calls.remove(data)
        return self.on_wire.pop(data, False)

    def grant(self, count: int) -> None:
        if self.is_connected:
            self.credits, self.has_room = count, count > 0

    def sends_directly(self) -> bool:
        if not self.is_connected or self.tokens or self.newest != self.newest_answered:
            return False
        if not self.credits and self.has_room and not self.unread:
            self.credits = WINDOW
        if not self.credits:
            return False
        self.credits -= 1
        self.unread += 1
        return True


class Walk:
    """A sender, its model, and the far end of the direct connection."""

    def __init__(self, seed: int, *, is_near: bool) -> None:
        self.random = Random(seed)
        self.notifier, self.wire, self.model = Notifier(2), Wire(), Model(is_near=is_near)
        self.calls: dict[bytes, Call] = {}
        self.direct: Any = None  # the receiver's end
        self.expected: list[bytes] = []  # packets that it must have
        self.secrets: set[bytes] = set()
        self.number = self.num_direct = 0

    def new_data(self) -> bytes:
        self.number += 1
        return b"%05d" % self.number

    def call(self) -> None:
        data = self.new_data()
        channel: Any = self.wire
        task = asyncio.ensure_future(self.notifier.send(channel, data, TIMEOUT_S))
        self.calls[data] = Call(data, task, None)
        self.model.calls.append(data)

    def call_soon(self) -> None:
        data = self.new_data()
        channel: Any = self.wire
        token = self.notifier.defer()
        self.notifier.send_later(token, lambda: channel, data, TIMEOUT_S)
        self.calls[data] = Call(data, None, token)
        self.model.calls.append(data)
        self.model.tokens += 1

    def packet(self) -> None:
        data = self.new_data()
        sent = self.notifier.send_directly(data)
        assert sent is self.model.sends_directly()
        self.expected += [data] if sent else []
        self.num_direct += sent

    def packets(self) -> None:
        for _ in range(self.random.choice((2, 6, WINDOW + 1))):
            self.packet()

    def read(self) -> None:
        if self.direct is not None:
            assert taken(self.direct)[0] == self.expected
            self.expected.clear()
            self.model.unread = 0

    def answered(self) -> bytes | None:
        """Choose a call on the wire to answer."""
        if not self.model.on_wire:
            return None
        return self.random.choice([*self.model.on_wire])

    def answer(self) -> None:
        if (data := self.answered()) is None:
            return
        message, answer = self.wire.unanswered[data]
        if message.direct is not None and self.model.is_near:
            self.direct = connect(message.direct)
            assert self.direct is not None
        window = self.random.choice((0, 1, 5, WINDOW))
        answer.set_result(Notified(window))
        if self.model.end(data):
            self.model.was_answered, self.model.is_connected = True, self.model.is_near
        self.concluded(data)
        self.model.grant(window)

    def refuse(self) -> None:
        if (data := self.answered()) is None:
            return
        is_busy = self.random.random() < 0.5
        error = (
            busy("full") if is_busy else LLMException("no", status_code=LLMStatusCode.LLM_FAILED)
        )
        self.wire.unanswered[data][1].set_exception(error)
        self.model.end(data)
        self.concluded(data)
        if is_busy:
            self.model.grant(0)

    def concluded(self, data: bytes) -> None:
        self.model.newest_answered = max(self.model.newest_answered, data)
        self.model.tokens -= self.calls[data].token is not None

    def give_up(self) -> None:
        waited_for = [call for call in self.calls.values() if call.task and not call.task.done()]
        if waited_for:
            call = self.random.choice(waited_for)
            assert call.task is not None
            call.task.cancel()
            self.model.end(call.data)

    async def settled(self) -> None:
        """Compare the wire with the model, once the tasks have continued."""
        for _ in range(8):
            await asyncio.sleep(0)
        self.model.update()
        offered = {data: sent.direct for data, (sent, _) in self.wire.unanswered.items()}
        assert {data: secret is not None for data, secret in offered.items()} == self.model.on_wire
        secrets = {secret for secret in offered.values() if secret is not None}
        for secret in self.secrets - secrets:
            assert connect(secret) is None  # nothing listens for an offer that has ended
        self.secrets = secrets


@pytest.mark.parametrize("is_near", [True, False])
def test_a_sender_does_what_a_model_of_it_does(is_near: bool) -> None:
    async def run(seed: int) -> Walk:
        walk = Walk(seed, is_near=is_near)
        steps: list[Callable[[], None]] = [walk.call, walk.call_soon, walk.packet, walk.packets]
        steps += [walk.answer, walk.answer, walk.answer, walk.refuse, walk.give_up, walk.read]
        for _ in range(120):
            walk.random.choice(steps)()
            await walk.settled()
        while walk.model.calls:
            walk.answer()
            await walk.settled()
        walk.packet()
        walk.read()
        walk.notifier.end(None)
        assert not walk.notifier.send_directly(b"late")
        walk.model.is_connected, walk.model.was_answered = False, True
        walk.call()
        await walk.settled()  # no offer
        walk.answer()
        await walk.settled()
        for call in walk.calls.values():
            if call.task is not None:
                with suppress(LLMException, asyncio.CancelledError):
                    await call.task
        if walk.direct is not None:
            assert taken(walk.direct) == ([], False)
            walk.direct.close()
        return walk

    walks = [asyncio.run(run(seed)) for seed in range(10)]
    assert (sum(walk.num_direct for walk in walks) > 500) is is_near
