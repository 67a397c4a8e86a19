"""What the processes tell each other. Addresses and block ids cross; not one byte of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """What the user chose."""

    prompt: Path
    max_tokens: int
    block_size: int
    weights: Path


@dataclass(frozen=True)
class Handover:
    """From prefill to decode: a prompt that was read, and where its keys and values lie.

    Attributes:
        prompt: token ids.
        first_token: the token that follows it; prefill has its logits anyway.
        metadata: prefill's `LocalTransport.metadata()`.
        shape: of each tensor of prefill's cache.
        addresses: of each tensor, in prefill's memory.
        block_table: blocks of the prompt, in order.
    """

    prompt: list[int]
    first_token: int
    metadata: bytes
    shape: tuple[int, ...]
    addresses: list[int]
    block_table: list[int]


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
class Arrival:
    """From decode to the demo: the cache is here; how, and how long it took."""

    explanation: str
    difference: str
    nbytes: int
    num_slices: int
    num_descriptors: int
    plan_seconds: float
    link_seconds: float
    transfer_seconds: float
    repeated_seconds: float


@dataclass(frozen=True)
class Generated:
    """From decode and monolithic to the demo."""

    ids: list[int]
    text: str
    seconds: float
