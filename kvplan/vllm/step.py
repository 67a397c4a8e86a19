"""Messages between the halves of the connector: a step for the workers, and their figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvplan.serving import Chunk, Handle, PullResult, Reference, Target
from kvplan.serving.messages import Context, LayerRange
from kvplan.serving.tables import Blocks
from kvplan.status import LLMException

_LISTS = ("tokens", "nbytes", "wait_s", "transfer_s")  # an item for each fetched request
_COUNTS = ("offered", "freed", "expired", "pushed")  # counts of requests; `pushed` counts tokens


@dataclass(frozen=True)
class Offer:
    """A finished request, whose blocks consumers may fetch."""

    handle: Handle  # the same for all workers
    request: str
    blocks: Blocks  # with several groups, a window or states: a table for each group
    digest: bytes
    transfer: str = ""  # the name by which a consumer waits for the request; empty: none


@dataclass
class Step:
    """The changes since the last step. Requests are named by their ids."""

    offers: list[Offer] = field(default_factory=list)
    expected: dict[str, Reference] = field(default_factory=dict)  # to be fetched later
    fetched: dict[str, tuple[Reference, Target]] = field(default_factory=dict)  # to be fetched now
    dropped: dict[str, Reference] = field(default_factory=dict)  # never to be fetched
    cancelled: list[str] = field(default_factory=list)  # aborted while they were fetched
    chunks: list[Chunk] = field(default_factory=list)  # parts of requests that have a transfer
    moved: list[str] = field(default_factory=list)  # transfers that have lost their blocks
    refused: list[str] = field(default_factory=list)  # transfers that will not finish


@dataclass(frozen=True)
class WorkerAddress:
    """The cluster id of a worker's kvplan engine, and the address at which it listens."""

    cluster_id: int
    address: str
    layers: LayerRange | None = None  # of its stage; None: all
    context: Context | None = None  # the tokens of each request that it has; None: all


class Figures:
    """Figures of a period; figures of other periods and workers can be added.

    Attributes:
        data: plain data, for msgspec, JSON and pickle: lists with an item for each fetched request,
            counts, and `failed`, a count for each reason.
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = {name: [] for name in _LISTS} | dict.fromkeys(_COUNTS, 0)
        self.data["failed"] = {}
        if data:
            self.add(data)

    def ended(self, result: PullResult) -> None:
        """Add the result of a request."""
        if result.error is None:
            of_one = (result.tokens, result.nbytes, result.wait_ms / 1000, result.move_ms / 1000)
            for name, value in zip(_LISTS, of_one, strict=True):
                self.data[name].append(value)
            self.count("pushed", result.pushed)
        else:
            failed, reason = self.data["failed"], reason_of(result.error)
            failed[reason] = failed.get(reason, 0) + 1

    def count(self, name: str, number: int) -> None:
        """Add to the count of offered, freed or expired requests, or of pushed tokens."""
        self.data[name] += number

    def add(self, data: Mapping[str, Any]) -> None:
        """Add the `data` of other figures."""
        for name in _LISTS:
            self.data[name] += data[name]
        for name in _COUNTS:
            self.data[name] += data[name]
        failed = self.data["failed"]
        for reason, number in data["failed"].items():
            failed[reason] = failed.get(reason, 0) + number

    @property
    def is_empty(self) -> bool:
        """True if nothing was counted."""
        return not any(self.data.values())

    def summary(self) -> dict[str, int | float]:
        """Return names and values for a line of the log."""
        data = self.data
        line: dict[str, int | float] = {"Fetched requests": len(data["tokens"])}
        if moved := data["transfer_s"]:
            line |= {
                "Fetched tokens": sum(data["tokens"]),
                "Pushed tokens": data["pushed"],
                "Fetched MiB": round(sum(data["nbytes"]) / 2**20, 1),
                "Median transfer time (ms)": round(statistics.median(moved) * 1000, 3),
                "Longest transfer time (ms)": round(max(moved) * 1000, 3),
                "Median wait (ms)": round(statistics.median(data["wait_s"]) * 1000, 3),
            }
        line["Failed requests"] = sum(data["failed"].values())
        line |= {f"{name.capitalize()} requests": data[name] for name in _COUNTS[:-1]}
        return line


def reason_of(error: Exception) -> str:
    """Return the reason of a failure as a label: a status code, or the type of the exception."""
    if isinstance(error, LLMException):
        return error.status_code.name.removeprefix("LLM_").lower()
    return type(error).__name__
