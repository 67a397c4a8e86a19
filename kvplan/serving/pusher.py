"""Pushes of a producer: requests move while they are computed, layer by layer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvnative._signals import Mutex
from kvplan.engine.datadist import LlmDataDist
from kvplan.engine.transfers import AnyLayerTask
from kvplan.execution.completion import run_aside
from kvplan.lease import BlockLease, tag_of
from kvplan.planning.transfer import Rows, Transfer
from kvplan.serving.messages import Number, peer_log, pieces
from kvplan.serving.tables import CacheGroup
from kvplan.serving.tasks import ExchangeOptions
from kvplan.status import LLMException, invalid
from kvplan.validation import shown

MAX_GOAL_NBYTES: Final = 16 << 20  # of the goals of one consumer's unanswered asks
PART_NBYTES: Final = 64  # overhead of a part
_decoder = msgspec.msgpack.Decoder(tuple[bytes, Number, Number])


@dataclass(frozen=True)
class Goal:
    """The destination of a request that is still being computed.

    Attributes:
        lease: lease of the consumer's blocks that lack tokens.
        lease_token: first token of the first leased block.
        first_token: first missing token.
    """

    lease: BlockLease
    lease_token: int
    first_token: int

    def to_bytes(self) -> bytes:
        """Return the goal as bytes, for messages; refuse one that no producer would keep."""
        data = msgspec.msgpack.encode((self.lease.to_bytes(), self.lease_token, self.first_token))
        if len(data) + PART_NBYTES * len(pieces(data)) > MAX_GOAL_NBYTES:
            raise invalid(
                f"the list of {len(self.lease.blocks)} blocks that lack tokens has {len(data)} "
                f"bytes, above the limit of {MAX_GOAL_NBYTES}; fetch fewer, or with push=False"
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Goal:
        """Read the result of `to_bytes`."""
        try:
            lease, begin, first = _decoder.decode(data)
        except Exception as error:  # any kind: the input is a peer's
            raise invalid(f"data={shown(data)} is not a goal: {error}") from None
        if first < begin:
            raise invalid(f"first_token={first} must be >= lease_token={begin}")
        return cls(BlockLease.from_bytes(lease), begin, first)


@dataclass(frozen=True)
class Chunk:
    """The part of a request that one step of the model computes.

    Attributes:
        transfer: name by which the consumer asks for the request.
        digest: digest of all tokens of the request.
        blocks: local blocks, from the first token of the request on.
        end: tokens [0, end) are computed after the step.
        last: True if these are all tokens.
    """

    transfer: str
    digest: bytes
    blocks: Sequence[int]
    end: int
    last: bool


@dataclass
class _Push:
    """The push of a request to one consumer."""

    digest: bytes
    goal: Goal
    begun: int  # tokens [0, begun) are in a task
    arrived: int  # tokens [0, arrived) are at the consumer
    # In the order of their tokens, each with its end token.
    tasks: deque[tuple[AnyLayerTask, int]] = field(default_factory=deque)
    broken: bool = False  # True if the push has stopped; the consumer fetches the rest


def _stop(pushes: Iterable[_Push]) -> None:
    """Cancel the tasks of pushes, and wait for all stopped consumers at the same time."""
    tasks = [task for push in pushes for task, _ in list(push.tasks)]
    for task in tasks:
        run_aside(task.cancel)
    for task in tasks:
        with suppress(LLMException):  # LLM_CANCELLED
            task.wait()


class Pusher:
    """Pushes of requests to consumers while the model computes them.

    The thread that runs the model calls `begin`, `layer_ready` and `computed`, in this order in
    each step. Any thread may call the other methods.
    """

    def __init__(
        self,
        engine: LlmDataDist,
        group: CacheGroup,
        *,
        options: ExchangeOptions,
        stop: Callable[[int, str], None],
    ) -> None:
        self._engine = engine
        self._stop = stop
        self._group = group
        self._timeout_ms = options.pull_timeout_ms
        self._mutex = Mutex()
        # By transfer, then by cluster id and number of the ask: a consumer may ask twice.
        self._pushes: dict[str, dict[tuple[int, int], _Push]] = {}
        self._step: list[AnyLayerTask] = []  # tasks of the current step

    def add(self, cluster_id: int, number: int, transfer: str, digest: bytes, goal: Goal) -> None:
        """Push a transfer to a consumer, from the next step on."""
        with self._mutex:
            push = _Push(digest, goal, goal.first_token, goal.first_token)
            self._pushes.setdefault(transfer, {})[cluster_id, number] = push

    def remove(self, cluster_id: int, transfer: str) -> None:
        """Stop the pushes of a transfer to a consumer; on return no byte moves to it."""
        with self._mutex:
            pushes = self._pushes.get(transfer, {})
            ended = {key: push for key, push in pushes.items() if key[0] == cluster_id}
            for push in ended.values():
                push.broken = True
        _stop(ended.values())
        with self._mutex:
            self._drop(ended, transfer)

    def end(self, transfer: str) -> bool:
        """Stop the pushes of a transfer; return True if none of its blocks is being read.

        Otherwise `stop` is called for each consumer with a part in flight.
        """
        stopped = set()
        with self._mutex:
            pushes = self._pushes.get(transfer, {})
            for (cluster_id, _), push in pushes.items():
                push.broken = True
                if not all(task.done for task, _ in push.tasks):
                    stopped.add(cluster_id)
            if not stopped:
                self._pushes.pop(transfer, None)
        for cluster_id in stopped:
            self._stop(cluster_id, transfer)
        return not stopped

    def cancel(self, transfers: Iterable[str]) -> None:
        """Stop reading the blocks of transfers: on return the blocks may be reused.

        Consumers keep the tokens that have arrived. A request that is computed again is pushed from
        the next token on.
        """
        with self._mutex:
            pushes = [push for name in transfers for push in self._pushes.get(name, {}).values()]
        _stop(pushes)
        with self._mutex:
            for push in pushes:
                push.tasks.clear()
                push.begun = push.arrived

    def is_pushing(self, transfer: str) -> bool:
        """Return True if a transfer is pushed to consumers."""
        return transfer in self._pushes

    def transfers(self) -> list[tuple[int, str]]:
        """Return the cluster id and the transfer of all pushes."""
        with self._mutex:
            found = {(key[0], name) for name, pushes in self._pushes.items() for key in pushes}
            return [*found]

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Prepare the pushes of the next step, whose layers move as they become ready."""
        with self._mutex:
            self._step = []
            for chunk in chunks:
                for (cluster_id, _), push in self._pushes.get(chunk.transfer, {}).items():
                    self._take_ended(push, chunk.transfer, cluster_id)  # frees plans of ended tasks
                    if push.broken or push.digest != chunk.digest:
                        continue
                    try:
                        self._begin(push, chunk)
                    except LLMException as error:
                        push.broken = True
                        peer_log.warning(
                            "%s: not pushed to cluster %d: %s", chunk.transfer, cluster_id, error
                        )

    def layer_ready(self, layer: int) -> None:
        """Push a computed layer of the step."""
        for task in self._step:
            task.ready(layer)

    def computed(self) -> None:
        """Push all layers of the step, which has ended."""
        for task in self._step:
            for layer in task.layers:
                task.ready(layer)
        self._step = []

    def settle(self, cluster_id: int, number: int, transfer: str) -> int:
        """Wait for the push of an ask; return the end of the tokens at the consumer, 0 if none."""
        with self._mutex:
            push = self._pushes.get(transfer, {}).get((cluster_id, number))
        if push is None:
            return 0
        while push.tasks and not push.broken:
            with suppress(IndexError):  # cancelled in the meantime
                task, _ = push.tasks[0]
                if not task.wait_done(self._timeout_ms):
                    task.cancel()
            self._take_ended(push, transfer, cluster_id)
        _stop([push])  # the rest of a broken push is useless
        with self._mutex:
            self._drop({(cluster_id, number)}, transfer)
        return push.arrived if push.arrived > push.goal.first_token else 0

    def close(self) -> None:
        """End all pushes."""
        for cluster_id, transfer in self.transfers():
            self.remove(cluster_id, transfer)

    def _drop(self, keys: Iterable[tuple[int, int]], transfer: str) -> None:
        """Forget pushes that have stopped; the lock is held."""
        pushes = self._pushes.get(transfer, {})
        for key in keys:
            pushes.pop(key, None)
        if not pushes:
            self._pushes.pop(transfer, None)

    def _begin(self, push: _Push, chunk: Chunk) -> None:
        """Make a task of the blocks that the step completes, if any; the lock is held."""
        unit, block_tokens = self._group.token_unit, self._group.block_tokens
        end = chunk.end if chunk.last else chunk.end // block_tokens * block_tokens
        first_unit, end_unit = push.begun // unit, -(-end // unit)
        if push.begun % unit or end <= push.begun:
            return
        blocks = chunk.blocks[: -(-end // block_tokens)]
        transfer = Transfer(
            Rows(self._group.cache, blocks, None, first_unit),
            Rows(push.goal.lease, None, None, first_unit - push.goal.lease_token // unit),
            num_tokens=end_unit - first_unit,
        )
        task = self._engine.layered(transfer, tag=tag_of(chunk.transfer))
        push.begun = end
        push.tasks.append((task, end))
        self._step.append(task)

    def _take_ended(self, push: _Push, transfer: str, cluster_id: int) -> None:
        with self._mutex:
            while push.tasks and push.tasks[0][0].done:
                task, end = push.tasks.popleft()
                try:
                    task.wait()
                except LLMException as error:
                    if not push.broken:
                        peer_log.warning(
                            "%s: only %d tokens were pushed to cluster %d: %s",
                            transfer,
                            push.arrived,
                            cluster_id,
                            error,
                        )
                    push.broken = True
                if not push.broken:
                    push.arrived = end
