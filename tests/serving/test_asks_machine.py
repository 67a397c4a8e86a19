"""Asks compared with a model: answered and waiting consumers, and counted bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import pytest

from kvplan import BlockLease
from kvplan.serving import ExchangeOptions, Handle, LeaseBook, asks
from kvplan.serving.asks import Asks
from kvplan.serving.messages import Ask, Grant, Message, Refusal
from kvplan.serving.pusher import PART_NBYTES, Goal, Pusher
from kvplan.serving.tasks import PeerThreads, Tasks

from .test_book import CACHE, Engine, handle

INSTANCE, DIGEST = b"producer", b"tokens"
CLUSTERS, NUMBERS, NAMES = (4, 5), range(4), ("x", "y")
HANDLES = (handle(0), handle(1))
ENTER_S, MAX_WAITING, MAX_GOAL_NBYTES = 5.0, 3, 900


class Loop(asyncio.SelectorEventLoop):
    """A loop whose time the test sets."""

    now = 100.0

    def time(self) -> float:
        return self.now


class Spawned:
    """Tasks that run coroutines at once."""

    def spawn(self, coroutine: Coroutine[Any, Any, None], cluster_id: int) -> None:
        with pytest.raises(StopIteration):
            coroutine.send(None)


class Pushes:
    """The added goals, by cluster, number and transfer."""

    def __init__(self) -> None:
        self.added: dict[tuple[int, int, str], Goal] = {}

    def add(self, cluster_id: int, number: int, transfer: str, digest: bytes, goal: Goal) -> None:
        assert digest == DIGEST
        self.added[cluster_id, number, transfer] = goal

    def is_pushing(self, transfer: str) -> bool:
        return False


@dataclass
class Waiting:
    """An ask without an answer."""

    name: Handle | str
    goal: bytes
    until: float  # only for handles


def goal_of(cluster_id: int, number: int, nbytes: int) -> Goal:
    lease = BlockLease(cluster_id, bytes(16), 1, number, (*range(nbytes),), True, "", ())
    return Goal(lease, 0, number)


class Machine:
    """The asks of two consumers, their model, and events with random arguments."""

    def __init__(self, random: Random, loop: Loop) -> None:
        self.random, self.loop = random, loop
        self.engine, self.pushes = Engine(), Pushes()
        self.book = LeaseBook(self.engine, CACHE, 1e9)
        self.asks = Asks(
            INSTANCE,
            self.book,
            cast(Pusher, self.pushes),
            push=True,
            options=ExchangeOptions(enter_timeout_ms=ENTER_S * 1000),
            tasks=cast(Tasks, Spawned()),
            threads=cast(PeerThreads, None),
            send=self.send,
        )
        self.answers: list[tuple[int, int, bool]] = []  # cluster, number, granted
        self.expected: list[tuple[int, int, bool]] = []
        self.waiting: dict[tuple[int, int], Waiting] = {}
        self.parts: dict[tuple[int, int], list[bytes]] = {}  # oldest first
        self.known: dict[Handle | str, bool] = {}  # True: entered; False: ended
        self.absent: set[int] = set()  # at the last look, and silent since

    async def send(self, cluster_id: int, messages: Sequence[Message]) -> None:
        for message in messages:
            assert isinstance(message, Grant | Refusal)
            self.answers.append((cluster_id, message.number, isinstance(message, Grant)))

    def ask(self) -> None:
        """Let a consumer ask; its goal comes in parts, of which the last may be lost."""
        cluster_id, number = self.random.choice(CLUSTERS), self.random.choice(NUMBERS)
        name: Handle | str = self.random.choice((*HANDLES, *NAMES))
        # an ask is repeated, as after the end of a link
        if self.waiting and self.random.random() < 0.3:
            cluster_id, number = self.random.choice([*self.waiting])
            name = self.waiting[cluster_id, number].name
        data = b""
        if isinstance(name, str) and self.random.random() < 0.7:
            data = goal_of(cluster_id, number, self.random.randrange(300)).to_bytes()
        size = self.random.choice((100, 1000))
        pieces = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
        lost = len(pieces) > 1 and self.random.random() < 0.5
        own = name.value if isinstance(name, Handle) else b""
        transfer = name if isinstance(name, str) else ""
        dropped = False  # by the loss of its first parts, although the others still come
        for part, piece in enumerate(pieces[: len(pieces) - lost]):
            ask = Ask(number, INSTANCE, own, DIGEST, transfer, part, len(pieces), piece)
            self.asks.take(cluster_id, ask)
            self.absent.discard(cluster_id)
            if len(pieces) > 1 and not dropped:
                dropped = not self.model_part((cluster_id, number), ask)
        if not lost and not dropped:
            self.model_ask((cluster_id, number), name, data)

    def model_part(self, key: tuple[int, int], ask: Ask) -> bool:
        """Keep a part; return False if it was dropped because more bytes came than may wait."""
        if ask.part == 0:
            self.parts.pop(key, None)
        self.parts.setdefault(key, []).append(ask.data)
        if len(self.parts[key]) == ask.parts:
            del self.parts[key]
        waits = self.waiting.get(key)  # the goal of these parts replaces the waiting one
        limit = MAX_GOAL_NBYTES + (0 if waits is None else len(waits.goal))
        while self.nbytes(key[0]) > limit and (parts_of_cluster := self.parts_of(key[0])):
            del self.parts[parts_of_cluster[0]]
            self.expected.append((*parts_of_cluster[0], False))
        return key in self.parts or ask.part + 1 == ask.parts

    def parts_of(self, cluster_id: int) -> list[tuple[int, int]]:
        return [key for key in self.parts if key[0] == cluster_id]

    def nbytes(self, cluster_id: int) -> int:
        parts = [part for key in self.parts_of(cluster_id) for part in self.parts[key]]
        goals = [
            waiting_ask.goal for key, waiting_ask in self.waiting.items() if key[0] == cluster_id
        ]
        return sum(map(len, goals)) + sum(len(part) + PART_NBYTES for part in parts)

    def model_ask(self, key: tuple[int, int], name: Handle | str, goal: bytes) -> None:
        if name in self.known:
            self.expected.append((*key, self.known[name]))
            return
        of_cluster = [waiting_ask for waiting_ask in self.waiting if waiting_ask[0] == key[0]]
        before = self.waiting.get(key)
        waiting_nbytes = self.nbytes(key[0]) - (0 if before is None else len(before.goal))
        if (
            (before is not None and before.name != name)
            or (before is None and len(of_cluster) >= MAX_WAITING)
            or (goal and waiting_nbytes + len(goal) > MAX_GOAL_NBYTES)
        ):
            self.expected.append((*key, False))
            return
        self.waiting[key] = Waiting(name, goal, self.loop.now + ENTER_S)
        if goal:
            added = self.pushes.added[*key, cast(str, name)]
            assert added.to_bytes() == goal

    def answer(self, chosen: list[tuple[int, int]], granted: bool) -> None:
        for key in chosen:
            del self.waiting[key]
            self.expected.append((*key, granted))

    def waits_for(self, *names: Handle | str) -> list[tuple[int, int]]:
        return [key for key, waiting_ask in self.waiting.items() if waiting_ask.name in names]

    def enter(self) -> None:
        own, name = self.random.choice(HANDLES), self.random.choice(("", *NAMES))
        if own in self.known or name in self.known:
            return
        self.book.enter("r", [1], DIGEST, name, handle=own)
        names = [own, name] if name else [own]
        self.asks.answer_waiting(*names)
        self.known |= dict.fromkeys(names, True)
        self.answer(self.waits_for(*names), granted=True)

    def refuse(self) -> None:
        name = self.random.choice(NAMES)
        if name not in self.known:
            self.book.end_transfer(name, "was refused")
            self.asks.answer_waiting(name)
            self.known[name] = False
            self.answer(self.waits_for(name), granted=False)

    def done(self) -> None:
        cluster_id, name = self.random.choice(CLUSTERS), self.random.choice(NAMES)
        self.asks.end_waiting(cluster_id, name)
        self.answer([key for key in self.waits_for(name) if key[0] == cluster_id], granted=False)

    def unlink(self) -> None:
        """Change the links.

        An ask outlives its link if a link or another ask exists at the next look.
        """
        linked = self.random.choice(((), *((waiting_ask,) for waiting_ask in CLUSTERS)))
        self.asks.keep(linked)
        absent = {cluster_id for cluster_id, _ in (*self.waiting, *self.parts)} - {*linked}
        removed, self.absent = absent & self.absent, absent
        self.waiting = {
            key: waiting_ask for key, waiting_ask in self.waiting.items() if key[0] not in removed
        }
        self.parts = {
            key: waiting_ask for key, waiting_ask in self.parts.items() if key[0] not in removed
        }

    def later(self) -> None:
        """Let time pass, after which an early ask for a handle may have timed out."""
        self.loop.now += self.random.choice((1.0, 3.0, ENTER_S))

    async def check(self) -> None:
        for _ in range(2):  # runs the timers that are due
            await asyncio.sleep(0)
        late = [
            key
            for key, waiting_ask in self.waiting.items()
            if isinstance(waiting_ask.name, Handle) and waiting_ask.until <= self.loop.now
        ]
        self.answer(late, granted=False)
        assert sorted(self.answers) == sorted(self.expected)
        names_by_key = {key: waiting_ask.name for key, waiting_ask in self.waiting.items()}
        held = {key: name for name, asks_by_key in self.asks.waiting.items() for key in asks_by_key}
        assert held == names_by_key
        assert self.asks.clusters() == {
            cluster_id for cluster_id, _ in (*names_by_key, *self.parts)
        }
        for cluster_id, consumer in self.asks._consumers.items():
            assert consumer.nbytes == self.nbytes(cluster_id)
            assert {*consumer.parts} == {number for _, number in self.parts_of(cluster_id)}


MOVES = (
    *(Machine.ask,) * 8, Machine.enter, Machine.refuse, Machine.done, Machine.unlink, Machine.later,
    Machine.later,
)  # fmt: skip


async def walk(random: Random, loop: Loop) -> None:
    machine = Machine(random, loop)
    for step in range(40):
        move = random.choice(MOVES)
        move(machine)
        try:
            await machine.check()
        except AssertionError as error:
            error.add_note(f"step {step}: {move.__name__}")
            raise


@pytest.mark.parametrize("seed", range(8))
def test_each_ask_is_answered_once_as_the_model_says(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are small, so that the walk reaches them."""
    monkeypatch.setattr(asks, "MAX_WAITING", MAX_WAITING)
    monkeypatch.setattr(asks, "MAX_GOAL_NBYTES", MAX_GOAL_NBYTES)
    loop = Loop()
    try:
        for number in range(25):
            loop.run_until_complete(walk(Random(f"{seed} {number}"), loop))
    finally:
        loop.close()
