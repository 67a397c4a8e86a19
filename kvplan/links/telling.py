"""Peers hear of every change of the caches here."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from kvplan.control.channel import ChannelClosed
from kvplan.control.messages import Sync, Synced
from kvplan.links.asking import ask
from kvplan.logs import Log
from kvplan.status import LLMException

if TYPE_CHECKING:
    from kvplan.links.local_engine import OfferedCaches
    from kvplan.links.peer_link import PeerLink


_LOG = Log("kvplan")


async def tell(link: PeerLink, registry: OfferedCaches) -> int:
    """Send what the peer does not know yet; returns the version that it knows then.

    Raises:
        ChannelClosed: the link has ended.
    """
    assert link.channel is not None
    assert link.told is not None
    async with link.telling:  # what is sent second must not overtake what was sent first
        link.is_news_due = False
        for table in registry.survey(link.told.news):
            await link.channel.notify(table)
        return link.told.version


async def tell_surely(link: PeerLink, registry: OfferedCaches, timeout_s: float) -> None:
    """As `tell`, and the peer knows it on return; one that does not answer in time is logged."""
    try:
        async with asyncio.timeout(timeout_s):
            await tell(link, registry)
            assert link.channel is not None
            await ask(link.channel, Sync(), Synced, timeout_s)  # answered in its turn
    except ChannelClosed:
        pass
    except (TimeoutError, LLMException) as error:
        _LOG.warning("tell peer=%d error=%r", link.cluster_id, str(error) or "no answer in time")


async def tell_later(link: PeerLink, registry: OfferedCaches) -> None:
    """As `tell`, for a link that may end meanwhile; many changes at once are told as one."""
    if not link.is_news_due:
        link.is_news_due = True
        with suppress(ChannelClosed):
            await tell(link, registry)
