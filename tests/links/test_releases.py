"""Releases of claims are sent until the peer has confirmed, or the conversation has ended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvplan.control.channel import Channel
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import Body, Claim, Release, Released
from kvplan.links.lifecycle import LinkLifecycle
from kvplan.links.peer_link import Claims, PeerClaim
from kvplan.links.peer_table import PeerCache
from kvplan.status import LLMException, LLMStatusCode
from tests.control.conversation import DEADLINE_S, Conversation
from tests.links.end import DESC
from tests.support.held import ended_tasks

RELEASE = Release(7, (0, 2))


@pytest.fixture
def conversation() -> Iterator[Conversation]:
    with ExitStack() as held:
        loops = [ControlLoop("test-control"), ControlLoop("test-far-control")]
        for loop in loops:
            loop.start()
            held.callback(loop.stop)
        yield Conversation(*loops, None)


def release(conversation: Conversation, wait_s: float) -> LinkLifecycle:
    link = LinkLifecycle(2)
    claims = Claims(link, conversation.loop, asyncio.Semaphore(1), wait_s)
    claims.release(conversation.channel, RELEASE)
    return link


def is_idle(conversation: Conversation, link: LinkLifecycle) -> bool:
    return conversation.loop.run(link.wait_idle(DEADLINE_S))


def test_a_release_is_sent_again_to_a_busy_peer(conversation: Conversation) -> None:
    refusals, asked = [LLMStatusCode.LLM_LINK_BUSY] * 3, []

    async def answer(_channel: Channel, _body: Body) -> Body:
        asked.append(time.monotonic())
        if refusals:
            raise LLMException("too much", status_code=refusals.pop())
        return Released()

    conversation.far.answer = answer
    link = release(conversation, DEADLINE_S)
    assert is_idle(conversation, link)
    assert [conversation.far.next() for _ in range(4)] == [("request", RELEASE)] * 4
    assert conversation.far.heard.empty()
    assert asked[3] - asked[0] >= 3 * 0.015  # with pauses: many at once would keep the peer busy


def test_a_release_is_sent_again_to_a_peer_that_does_not_answer(conversation: Conversation) -> None:
    unanswered = [asyncio.Event(), asyncio.Event()]

    async def answer(_channel: Channel, _body: Body) -> Body:
        if unanswered:
            await unanswered.pop().wait()
        return Released()

    conversation.far.answer = answer
    link = release(conversation, 0.05)
    assert is_idle(conversation, link)
    assert [conversation.far.next() for _ in range(3)] == [("request", RELEASE)] * 3


def test_nothing_is_sent_once_the_conversation_has_ended(conversation: Conversation) -> None:
    async def answer(channel: Channel, _body: Body) -> Body:
        channel.close("enough")
        return Released()

    conversation.far.answer = answer
    link = release(conversation, DEADLINE_S)
    assert is_idle(conversation, link)


def test_a_release_that_is_refused_is_not_sent_again(conversation: Conversation) -> None:
    async def answer(_channel: Channel, _body: Body) -> Body:
        raise LLMException("no such link", status_code=LLMStatusCode.LLM_NOT_YET_LINK)

    conversation.far.answer = answer
    link = release(conversation, DEADLINE_S)
    assert is_idle(conversation, link)
    assert conversation.far.next() == ("request", RELEASE)
    assert conversation.far.heard.empty()


def test_claims_that_are_given_up_leave_no_tasks_in_their_link(conversation: Conversation) -> None:
    async def answer(_channel: Channel, _body: Body) -> Body:
        raise LLMException("no such cache", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)

    async def give_up() -> None:
        claiming = asyncio.create_task(claims.claim(conversation.channel, Claim(1, 2, 3), 3600.0))
        await asyncio.sleep(0)  # until it waits
        claiming.cancel()
        async with asyncio.timeout(DEADLINE_S):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)
        assert claiming.cancelled()

    conversation.far.answer = answer
    claims = Claims(LinkLifecycle(2), conversation.loop, asyncio.Semaphore(1), 3600.0)
    before = ended_tasks()
    for _ in range(50):
        conversation.loop.run(give_up())
    assert ended_tasks() < before + 25


def test_a_release_that_is_asked_for_twice_is_sent_once(conversation: Conversation) -> None:
    """An interrupt may end the wait for the first one."""
    may_answer = asyncio.Event()

    async def answer(_channel: Channel, _body: Body) -> Body:
        await may_answer.wait()
        return Released()

    conversation.far.answer = answer
    link = LinkLifecycle(2)
    claims = Claims(link, conversation.loop, asyncio.Semaphore(2), DEADLINE_S)
    for _ in range(2):
        claims.release(conversation.channel, RELEASE, 0.0)
    assert conversation.far.next() == ("request", RELEASE)
    conversation.far_loop.call_soon(may_answer.set)
    assert is_idle(conversation, link)
    assert conversation.far.heard.empty()


def test_a_caller_with_less_time_than_the_link_does_not_wait_longer(
    conversation: Conversation,
) -> None:
    may_answer = asyncio.Event()

    async def answer(_channel: Channel, _body: Body) -> Body:
        await may_answer.wait()
        return Released()

    conversation.far.answer = answer
    link = LinkLifecycle(2)
    claims = Claims(link, conversation.loop, asyncio.Semaphore(1), wait_s=3600.0)
    cache = PeerCache(2, 1, DESC, False, (4096, 8192), (), writable=True)
    claim = PeerClaim(claims, conversation.channel, RELEASE.claim_id, cache, 0)
    releasing = threading.Thread(target=claim.release, args=(range(2), 50.0))
    releasing.start()
    releasing.join(DEADLINE_S)
    has_returned = not releasing.is_alive()
    conversation.far_loop.call_soon(may_answer.set)
    releasing.join()
    assert has_returned
    assert is_idle(conversation, link)
    assert conversation.far.next() == ("request", RELEASE)
