"""Asks of consumers, which a producer answers at once or when the request has finished."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Final

from kvplan.serving.absent import Absent
from kvplan.serving.book import LeaseBook, NotYetError
from kvplan.serving.messages import MAX_PARTS, MAX_REASON, Ask, Handle, Message, Refusal, grants
from kvplan.serving.pusher import MAX_GOAL_NBYTES, PART_NBYTES, Goal, Pusher
from kvplan.serving.tables import GroupLease, encode_leases
from kvplan.serving.tasks import ExchangeOptions, PeerThreads, Tasks
from kvplan.status import LLMException, message_of

MAX_WAITING: Final = 4096  # asks of one consumer


class _Consumer:
    """Unanswered asks of one consumer."""

    __slots__ = ("nbytes", "parts", "waiting")

    def __init__(self) -> None:
        # By number of the ask: the request that it waits for, and the bytes of its goal.
        self.waiting: dict[int, tuple[Handle | str, int]] = {}
        self.parts: dict[int, list[bytes]] = {}  # of incomplete goals, oldest first
        self.nbytes = 0  # of all goals and parts

    def take_parts(self, number: int) -> list[bytes]:
        """Return the parts of a goal, and forget them."""
        parts = self.parts.pop(number, [])
        self.nbytes -= sum(len(part) + PART_NBYTES for part in parts)
        return parts


class Asks:
    """The asks of consumers, answered with leases. All methods run in the loop of the exchange."""

    def __init__(
        self,
        instance: bytes,
        book: LeaseBook,
        pusher: Pusher,
        *,
        push: bool,
        options: ExchangeOptions,
        tasks: Tasks,
        threads: PeerThreads,
        send: Callable[[int, Sequence[Message]], Coroutine[Any, Any, None]],
    ) -> None:
        self._instance = instance
        self._book = book
        self._pusher = pusher
        self._push = push
        self._enter_timeout_s = options.enter_timeout_ms / 1000
        self._tasks = tasks
        self._threads = threads
        self._send = send
        # By handle or transfer; then by cluster id and number of the ask.
        self.waiting: dict[Handle | str, dict[tuple[int, int], Ask]] = {}
        self._consumers: dict[int, _Consumer] = {}
        self._absent = Absent()

    def take(self, cluster_id: int, ask: Ask) -> None:
        """Take an ask. If a goal comes in several asks, only the last one is answered."""
        self._absent.heard(cluster_id)
        if (data := self._whole(cluster_id, ask)) is None:
            return
        goal, nbytes = None, 0
        if data and self._push and ask.transfer and ask.instance == self._instance:
            try:
                goal = Goal.from_bytes(data)
            except LLMException as error:
                self._refuse(cluster_id, ask.number, message_of(error))
                return
            if goal.lease.cluster_id != cluster_id:
                self._refuse(
                    cluster_id,
                    ask.number,
                    f"its goal is a lease of cluster {goal.lease.cluster_id}, but must be a lease "
                    f"of the asking cluster {cluster_id}",
                )
                return
            nbytes = len(data)
        self._answer(cluster_id, ask, goal, nbytes)

    def answer_waiting(self, *names: Handle | str) -> None:
        """Answer the asks for requests that were entered or refused."""
        for name in names:
            for cluster_id, number in list(self.waiting.get(name, ())):
                if (ask := self._forget(cluster_id, number)) is not None:
                    self._answer(cluster_id, ask)

    def end_waiting(self, cluster_id: int, transfer: str) -> None:
        """Refuse the asks of a consumer that no longer needs a transfer."""
        for ask in self._forget_all(cluster_id, transfer):
            self._refuse(cluster_id, ask.number, f"cluster {cluster_id} does not need it any more")

    def clusters(self) -> set[int]:
        """Return the consumers with unanswered asks."""
        return set(self._consumers)

    def keep(self, linked: Collection[int]) -> None:
        """Forget the asks of clusters that were not linked at the last call either."""
        for cluster_id in self._absent.gone(self._consumers, linked):
            for number in list(self._consumers[cluster_id].waiting):
                self._forget(cluster_id, number)
            self._consumers.pop(cluster_id, None)

    def _answer(self, cluster_id: int, ask: Ask, goal: Goal | None = None, nbytes: int = 0) -> None:
        """Grant an ask, refuse it, or let it wait."""
        if ask.instance != self._instance:
            self._refuse(
                cluster_id, ask.number, "the request belongs to the process before a restart"
            )
            return
        handle = Handle.of(ask.handle)
        if handle is None and not ask.transfer:
            self._refuse(cluster_id, ask.number, "the ask names neither a handle nor a transfer")
            return
        try:
            handle, leases = self._book.leases_of(handle, ask.digest, ask.transfer)
        except NotYetError:  # a transfer may wait as long as its consumer does
            waits = self._wait(cluster_id, ask, ask.transfer or Handle(ask.handle), nbytes)
            if waits and goal is not None:
                self._pusher.add(cluster_id, ask.number, ask.transfer, ask.digest, goal)
        except LLMException as error:
            self._refuse(cluster_id, ask.number, message_of(error))
        else:
            self._tasks.spawn(self._grant(cluster_id, ask, handle, leases), cluster_id)

    def _wait(self, cluster_id: int, ask: Ask, name: Handle | str, nbytes: int) -> bool:
        """Let an ask with a goal of `nbytes` wait; return False if the ask was refused instead."""
        consumer = self._consumers.setdefault(cluster_id, _Consumer())
        known, replaced = consumer.waiting.get(ask.number, (name, 0))
        if known != name:  # its push would stay when the ask is replaced
            reason = f"its number is that of a waiting ask for {known}"
            self._refuse(cluster_id, ask.number, reason)
            return False
        if len(consumer.waiting) >= MAX_WAITING and ask.number not in consumer.waiting:
            reason = f"{MAX_WAITING} asks of cluster {cluster_id} are waiting, the maximum"
            self._refuse(cluster_id, ask.number, reason)
            return False
        if nbytes and consumer.nbytes - replaced + nbytes > MAX_GOAL_NBYTES:
            reason = f"waiting goals of cluster {cluster_id} exceed {MAX_GOAL_NBYTES} bytes"
            self._refuse(cluster_id, ask.number, reason)
            self._drop_idle(cluster_id)
            return False
        self._forget(cluster_id, ask.number)
        consumer = self._consumers.setdefault(cluster_id, consumer)
        consumer.waiting[ask.number] = name, nbytes
        consumer.nbytes += nbytes
        self.waiting.setdefault(name, {})[cluster_id, ask.number] = ask
        if isinstance(name, Handle):
            asyncio.get_running_loop().call_later(
                self._enter_timeout_s, self._give_up, cluster_id, ask
            )
        return True

    async def _grant(
        self, cluster_id: int, ask: Ask, handle: Handle, leases: Sequence[GroupLease]
    ) -> None:
        pushed = 0
        if ask.transfer and self._pusher.is_pushing(ask.transfer):
            pushed = await self._threads.run(
                cluster_id, self._pusher.settle, cluster_id, ask.number, ask.transfer
            )
        answer = grants(ask.number, handle.value, pushed, encode_leases(leases))
        if len(answer) > MAX_PARTS:
            reason = f"its leases need {len(answer)} messages; at most {MAX_PARTS} are sent"
            self._refuse(cluster_id, ask.number, reason)
            return
        await self._send(cluster_id, answer)

    def _whole(self, cluster_id: int, ask: Ask) -> bytes | None:
        """Take a part of a goal; return the goal after its last part, otherwise None."""
        if ask.parts == 1:
            return ask.data
        consumer = self._consumers.setdefault(cluster_id, _Consumer())
        if ask.part == 0:  # sent again after a link broke
            consumer.take_parts(ask.number)
        elif ask.number not in consumer.parts:  # its first parts were dropped
            self._drop_idle(cluster_id)
            return None
        parts = consumer.parts.setdefault(ask.number, [])
        parts.append(ask.data)
        consumer.nbytes += len(ask.data) + PART_NBYTES
        whole = b"".join(consumer.take_parts(ask.number)) if len(parts) >= ask.parts else None
        _, replaced = consumer.waiting.get(ask.number, ("", 0))  # the goal that was sent before
        while consumer.nbytes - replaced > MAX_GOAL_NBYTES and consumer.parts:  # others were lost
            oldest = next(iter(consumer.parts))
            consumer.take_parts(oldest)
            self._refuse(cluster_id, oldest, f"unread goals exceed {MAX_GOAL_NBYTES} bytes")
        self._drop_idle(cluster_id)
        return whole

    def _forget(self, cluster_id: int, number: int) -> Ask | None:
        """Remove a waiting ask; return None if it is not waiting."""
        consumer = self._consumers.get(cluster_id)
        if consumer is None or number not in consumer.waiting:
            return None
        name, nbytes = consumer.waiting.pop(number)
        consumer.nbytes -= nbytes
        asks = self.waiting[name]
        ask = asks.pop((cluster_id, number))
        if not asks:
            del self.waiting[name]
        self._drop_idle(cluster_id)
        return ask

    def _forget_all(self, cluster_id: int, transfer: str) -> list[Ask]:
        """Remove and return the waiting asks of a consumer for a transfer."""
        numbers = [
            number for asker, number in self.waiting.get(transfer, ()) if asker == cluster_id
        ]
        found = (self._forget(cluster_id, number) for number in numbers)
        return [ask for ask in found if ask is not None]

    def _drop_idle(self, cluster_id: int) -> None:
        consumer = self._consumers.get(cluster_id)
        if consumer is not None and not consumer.waiting and not consumer.parts:
            del self._consumers[cluster_id]

    def _give_up(self, cluster_id: int, ask: Ask) -> None:
        name = Handle(ask.handle)
        if self.waiting.get(name, {}).get((cluster_id, ask.number)) is ask:
            self._forget(cluster_id, ask.number)
            self._refuse(
                cluster_id, ask.number, f"{name} is unknown: it has not finished, or ended long ago"
            )

    def _refuse(self, cluster_id: int, number: int, reason: str) -> None:
        refusal = Refusal(number, reason[:MAX_REASON])
        self._tasks.spawn(self._send(cluster_id, [refusal]), cluster_id)
