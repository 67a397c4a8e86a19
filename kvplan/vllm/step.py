"""What goes between the halves of the connector: a step for the workers, and their figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvplan.serving import Chunk, Handle, PullResult, Reference, Target
from kvplan.serving.tables import Blocks
from kvplan.status import LLMException

_LISTS = ("tokens", "nbytes", "wait_s", "transfer_s")  # of requests that were fetched, in order
_COUNTS = ("offered", "freed", "expired", "pushed")  # requests, and the last of them tokens


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


class Figures:
    """Figures of some time, which are added to those of other times and workers.

    Attributes:
        data: what they are made of, such that msgspec, JSON and pickle carry it: lists with an item
            for each request that was fetched, counts, and `failed`, a count for each reason.
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = {it: [] for it in _LISTS} | dict.fromkeys(_COUNTS, 0)
        self.data["failed"] = {}
        if data:
            self.add(data)

    def ended(self, result: PullResult) -> None:
        """A request was fetched, or could not be."""
        if result.error is None:
            of_one = (result.tokens, result.nbytes, result.wait_ms / 1000, result.move_ms / 1000)
            for name, value in zip(_LISTS, of_one, strict=True):
                self.data[name].append(value)
            self.count("pushed", result.pushed)
        else:
            failed, reason = self.data["failed"], reason_of(result.error)
            failed[reason] = failed.get(reason, 0) + 1

    def count(self, name: str, number: int) -> None:
        """So many more requests were offered, freed or expired, or tokens pushed."""
        self.data[name] += number

    def add(self, data: Mapping[str, Any]) -> None:
        """Add what another has in `data`."""
        for name in _LISTS:
            self.data[name] += data[name]
        for name in _COUNTS:
            self.data[name] += data[name]
        failed = self.data["failed"]
        for reason, number in data["failed"].items():
            failed[reason] = failed.get(reason, 0) + number

    @property
    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(self.data.values())

    def summary(self) -> dict[str, int | float]:
        """A line of a log, as names and values."""
        data = self.data
        line: dict[str, int | float] = {"Fetched requests": len(data["tokens"])}
        if moved := data["transfer_s"]:
            line |= {
                "Fetched tokens": sum(data["tokens"]),
                "Pushed tokens": data["pushed"],
                "Fetched MB": round(sum(data["nbytes"]) / 2**20, 1),
                "Median transfer time (ms)": round(statistics.median(moved) * 1000, 3),
                "Longest transfer time (ms)": round(max(moved) * 1000, 3),
                "Median wait (ms)": round(statistics.median(data["wait_s"]) * 1000, 3),
            }
        line["Failed requests"] = sum(data["failed"].values())
        line |= {f"{name.capitalize()} requests": data[name] for name in _COUNTS[:-1]}
        return line


def reason_of(error: Exception) -> str:
    """Why a request could not be fetched, as a label: a status code, or the kind of exception."""
    if isinstance(error, LLMException):
        return error.status_code.name.removeprefix("LLM_").lower()
    return type(error).__name__
