"""What the scheduler's half of the connector says to the workers' halves with each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvplan.serving import Chunk, Handle, Reference, Target
from kvplan.serving.tables import Blocks


@dataclass(frozen=True)
class Offer:
    """A request that has finished here, whose blocks consumers may fetch.

    Attributes:
        handle, digest: of its reference; all workers enter it under this handle.
        request: its id.
        blocks: of the worker's cache; of several groups, or with a window, a table for each.
        transfer: what its consumer was told to call it before; empty: nothing.
    """

    handle: Handle
    request: str
    blocks: Blocks
    digest: bytes
    transfer: str = ""


@dataclass
class Step:
    """What is new since the last step; requests by their ids.

    Attributes:
        offers: have finished here.
        expected: have arrived, and will be fetched.
        fetched: have blocks now.
        dropped: are not needed of the producer any more.
        cancelled: were to be fetched, and are not needed any more.
        chunks: what this step computes of requests that have a transfer.
        moved: transfers whose blocks are not theirs any more.
        refused: transfers that will not be finished.
    """

    offers: list[Offer] = field(default_factory=list)
    expected: dict[str, Reference] = field(default_factory=dict)
    fetched: dict[str, tuple[Reference, Target]] = field(default_factory=dict)
    dropped: dict[str, Reference] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class WorkerAddress:
    """Where consumers reach a worker.

    Attributes:
        cluster_id: of its kvplan engine.
        address: where that listens.
    """

    cluster_id: int
    address: str
