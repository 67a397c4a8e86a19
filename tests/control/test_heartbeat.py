"""The silence of a peer is noticed, and a pause of this process is not mistaken for it."""

from __future__ import annotations

import asyncio
import re
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvplan.control.auth import Keys
from kvplan.control.channel import Channel, Heartbeat
from kvplan.control.connecting import connect
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import Body, Failed, Ping, Sync
from tests.control.conversation import DEADLINE_S, Conversation, ListeningProcess, Recorder, call

INTERVAL_S, TIMEOUT_S = 0.05, 0.3


@pytest.fixture
def near() -> Recorder:
    return Recorder()


@pytest.fixture
def channel(loop: ControlLoop, process: ListeningProcess, near: Recorder) -> Channel:
    return loop.run(connect(loop, process.endpoint, near, Keys(), DEADLINE_S))


def test_a_killed_peer_is_noticed_without_any_heartbeat(
    channel: Channel, process: ListeningProcess, near: Recorder
) -> None:
    process.kill()
    kind, reason = near.next()
    assert kind == "lost"
    # The system resets a connection if the peer has unread bytes.
    assert reason in ("the peer has disconnected", "connection lost: Connection reset by peer")
    assert channel.closed


def test_a_stopped_peer_is_noticed_by_its_silence(
    loop: ControlLoop, channel: Channel, process: ListeningProcess, near: Recorder
) -> None:
    call(loop, channel.keep_alive, INTERVAL_S, TIMEOUT_S)
    process.stop()
    begun = time.monotonic()
    kind, reason = near.next()
    assert kind == "lost"
    silent = re.fullmatch(r"nothing heard for ([0-9.]+) s", reason)
    assert silent is not None, reason
    assert float(silent[1]) >= TIMEOUT_S
    assert time.monotonic() - begun > TIMEOUT_S - INTERVAL_S


def test_an_idle_peer_that_answers_pings_lives(
    loop: ControlLoop, process: ListeningProcess
) -> None:
    """A loaded machine may delay the peer for longer than the first timeout."""
    for timeout_s in (3 * TIMEOUT_S, 30 * TIMEOUT_S):
        channel = loop.run(connect(loop, process.endpoint, Recorder(), Keys(), DEADLINE_S))
        call(loop, channel.keep_alive, INTERVAL_S, timeout_s)
        received = channel.last_received
        loop.run(asyncio.sleep(2 * timeout_s))
        if not channel.closed:
            break
    assert not channel.closed
    assert channel.last_received > received + timeout_s


def test_an_end_that_only_receives_shows_that_it_lives(conversation: Conversation) -> None:
    far = conversation.far_channel()
    call(conversation.loop, conversation.channel.keep_alive, INTERVAL_S, DEADLINE_S)
    sent = conversation.channel.last_sent
    deadline = time.monotonic() + DEADLINE_S
    while conversation.channel.last_sent == sent:
        assert time.monotonic() < deadline
        conversation.far_loop.run(far.notify(Failed("news", 0)))


def test_a_loop_that_was_delayed_itself_does_not_blame_its_peers(
    conversation: Conversation,
) -> None:
    far = conversation.far_channel()
    call(conversation.loop, conversation.channel.keep_alive, INTERVAL_S, TIMEOUT_S)
    call(conversation.far_loop, far.keep_alive, INTERVAL_S, 10 * TIMEOUT_S)
    for _ in range(3):
        call(conversation.loop, time.sleep, 2 * TIMEOUT_S)  # as the GIL or a signal might
        conversation.request(Sync())
    assert not conversation.channel.closed


def test_a_pause_of_this_process_does_not_count_as_silence_of_a_peer() -> None:
    """On a suspended machine both ends stand still, so a late check counts as one step."""
    lost: list[str] = []
    posted: list[Body] = []
    now = time.monotonic()
    channel: Any = SimpleNamespace(
        last_received=now,
        last_sent=now,
        closed=False,
        connection=SimpleNamespace(drain=lambda: True),
        lose=lost.append,
        post=posted.append,
    )

    async def check() -> None:
        beats = Heartbeat(cast(Channel, channel), 60.0, 120.0)
        for _ in range(3):
            beats.stop()
            beats._checked_at -= 3600
            channel.last_sent -= 3600
            beats._check()
        beats.stop()

    asyncio.run(check())
    assert (lost, posted) == ([], [Ping()] * 3)


def test_a_peer_is_not_silent_while_its_input_is_unread() -> None:
    """The loop reads a few frames at a time, and unread frames may be recent."""
    lost: list[str] = []
    now, is_drained = time.monotonic(), iter([False] * 10 + [True] * 4)
    channel: Any = SimpleNamespace(
        last_received=now,
        last_sent=now,
        closed=False,
        connection=SimpleNamespace(drain=lambda: next(is_drained)),
        lose=lost.append,
        post=lambda _: None,
    )

    async def check() -> None:
        beats = Heartbeat(cast(Channel, channel), 60.0, 120.0)
        for _ in range(14):  # each check counts as half a minute
            assert lost == []
            beats.stop()
            beats._checked_at -= 3600
            beats._check()
        beats.stop()

    asyncio.run(check())
    assert lost == ["nothing heard for 120 s"]


def test_keeping_alive_again_replaces_the_times(conversation: Conversation) -> None:
    conversation.far_channel()
    call(conversation.loop, conversation.channel.keep_alive, 0.001, 0.002)
    call(conversation.loop, conversation.channel.keep_alive, 1.0, 5.0)
    call(conversation.loop, time.sleep, 0.02)
    assert conversation.request(Sync())


def test_only_the_newest_heartbeat_beats(loop: ControlLoop, far_loop: ControlLoop) -> None:
    """After the end of the conversation, none does."""
    conversation = Conversation(loop, far_loop, None)
    made = []
    for _ in range(3):
        call(loop, conversation.channel.keep_alive, 60.0, 120.0)
        made.append(conversation.channel._heartbeat)
    assert [item._timer.cancelled() for item in made] == [True, True, False]
    call(loop, conversation.channel.close)
    assert made[-1]._timer.cancelled()
