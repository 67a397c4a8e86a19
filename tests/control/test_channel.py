"""The guarantees of a conversation: replies, order, refusals, and a reason for its end."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from contextlib import suppress

import pytest

from kvplan.control.channel import (
    MAX_PENDING_REQUESTS,
    MAX_REQUESTS,
    MAX_UNDECODABLE,
    Channel,
    ChannelClosed,
)
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import (
    MAX_NBYTES,
    MAX_TEXT,
    PROTOCOL_VERSION,
    Body,
    Failed,
    Find,
    Hello,
    Offer,
    Released,
    Sync,
    Synced,
    Unlink,
    encode,
)
from kvplan.status import LLMException, LLMStatusCode
from kvplan.types import LlmRole
from tests.control.conversation import DEADLINE_S, Conversation, call
from tests.control.zmtp import Peer, frame
from tests.support.refusals import refused


def notice(text: str) -> Failed:
    """Return a notice that carries a text. Any body can be a notice."""
    return Failed(text, 0)


def test_a_request_is_answered(conversation: Conversation) -> None:
    assert conversation.request(Find(1, 2, 3)) == Synced(1)
    assert conversation.far.next() == ("request", Find(1, 2, 3))


def test_both_ends_may_ask(conversation: Conversation) -> None:
    far = conversation.far_channel()
    answer = conversation.far_loop.run(far.request(Unlink(5), DEADLINE_S))
    assert (answer, conversation.near.next()) == (Synced(1), ("request", Unlink(5)))


def test_the_largest_message_passes(conversation: Conversation) -> None:
    def of(nbytes: int) -> Hello:
        return Hello(1, 2, bytes(16), LlmRole.MIX, "", (Offer("t", bytes(nbytes)),), 1)

    about = MAX_NBYTES - 300
    hello = of(about + MAX_NBYTES - len(encode(of(about), seq=1)))
    assert len(encode(hello, seq=1)) == MAX_NBYTES
    conversation.request(hello)
    assert conversation.far.next() == ("request", hello)


def test_replies_find_their_requests_when_they_overtake(conversation: Conversation) -> None:
    first_may_go = asyncio.Event()

    async def answer(_channel: Channel, body: Body) -> Body:
        assert isinstance(body, Find)
        if body.req_id == 1:
            await first_may_go.wait()
        else:
            first_may_go.set()
        return Synced(body.req_id)

    conversation.far.answer = answer

    async def ask() -> list[Body]:
        asks = [conversation.channel.request(Find(i, 0, 0), DEADLINE_S) for i in (1, 2)]
        return list(await asyncio.gather(*asks))

    assert conversation.loop.run(ask()) == [Synced(1), Synced(2)]


def test_messages_are_taken_in_the_order_they_were_sent(conversation: Conversation) -> None:
    conversation.far_channel().bound = object()  # more concurrent requests than without a link

    async def talk() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                await conversation.channel.notify(notice(str(number)))
                group.create_task(conversation.channel.request(Find(number, 0, 0), DEADLINE_S))
                await asyncio.sleep(0)

    conversation.loop.run(talk())
    expected = [
        step
        for number in range(20)
        for step in (("notice", notice(str(number))), ("request", Find(number, 0, 0)))
    ]
    assert [conversation.far.next() for _ in expected] == expected


def test_notices_before_a_reply_are_handled_before_it(conversation: Conversation) -> None:
    async def answer(channel: Channel, _body: Body) -> Body:
        await channel.notify(notice("first"))
        return Released()

    conversation.far.answer = answer

    async def ask() -> list[object]:
        await conversation.channel.request(Sync(), DEADLINE_S)
        return list(conversation.near.heard.queue)

    assert conversation.loop.run(ask()) == [("notice", notice("first"))]


def test_a_refusal_arrives_with_status_and_reason(conversation: Conversation) -> None:
    async def answer(_channel: Channel, _body: Body) -> Body:
        raise LLMException("no such cache", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)

    conversation.far.answer = answer
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "no such cache"):
        conversation.request(Sync())


def test_an_answer_of_another_type_is_a_failure_that_names_both(
    conversation: Conversation,
) -> None:
    asking = conversation.channel.typed_request(Find(1, 2, 3), Released, DEADLINE_S)
    with refused("LLM_LINK_FAILED", "the peer answered Synced to a Find"):
        conversation.loop.run(asking)


def test_an_answer_that_is_too_large_to_be_sent_is_a_refusal(conversation: Conversation) -> None:
    async def answer(_channel: Channel, _body: Body) -> Body:
        return Hello(1, 2, bytes(16), LlmRole.MIX, "", (Offer("t", bytes(MAX_NBYTES)),), 1)

    conversation.far.answer = answer
    with refused(LLMStatusCode.LLM_PARAM_INVALID, f"Hello has .* at most {MAX_NBYTES}"):
        conversation.request(Sync())


def test_a_failure_of_the_peer_is_reported_without_its_secrets(
    conversation: Conversation, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(_channel: Channel, _body: Body) -> Body:
        raise ZeroDivisionError("secret")

    conversation.far.answer = answer
    with refused(LLMStatusCode.LLM_FAILED, "its log says why"):
        conversation.request(Sync())
    assert "secret" in caplog.text


def test_no_reply_in_time_is_a_timeout_and_the_channel_lives_on(conversation: Conversation) -> None:
    release = asyncio.Event()

    async def answer(_channel: Channel, body: Body) -> Body:
        if body == Sync():
            await release.wait()
        return Released()

    conversation.far.answer = answer
    with pytest.raises(TimeoutError):
        conversation.request(Sync(), timeout_s=0.05)
    assert conversation.request(Find(0, 0, 0)) == Released()
    call(conversation.far_loop, release.set)
    assert not conversation.channel.closed


def test_requests_without_a_reply_in_time_leave_nothing(conversation: Conversation) -> None:
    async def answer(_channel: Channel, _body: Body) -> Body:
        await asyncio.Event().wait()
        raise AssertionError

    conversation.far.answer = answer

    def futures() -> int:
        gc.collect()
        return sum(type(tracked) is asyncio.Future for tracked in gc.get_objects())

    before = futures()
    for _ in range(50):
        with pytest.raises(TimeoutError):
            conversation.request(Sync(), timeout_s=0)
    assert futures() - before < 25


def test_a_message_that_is_too_large_is_refused_here(conversation: Conversation) -> None:
    with pytest.raises(LLMException, match="at most 1048576"):
        conversation.notify(notice("x" * MAX_NBYTES))
    assert conversation.request(Sync()) == Synced(1)


@pytest.mark.parametrize("bound", [False, True])
def test_more_requests_at_a_time_than_allowed_are_refused(
    conversation: Conversation, bound: bool
) -> None:
    conversation.far_channel().bound = object() if bound else None
    limit = MAX_REQUESTS if bound else MAX_PENDING_REQUESTS
    release = asyncio.Event()

    async def answer(_channel: Channel, _body: Body) -> Body:
        await release.wait()
        return Released()

    conversation.far.answer = answer

    async def ask() -> list[Body | BaseException]:
        asks = [
            asyncio.create_task(conversation.channel.request(Sync(), DEADLINE_S))
            for _ in range(limit + 1)
        ]
        await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
        conversation.far_loop.call_soon(release.set)
        return list(await asyncio.gather(*asks, return_exceptions=True))

    *served, caught = conversation.loop.run(ask())
    assert served == [Released()] * limit
    assert isinstance(caught, LLMException)
    assert caught.status_code is LLMStatusCode.LLM_LINK_BUSY


def test_a_slow_reader_delays_the_writer_and_gets_all_in_order(
    conversation: Conversation,
) -> None:
    text = "x" * 4000
    held, release = asyncio.Event(), threading.Event()
    spent: list[float] = []

    async def fill() -> int:
        for number in range(3000):
            began = time.thread_time()
            try:
                async with asyncio.timeout(0.2):
                    await conversation.channel.notify(notice(f"{number}{text}"))
            except TimeoutError:
                spent.append(time.thread_time() - began)
                held.set()
                return number
        return 3000

    conversation.far_channel()
    conversation.far_loop.call_soon(release.wait)  # meanwhile the far loop reads nothing
    sent = conversation.loop.run(fill())
    assert held.is_set()
    assert spent[0] < 0.05, "a call that waits for room takes no time of the thread"
    release.set()
    for number in range(sent):
        assert conversation.far.next() == ("notice", notice(f"{number}{text}"))


def test_a_request_that_cannot_be_sent_ends_in_time(conversation: Conversation) -> None:
    release = threading.Event()

    async def ask() -> bool:
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.2):
                    await conversation.channel.notify(notice("x" * 4000))
        asking = asyncio.create_task(conversation.channel.request(Sync(), 0.05))
        ended, _ = await asyncio.wait((asking,), timeout=DEADLINE_S)
        return any(isinstance(task.exception(), TimeoutError) for task in ended)

    conversation.far_channel()
    conversation.far_loop.call_soon(release.wait)  # meanwhile the far loop reads nothing
    try:
        assert conversation.loop.run(ask())
    finally:
        release.set()


def test_closing_sends_the_reason_after_all_other_messages(conversation: Conversation) -> None:
    conversation.notify(notice("last words"))
    call(conversation.loop, conversation.channel.close, "finalized")
    assert conversation.far.next() == ("notice", notice("last words"))
    assert conversation.far.next() == ("lost", "finalized")
    assert conversation.channel.closed
    with pytest.raises(ChannelClosed, match="finalized"):
        conversation.request(Sync())
    assert conversation.near.heard.empty()


def test_the_end_of_a_peer_that_does_not_read_is_seen_at_once(
    loop: ControlLoop, far_loop: ControlLoop
) -> None:
    async def fill(channel: Channel) -> None:
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.2):
                    await channel.notify(notice("x" * 50_000))

    conversation = Conversation(loop, far_loop, None)
    peer = Peer((conversation.server.endpoint.host, conversation.server.endpoint.port))
    peer.shake_hands()
    peer.send(frame(encode(Sync(), seq=1)))
    conversation.far.next()
    far_loop.run(fill(conversation.far.channels[0]))
    peer.close()
    assert conversation.far.next() == ("lost", "connection lost: Connection reset by peer")


def test_waiting_requests_learn_of_the_end(conversation: Conversation) -> None:
    async def answer(channel: Channel, _body: Body) -> Body:
        channel.close("not with you")
        return Released()

    conversation.far.answer = answer
    with pytest.raises(ChannelClosed, match="not with you"):
        conversation.request(Sync())
    assert conversation.near.next() == ("lost", "not with you")


def test_a_request_that_is_served_ends_with_the_conversation(conversation: Conversation) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def answer(_channel: Channel, _body: Body) -> Body:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    conversation.far.answer = answer
    with pytest.raises(TimeoutError):
        conversation.request(Sync(), timeout_s=0.05)
    conversation.far_loop.run(begun.wait(), timeout_ms=1000 * DEADLINE_S)
    call(conversation.loop, conversation.channel.close)
    conversation.far_loop.run(ended.wait(), timeout_ms=1000 * DEADLINE_S)


@pytest.mark.parametrize("version", [1, 9, 255])
def test_the_error_for_another_version_names_both(conversation: Conversation, version: int) -> None:
    frame = bytes((version,)) + encode(Sync())[1:]
    conversation.far_channel()
    conversation.loop.run(conversation.channel.connection.send(frame))
    refusal = (
        f"the peer speaks version {version} of the control protocol; this side speaks version "
        f"{PROTOCOL_VERSION}"
    )
    assert conversation.far.next() == ("lost", refusal)
    assert conversation.near.next() == ("lost", f"the peer refuses: {refusal}")


def test_a_few_undecodable_frames_are_dropped_and_more_end_the_channel(
    conversation: Conversation,
) -> None:
    async def send_noise(times: int) -> None:
        for _ in range(times):
            await conversation.channel.connection.send(bytes((PROTOCOL_VERSION,)) + b"noise")

    conversation.loop.run(send_noise(MAX_UNDECODABLE))
    assert conversation.request(Sync()) == Synced(1)
    assert conversation.far_loop.refusals.count == MAX_UNDECODABLE
    conversation.loop.run(send_noise(1))
    assert conversation.near.next() == ("lost", "too many frames that are not messages")
    assert not conversation.channel.closed_orderly


def test_a_long_reason_of_the_end_is_cut(conversation: Conversation) -> None:
    """If the reason were too long, the message would be undecodable, and the end not orderly."""
    conversation.far_channel()
    call(conversation.loop, conversation.channel.close, "x" * (2 * MAX_TEXT))
    assert conversation.far.next() == ("lost", "x" * MAX_TEXT)


def test_a_notice_that_came_before_the_end_is_not_handled_after_it(
    conversation: Conversation,
) -> None:
    def receive_and_close() -> None:
        for _ in range(3):
            conversation.channel._receive(encode(Sync()))
        conversation.channel.close("enough")

    call(conversation.loop, receive_and_close)
    call(conversation.loop, lambda: None)  # all scheduled callbacks have run
    assert conversation.near.heard.empty()


def test_each_ping_waits_for_a_message_of_its_own(conversation: Conversation) -> None:
    conversation.far_channel()
    go_on = threading.Event()

    async def ping() -> str:
        try:
            await asyncio.wait_for(conversation.channel.ping(), 0.2)
        except TimeoutError:
            return "silent"
        return "heard"

    async def ping_for_long() -> None:
        await asyncio.wait_for(conversation.channel.ping(), DEADLINE_S)

    conversation.loop.run(ping_for_long())
    conversation.far_loop.call_soon(go_on.wait)
    try:
        assert [conversation.loop.run(ping()) for _ in range(2)] == ["silent"] * 2
    finally:
        go_on.set()
    conversation.loop.run(ping_for_long())


def test_a_ping_learns_of_the_end(conversation: Conversation) -> None:
    channel = conversation.channel

    async def ping() -> None:
        pinging = asyncio.create_task(channel.ping())
        await asyncio.sleep(0)  # until it waits
        channel.close("enough")
        await pinging

    with pytest.raises(ChannelClosed, match="enough"):
        conversation.loop.run(ping())


def test_small_messages_leave_at_once(conversation: Conversation) -> None:
    for channel in (conversation.channel, conversation.far_channel()):
        connection = channel.connection.stream._socket
        assert connection is not None
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_replies_that_no_request_waits_for_are_ignored(conversation: Conversation) -> None:
    """A peer may reply twice, or to a number that no request has."""
    channel = conversation.channel

    async def ask() -> Body:
        asking = asyncio.create_task(channel.request(Sync(), DEADLINE_S))
        await asyncio.sleep(0)  # until it waits
        (number,) = channel._waiting
        for reply_to in (number + 1, number, number):
            channel._receive(encode(Released(), reply_to=reply_to))
        return await asking

    conversation.loop.run(ask())
    assert conversation.request(Find(0, 0, 0)) == Synced(1)
