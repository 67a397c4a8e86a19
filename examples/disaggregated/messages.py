"""Messages of the demo's processes: prompts, block ids and figures, no byte of the cache.

A serving system has such messages of its own, between scheduler and workers. What is *not* here is
what kvplan's link carries: who the peer is, how its memory is reached, what its caches look like.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvplan.debug import Wrong

from .hosts import HERE, Host

PREFILL_CLUSTER = 1
DECODE_CLUSTER = 2
SHARD_CLUSTERS = (3, 4)


@dataclass(frozen=True)
class Settings:
    """The user's choices; `device` is one of `device.DEVICES`, `host` is where the worker runs."""

    prompt: Path
    max_tokens: int
    block_size: int
    weights: Path
    device: str = "host"
    host: Host = HERE


@dataclass(frozen=True)
class Handover:
    """From prefill to decode: a prompt that was read, and where its keys and values lie.

    Attributes:
        prompt: token ids.
        first_token: the token that follows it; prefill has its logits anyway.
        listen_address: where prefill's engine can be linked to, "ip:port".
        block_table: blocks of the prompt, in order.
    """

    prompt: list[int]
    first_token: int
    listen_address: str
    block_table: list[int]


@dataclass(frozen=True)
class PushTarget:
    """From decode to prefill: an empty cache, and the blocks to push the prompt into.

    `by_layer`: the demo adds that prefill shall compute it again, and push while it computes.
    """

    cache_id: int
    block_table: list[int]
    by_layer: bool = False


@dataclass(frozen=True)
class AwaitPush:
    """From the demo to decode: empty the cache, and say where a push should go."""


@dataclass(frozen=True)
class Pushed:
    """From the demo to decode: the push is through."""


@dataclass(frozen=True)
class WrongBlock:
    """From the demo to decode: pull again, with one source block id that is another's.

    `position` is a token of the prompt; its block is taken from the next entry of the block table,
    a slip that every check lets pass: the id is valid, its memory is registered and readable.
    (To swap two full blocks would be no fault: a key carries its position, so attention does not
    care where it lies.)
    """

    position: int


@dataclass(frozen=True)
class OfferedHeads:
    """From one of two prefill processes to decode: where its part of the KV heads lies.

    Attributes:
        cluster_id, listen_address: of its engine.
        block_table: blocks of the prompt there, in order.
        num_tokens: of the prompt; the last block is not full.
        first_token: the token that follows it.
        heads: the first of its KV heads, and the one after its last.
    """

    cluster_id: int
    listen_address: str
    block_table: list[int]
    num_tokens: int
    first_token: int
    heads: tuple[int, int]


@dataclass(frozen=True)
class Gather:
    """From the demo to decode: empty the cache, and gather the prompt from several processes."""

    offers: list[OfferedHeads]


@dataclass(frozen=True)
class PlantWrongHead:
    """From the demo to decode: pull the last one's heads as if they were the ones before.

    Its process offers the same bytes again, with a shard that is off by one head: a slip that
    no check of memory sees.
    """


@dataclass(frozen=True)
class WrongHead:
    """A message to the demo: how a gather with a wrong shard was refused, and the pulls differ."""

    refusal: str
    difference: str


@dataclass(frozen=True)
class Moved:
    """A message to the demo: the cache has arrived; by which plan, and how long it took.

    Attributes:
        explanation: the plan as text.
        nbytes, num_slices, num_descriptors: of the plan.
        plan_seconds: to make the plan, as a call of its own.
        transfer_seconds: of the call that planned and moved.
        repeated_seconds: of the same call, median of repetitions.
        link_seconds: to link to the peer; None: the other end has linked.
        difference: to the first plan; empty where it is the first.
    """

    explanation: str
    nbytes: int
    num_slices: int
    num_descriptors: int
    plan_seconds: float
    transfer_seconds: float
    repeated_seconds: float
    link_seconds: float | None = None
    difference: str = ""


@dataclass(frozen=True)
class Located:
    """A message to the demo: what `kvplan.debug.locate` says, without a hint, of the wrong cache.

    Attributes:
        text: all of it, for people.
        first: the first wrong place; None: it found nothing.
    """

    text: str
    first: Wrong | None


@dataclass(frozen=True)
class MovedByLayer:
    """A message to the demo: the cache has been pushed while it was computed.

    Attributes:
        plans: of each chunk of the prompt, one line.
        nbytes: of all chunks.
        compute_seconds: of the model, from the first chunk to the last.
        ready_seconds: of each call of `ready`, in that time.
        visible_seconds: waited for the transfer after the model had computed everything.
    """

    plans: list[str]
    nbytes: int
    compute_seconds: float
    ready_seconds: list[float]
    visible_seconds: float


@dataclass(frozen=True)
class Generated:
    """From decode and monolithic to the demo."""

    ids: list[int]
    text: str
    seconds: float
