"""The state and the operations of one link, compared with a model after each of many events."""

from __future__ import annotations

import asyncio
import threading
import time
from random import Random

import pytest

from kvplan.links.lifecycle import LinkLifecycle
from kvplan.links.values import NEXT_STATES, LinkState
from kvplan.status import LLMException
from tests.support.refusals import refused

REFUSALS = {
    LinkState.LINKING: ("LLM_NOT_YET_LINK", "is still being made"),
    LinkState.UNLINKING: ("LLM_NOT_YET_LINK", "is being unlinked"),
    LinkState.UNLINKED: ("LLM_NOT_YET_LINK", "has ended: why"),
    LinkState.BROKEN: ("LLM_LINK_FAILED", "is broken: why"),
    LinkState.CLOSED: ("LLM_LINK_FAILED", "was ended by the peer: why"),
}
ENDED = {LinkState.UNLINKED, LinkState.BROKEN, LinkState.CLOSED}


class Operation:
    """An operation that may be forgotten."""


class UnprintableError(Exception):
    """An error of a program's hook without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


async def walk(random: Random) -> None:
    link = LinkLifecycle(9)
    state, reason, last_error = LinkState.LINKING, "", ""
    held: list[Operation] = []
    ended: list[Operation] = []
    releases: set[int] = set()
    counts, since = [0, 0, 0], link.since
    for number in range(60):
        event = random.choice(
            ("begin", "begin", "end", "end", "again", "forget", "claim", "release")
        )
        if random.random() < 0.15 and (following := NEXT_STATES[state]):
            state = random.choice(sorted(following, key=lambda each: each.name))
            reason = "why" if state in ENDED else ""
            if state in (LinkState.BROKEN, LinkState.CLOSED):
                last_error = reason
            changed = time.time()
            link.change_state(state, reason)
            since = link.since
            assert since >= changed
        elif event == "begin":
            operation = Operation()
            if state is LinkState.LINKED:
                link.begin(operation)
                held.append(operation)
                counts[0] += 1
            else:
                with refused(*REFUSALS[state]):
                    link.begin(operation)
        elif event == "end" and held:
            operation = held.pop(random.randrange(len(held)))
            pulled, pushed = random.choice(((0, 0), (5, 0), (0, 7)))
            error = random.choice((None, LLMException(f"error {number}"), UnprintableError()))
            if isinstance(error, UnprintableError):
                with pytest.raises(RuntimeError, match="no text"):
                    link.end(operation, pulled, pushed, error)
            else:
                link.end(operation, pulled, pushed, error)
                last_error = last_error if error is None else str(error)
            ended.append(operation)
            counts[1] += pulled
            counts[2] += pushed
        elif event == "again" and ended:
            link.end(random.choice(ended), 1, 1, ValueError("ended before"))
        elif event == "forget" and held:
            del operation
            held.pop(random.randrange(len(held)))
        elif event == "claim":
            link.add_pending_release(number)
            releases.add(number)
        elif event == "release":
            claim = random.choice([*releases, number])
            link.remove_pending_release(claim)
            releases.discard(claim)
        operation = held[-1] if held else Operation()
        assert (link.state, link.reason, link.last_error) == (state, reason, last_error)
        assert link.since == since
        assert link.is_live is (state not in ENDED)
        assert link.ended.is_set() is (state in ENDED)
        assert link.settled.is_set() is (state is not LinkState.LINKING)
        assert link.in_flight == len(held) + len(releases)
        assert [link.traffic.operations, link.traffic.pulled, link.traffic.pushed] == counts
        if random.random() < 0.1:
            assert await link.wait_idle(0) is (not held and not releases)


def test_a_link_has_the_state_and_operations_that_a_model_has() -> None:
    for seed in range(60):
        asyncio.run(walk(Random(seed)))


@pytest.mark.parametrize("state", REFUSALS)
def test_a_refusal_says_what_became_of_the_link(state: LinkState) -> None:
    with refused(*REFUSALS[state]) as caught:
        raise LinkLifecycle(9).refusal_in(state, "why")
    assert "the link to cluster 9 " in str(caught.value)


@pytest.mark.parametrize("ends", [["operation", "release"], ["release", "operation"]])
def test_only_the_last_end_wakes_the_waiting_calls(ends: list[str]) -> None:
    """An hour's wait ends at once, in each of two coroutines."""
    link, operation = LinkLifecycle(9), Operation()
    link.change_state(LinkState.LINKED)
    link.begin(operation)
    link.add_pending_release(4)
    calls = {
        "operation": lambda: link.end(operation),
        "release": lambda: link.remove_pending_release(4),
    }

    async def wait() -> None:
        waiting = [asyncio.create_task(link.wait_idle(3600)) for _ in range(2)]
        for index, name in enumerate(ends):
            await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
            ender = threading.Thread(target=calls[name])
            ender.start()
            ender.join()
            for _ in range(4):
                await asyncio.sleep(0)
            assert [task.done() for task in waiting] == [index == 1] * 2
        assert await asyncio.gather(*waiting) == [True, True]
        assert link._waiting == []

    asyncio.run(wait())
