"""What consumers have asked of a producer: answered now, or when the request has finished."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Final

from kvplan.logs import Log
from kvplan.serving.book import LeaseBook, NotYetError
from kvplan.serving.messages import Ask, Message, Refusal, grants
from kvplan.serving.pusher import Goal, Pusher
from kvplan.serving.tables import GroupLease, encode_leases
from kvplan.status import LLMException

logger = Log("kvplan.serving")

_MOST_GOALS: Final = 4096  # of which parts have come


class Asks:
    """Gives leases to consumers that ask for them; all methods run in the loop of the exchange.

    Args:
        instance: of the producer; who asks for that of another process is refused.
        book: has the leases.
        pusher: is told where consumers want what is still being computed.
        push: whether it is.
        enter_timeout_ms: how long who asks for a sequence waits for it to be entered; who asks for
            a transfer waits as long as it likes.
        loop: of the exchange.
        spawn: runs a coroutine in it.
        say: sends messages to a cluster, in their order.
    """

    def __init__(
        self,
        instance: bytes,
        book: LeaseBook,
        pusher: Pusher,
        *,
        push: bool,
        enter_timeout_ms: float,
        loop: asyncio.AbstractEventLoop,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        say: Callable[[int, Sequence[Message]], None],
    ) -> None:
        self._instance = instance
        self._book = book
        self._pusher = pusher
        self._push = push
        self._enter_timeout_s = enter_timeout_ms / 1000
        self._loop = loop
        self._spawn = spawn
        self._say = say
        # By sequence or transfer; then by cluster id and number of the ask.
        self.waiting: dict[int | str, dict[tuple[int, int], Ask]] = {}
        self.parts: dict[tuple[int, int], list[bytes]] = {}  # of goals that are not whole

    def take(self, cluster_id: int, ask: Ask) -> None:
        """A consumer asks; where to push is sent in parts, and answered after the last."""
        if not self._take_goal(cluster_id, ask):
            return
        self._answer(cluster_id, ask)
        if not ask.transfer and ask.sequence in self.waiting:
            self._loop.call_later(self._enter_timeout_s, self._give_up, cluster_id, ask)

    def answer_waiting(self, sequence: int, transfer: str) -> None:
        """Answer who waits for what has just been entered, or will not be."""
        names: list[int | str] = [transfer] if transfer in self.waiting else []
        names += [it for it in self.waiting if isinstance(it, int) and it <= sequence]
        for name in names:
            for (cluster_id, _), ask in self.waiting.pop(name).items():
                self._answer(cluster_id, ask)

    def end_waiting(self, cluster_id: int, transfer: str) -> None:
        """Answer what a consumer has asked before it said that it needs a transfer no more."""
        for ask in self._forget(cluster_id, transfer):
            self._refuse(cluster_id, ask, f"cluster {cluster_id} has said it needs it no more")

    def clusters(self) -> set[int]:
        """Of those that wait, or have sent a part."""
        waiting = {it for asks in self.waiting.values() for it, _ in asks}
        return waiting | {it for it, _ in self.parts}

    def keep(self, linked: Collection[int]) -> None:
        """Forget what clusters have asked that are not linked any more."""
        for name, asks in list(self.waiting.items()):
            for cluster_id in {it for it, _ in asks}.difference(linked):
                if isinstance(name, str):  # the others end by themselves
                    self._forget(cluster_id, name)
        self.parts = {key: it for key, it in self.parts.items() if key[0] in linked}

    def _answer(self, cluster_id: int, ask: Ask) -> None:
        """Give a consumer the lease that it asks for, say why not, or let it wait for it."""
        if ask.instance != self._instance:
            self._refuse(cluster_id, ask, "the request is of another process: it has restarted")
            return
        try:
            sequence, leases = self._book.leases_of(ask.sequence, ask.digest, ask.transfer)
        except NotYetError:  # a transfer may wait for as long as its consumer does
            waiting = self.waiting.setdefault(ask.transfer or ask.sequence, {})
            waiting[cluster_id, ask.number] = ask
        except LLMException as error:
            self._refuse(cluster_id, ask, str(error.args[0]))
        else:
            self._spawn(self._grant(cluster_id, ask, sequence, leases))

    async def _grant(
        self, cluster_id: int, ask: Ask, sequence: int, leases: Sequence[GroupLease]
    ) -> None:
        pushed = await self._pusher.settle(cluster_id, ask.number, ask.transfer)
        self._say(cluster_id, grants(ask.number, sequence, pushed, encode_leases(leases)))

    def _take_goal(self, cluster_id: int, ask: Ask) -> bool:
        """Take a part of where a consumer wants a transfer; returns whether it was the last."""
        key = cluster_id, ask.number
        parts = self.parts.setdefault(key, [])
        parts.append(ask.data)
        if len(parts) < ask.parts:
            if len(self.parts) > _MOST_GOALS:  # the rest of the oldest was lost
                del self.parts[next(iter(self.parts))]
            return False
        del self.parts[key]
        data = b"".join(parts)
        if data and self._push and ask.instance == self._instance:
            try:
                goal = Goal.from_bytes(data)
            except LLMException as error:
                logger.warning("cluster %d: %s", cluster_id, error)
            else:
                self._pusher.add(cluster_id, ask.number, ask.transfer, ask.digest, goal)
        return True

    def _forget(self, cluster_id: int, transfer: str) -> list[Ask]:
        """Let a consumer wait for a transfer no more; returns what it has asked."""
        asks = self.waiting.get(transfer, {})
        ended = [asks.pop(it) for it in list(asks) if it[0] == cluster_id]
        if not asks:
            self.waiting.pop(transfer, None)
        return ended

    def _give_up(self, cluster_id: int, ask: Ask) -> None:
        asks = self.waiting.get(ask.sequence, {})
        if asks.pop((cluster_id, ask.number), None) is None:
            return
        if not asks:
            del self.waiting[ask.sequence]
        self._refuse(cluster_id, ask, f"request {ask.sequence} has not finished here")

    def _refuse(self, cluster_id: int, ask: Ask, reason: str) -> None:
        self._say(cluster_id, [Refusal(ask.number, reason[:1000])])
