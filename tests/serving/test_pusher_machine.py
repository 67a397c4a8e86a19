"""Pushes compared with a model: the tokens of each task, and the tokens that have arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from threading import Event
from typing import Any, cast

import pytest

from kvplan import BlockLease, Cache, CacheDesc, DataType, LlmDataDist, LLMException
from kvplan.serving import CacheGroup, Chunk, ExchangeOptions
from kvplan.serving.pusher import Goal, Pusher

UNIT, BLOCK = 2, 4  # tokens
DESC = CacheDesc(1, (8, BLOCK // UNIT, 2), DataType.DT_FLOAT, kv_tensor_format="block token dim")
GROUP = CacheGroup("", Cache(DESC, 1), UNIT)
DIGESTS = {"x": b"of x", "y": b"of y"}
CLUSTERS, NUMBERS = (4, 5), (0, 1)
Key = tuple[int, int, str]


@dataclass(eq=False)
class Task:
    """A push by layers that ends when the test ends it."""

    transfer: Any
    layers: Sequence[int] = (0, 1)
    made_ready: list[int] = field(default_factory=list)
    ended: Event = field(default_factory=Event)
    failed: bool = False

    @property
    def done(self) -> bool:
        return self.ended.is_set()

    def end(self, *, failed: bool) -> None:
        self.failed = failed
        self.ended.set()

    def ready(self, layer: int) -> None:
        if layer not in self.made_ready:
            self.made_ready.append(layer)

    def wait_done(self, timeout_ms: float) -> bool:
        """Return `done`; a task whose layers are all ready ends here."""
        assert timeout_ms == 1234
        if len(self.made_ready) == len(self.layers) and not self.done:
            self.end(failed=False)
        return self.done

    def wait(self) -> None:
        assert self.ended.wait(60)  # a cancellation comes in another thread
        if self.failed:
            raise LLMException("stopped")

    def cancel(self) -> None:
        if not self.done:
            self.end(failed=True)


class Engine:
    """An engine that makes tasks, or refuses to."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.refuses = False

    def layered(self, transfer: Any, *, tag: str) -> Task:
        if self.refuses:
            raise LLMException("refused")
        self.tasks.append(Task(transfer))
        return self.tasks[-1]


@dataclass(eq=False)
class Push:
    """The model of a push: the end of the tokens in tasks, and those tasks with their ends."""

    missing: int  # the first missing token
    first: int  # the first token of the tasks
    begun: int
    tasks: list[tuple[Task, int]] = field(default_factory=list)
    broken: bool = False

    def arrived(self) -> int:
        """Return the end of the tokens that arrived without a gap."""
        end = self.first
        for task, task_end in self.tasks:
            if not task.done or task.failed:
                break
            end = task_end
        return end


class Machine:
    """Pushes to two consumers, and their model."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.engine = Engine()
        self.stopped: list[tuple[int, str]] = []
        self.pusher = Pusher(
            cast(LlmDataDist, self.engine),
            GROUP,
            options=ExchangeOptions(pull_timeout_ms=1234),
            stop=lambda cluster_id, name: self.stopped.append((cluster_id, name)),
        )
        self.pushes: dict[Key, Push] = {}
        self.step: list[Task] = []
        self.computed = dict.fromkeys(DIGESTS, 0)

    def key_of(self, name: str, cluster_id: int | None = None) -> dict[Key, Push]:
        return {
            key: push
            for key, push in self.pushes.items()
            if key[2] == name and cluster_id in (None, key[0])
        }

    def add(self) -> None:
        key = self.random.choice(CLUSTERS), self.random.choice(NUMBERS), self.random.choice("xy")
        if key in self.pushes:
            return
        first = self.random.randrange(7)
        lease = BlockLease(key[0], bytes(16), 1, 1, (5, 6, 7, 8), True, "", ())
        digest = self.random.choice((DIGESTS[key[2]], DIGESTS[key[2]], b"of another"))
        self.pusher.add(*key, digest, Goal(lease, first // BLOCK * BLOCK, first))
        self.pushes[key] = Push(first, first, first, broken=digest == b"of another")

    def begin(self) -> None:
        """Let a step of the model compute some tokens of each request."""
        chunks = []
        self.engine.refuses = self.random.random() < 0.1
        before = len(self.engine.tasks)
        for name, digest in DIGESTS.items():
            end = self.computed[name] = min(16, self.computed[name] + self.random.randrange(6))
            last = end > 8 and self.random.random() < 0.3
            chunks.append(Chunk(name, digest, [1, 2, 3, 4], end, last))
        self.pusher.begin(chunks)
        made = iter(self.engine.tasks[before:])
        self.step = self.engine.tasks[before:]
        for chunk in chunks:
            for key, push in self.key_of(chunk.transfer).items():
                push.broken |= any(task.failed for task, _ in push.tasks)
                end = chunk.end if chunk.last else chunk.end - chunk.end % BLOCK
                if push.broken or push.begun % UNIT or end <= push.begun:
                    continue
                if self.engine.refuses:
                    push.broken = True
                    continue
                task = next(made)
                self.check_task(task, key, push, end)
                push.begun = end
                push.tasks.append((task, end))
        assert list(made) == []

    def check_task(self, task: Task, key: Key, push: Push, end: int) -> None:
        """Check that the task moves [begun, end) to the blocks behind the first of the lease."""
        read, written = task.transfer.src, task.transfer.dst
        assert read.cache is GROUP.cache
        assert written.cache.cluster_id == key[0]
        lease_token = push.missing // BLOCK * BLOCK
        units = [*range(push.begun // UNIT, -(-end // UNIT))]
        assert read.first_token == units[0]
        assert written.first_token * UNIT + lease_token == push.begun
        assert task.transfer.num_tokens == len(units)
        assert (len(read.blocks) - 1) * BLOCK < end <= len(read.blocks) * BLOCK
        assert [*read.blocks] == [1, 2, 3, 4][: len(read.blocks)]

    def layers(self) -> None:
        if self.random.random() < 0.5:
            self.pusher.layer_ready(1)
            assert all(1 in task.made_ready for task in self.step)
        else:
            self.pusher.computed()
            assert all({*task.made_ready} == {0, 1} for task in self.step)
            self.step = []

    def move(self) -> None:
        """End some tasks, with success or with an error."""
        for task in self.engine.tasks:
            if not task.done and len(task.made_ready) == 2 and self.random.random() < 0.6:
                task.end(failed=self.random.random() < 0.2)

    def end(self) -> None:
        name = self.random.choice("xy")
        in_flight = {
            key[0]
            for key, push in self.key_of(name).items()
            if any(not task.done for task, _ in push.tasks)
        }
        self.stopped = []
        assert self.pusher.end(name) is (not in_flight)
        assert sorted(self.stopped) == sorted((cluster_id, name) for cluster_id in in_flight)
        for key, push in self.key_of(name).items():
            push.broken = True
            if not in_flight:
                del self.pushes[key]

    def remove(self) -> None:
        cluster_id, name = self.random.choice(CLUSTERS), self.random.choice("xy")
        other_pushes = [task for task in self.engine.tasks if not task.done]
        removed = self.key_of(name, cluster_id)
        self.pusher.remove(cluster_id, name)
        own = [task for push in removed.values() for task, _ in push.tasks]
        assert all(task.done for task in own)
        assert not any(task.done for task in other_pushes if task not in own)
        for key in removed:
            del self.pushes[key]

    def cancel(self) -> None:
        """Take the blocks of a request away: it is computed again from its beginning."""
        name = self.random.choice("xy")
        arrived = {key: push.arrived() for key, push in self.key_of(name).items()}
        other_pushes = [task for task in self.engine.tasks if not task.done]
        self.pusher.cancel([name])
        self.computed[name] = 0
        own = [task for push in self.key_of(name).values() for task, _ in push.tasks]
        assert all(task.done for task in own)
        assert not any(task.done for task in other_pushes if task not in own)
        for key, push in self.key_of(name).items():
            if push.tasks:
                # The pusher may look later than this test, and counts only arrivals that it has
                # seen.
                push.begun = self.pusher._pushes[name][key[:2]].begun
                assert push.first <= push.begun <= arrived[key]
                push.first, push.tasks = push.begun, []

    def settle(self) -> None:
        key = self.random.choice(CLUSTERS), self.random.choice(NUMBERS), self.random.choice("xy")
        push = self.pushes.pop(key, None)
        found = self.pusher.settle(key[0], key[1], key[2])
        if push is None:
            assert found == 0
            return
        assert all(task.done for task, _ in push.tasks)
        if not push.broken:
            assert found == (push.arrived() if push.arrived() > push.missing else 0)

    def check(self) -> None:
        assert sorted(self.pusher.transfers()) == sorted({(key[0], key[2]) for key in self.pushes})
        for name in DIGESTS:
            assert self.pusher.is_pushing(name) == bool(self.key_of(name))


MOVES = (
    Machine.add, Machine.add, Machine.begin, Machine.begin, Machine.layers, Machine.layers,
    Machine.move, Machine.end, Machine.remove, Machine.cancel, Machine.settle,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_pushed_like_those_of_the_model(seed: int) -> None:
    for number in range(30):
        random = Random(f"{seed} {number}")
        machine = Machine(random)
        for step in range(40):
            move = random.choice(MOVES)
            try:
                move(machine)
                machine.check()
            except AssertionError as error:
                error.add_note(f"walk {number}, step {step}: {move.__name__}")
                raise
