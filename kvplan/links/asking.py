"""Requests to a peer whose answer has one type."""

from __future__ import annotations

from typing import TypeVar

from kvplan.control.channel import Channel
from kvplan.control.messages import Body
from kvplan.links.local_engine import link_failed

_Answer = TypeVar("_Answer", bound=Body)


async def ask(
    channel: Channel, question: Body, expected: type[_Answer], timeout_s: float
) -> _Answer:
    """The peer's answer.

    Raises:
        TimeoutError: there is none within `timeout_s`.
        ChannelClosed: there will be none.
        LLMException: the peer's refusal; LLM_LINK_FAILED: an answer that is none.
    """
    answer = await channel.request(question, timeout_s)
    if not isinstance(answer, expected):
        raise link_failed(
            f"the peer answered {type(answer).__name__} to a {type(question).__name__}"
        )
    return answer
