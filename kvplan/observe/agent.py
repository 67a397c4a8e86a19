"""The memory and transfers of one agent or engine, as its calls show them, and what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from kvplan.lease import BlockLease
from kvplan.observe.plans import Numbers, Regions, plan_of, plan_of_ranges, regions_of
from kvplan.planning.plan import Plan
from kvplan.planning.side import Side
from kvplan.recording.writer import Recorder
from kvplan.status import LLMStatusCode
from kvplan.system.logs import Log
from kvplan.types import Placement

_OUTCOMES: Final = {
    True: LLMStatusCode.LLM_SUCCESS,
    False: LLMStatusCode.LLM_FAILED,
}
_REMOTE_CACHES: Final = 1 << 20  # numbers of lists at a peer begin here

_log = Log("kvplan")


class _Peer(NamedTuple):
    cluster_id: int


class Spans(NamedTuple):
    """Ranges of bytes, sorted."""

    starts: Numbers
    ends: Numbers

    @classmethod
    def of(cls, starts: Numbers, nbytes: Numbers) -> Spans:
        """Return ranges in their order in memory."""
        order = np.argsort(starts, kind="stable")
        return cls(starts[order], (starts + nbytes)[order])

    def twice(self) -> int | None:
        """Return an address that two of the ranges have."""
        reach = np.maximum.accumulate(self.ends)
        hit = np.flatnonzero(self.starts[1:] < reach[:-1])
        return int(self.starts[hit[0] + 1]) if len(hit) else None

    def common(self, other: Spans) -> int | None:
        """Return an address that a range of each has."""
        reach = np.maximum.accumulate(other.ends)
        place = np.searchsorted(other.starts, self.ends, side="left") - 1
        hit = np.flatnonzero((place >= 0) & (reach[np.maximum(place, 0)] > self.starts))
        if not len(hit):
            return None
        first = int(hit[0])
        start = int(self.starts[first])
        index = int(np.searchsorted(reach, start, side="right"))
        return max(start, int(other.starts[index]))


@dataclass
class Observed:
    """A transfer, which `Recorder.transfer` records when it ends.

    Attributes:
        name, tag, started, plan, cache_id, link, leases: as `Recorder` needs them.
        pulls: True for a read.
        here, there: the bytes of this process and of the peer.
        in_flight: True from its posting until its end is seen.
    """

    name: str
    tag: str
    started: float
    plan: Plan | None
    cache_id: int
    link: _Peer | None
    pulls: bool
    here: Spans
    there: Spans
    leases: tuple[BlockLease, ...] = ()
    in_flight: bool = False
    deregistered: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return int((self.here.ends - self.here.starts).sum())

    def __str__(self) -> str:
        return f"{self.name} of {self.tag}" if self.tag else self.name


class Agent:
    """Memory, lists and transfers of one agent or engine. One thread calls the methods."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._registered: dict[tuple[int, int], Side] = {}
        self._lists: dict[int, tuple[Regions, int | None]] = {}
        self._transfers: dict[int, Observed] = {}
        self._num_caches = 0
        self._logged: set[str] = set()
        self._num_tensors = 1  # of the last list of this process: those of a peer have as many

    def register(self, _: float, ranges: Numbers, names: list[str]) -> None:
        """Remember registered memory by name."""
        for (address, nbytes), name in zip(ranges.tolist(), names, strict=True):
            number, self._num_caches = self._num_caches, self._num_caches + 1
            self._registered[address, nbytes] = Side(
                1, 1, nbytes, False, Placement.HOST, name=name or f"region {number}",
                cache_id=number,
            )  # fmt: skip
            fields = {"cache": number, "region": name, "bytes": nbytes}
            self.recorder.event("register_cache", LLMStatusCode.LLM_SUCCESS, 0.0, "", fields)

    def deregister(self, _: float, ranges: Numbers) -> None:
        """Forget registered memory; what is in flight there is a finding."""
        gone = Spans.of(ranges[:, 0], ranges[:, 1])
        for transfer in self._in_flight():
            if transfer.here.common(gone) is not None:
                transfer.deregistered = True
                self._warn("deregistered_in_flight", transfer, "memory is deregistered before the "
                           "transfer is done")  # fmt: skip
        for address, nbytes in ranges.tolist():
            side = self._registered.pop((address, nbytes), None)
            fields = {"cache": -1 if side is None else side.cache_id}
            self.recorder.event("unregister_cache", LLMStatusCode.LLM_SUCCESS, 0.0, "", fields)

    def prepare(self, _: float, handle: int, ranges: Numbers, peer: int | None) -> None:
        """Remember a list of descriptors under its handle; `peer` None: of this process."""
        self._lists[handle] = self._regions(ranges, peer), peer

    def _regions(self, ranges: Numbers, peer: int | None) -> Regions:
        cuts = np.array([address for address, _ in self._registered], np.int64)
        if peer is not None:
            return regions_of(ranges, "remote", cuts, _REMOTE_CACHES, self._num_tensors)
        regions = regions_of(ranges, "local", cuts, self._num_caches)
        self._num_caches += len(regions.sides)
        self._num_tensors = sum(side.num_tensors for side in regions.sides)
        return regions

    def make(
        self, _: float, handle: int, op: str, local: int, local_indices: Any, remote: int,
        remote_indices: Any, message: bytes,
    ) -> None:  # fmt: skip
        """Plan a transfer between entries of two lists."""
        ours, theirs = self._lists.get(local), self._lists.get(remote)
        if ours is not None and theirs is not None:
            here, there = (np.asarray(its, np.int64) for its in (local_indices, remote_indices))
            self._plan(handle, op == "READ", ours[0], here, theirs, there, message)

    def initialize(
        self, _: float, handle: int, op: str, local: Numbers, remote: Numbers, peer: int,
        message: bytes,
    ) -> None:  # fmt: skip
        """Plan a transfer between two lists of descriptors."""
        ours, theirs = self._regions(local, None), self._regions(remote, peer)
        every = np.arange(len(local))
        self._plan(handle, op == "READ", ours, every, (theirs, peer), every, message)

    def _plan(
        self, handle: int, pulls: bool, ours: Regions, here: Numbers,
        theirs: tuple[Regions, int | None], there: Numbers, message: bytes,
    ) -> None:  # fmt: skip
        regions, peer = theirs
        nbytes = ours.nbytes[here]
        local = Spans.of(ours.addresses[here], nbytes)
        remote = Spans.of(regions.addresses[there], nbytes)
        written = local if pulls else remote
        plan = None if written.twice() is not None else plan_of(pulls, ours, here, regions, there)
        self._transfers[handle] = Observed(
            "pull_blocks" if pulls else "push_blocks", tag_of(message), 0.0, plan,
            ours.sides[0].cache_id, None if peer is None else _Peer(peer), pulls, local, remote,
        )  # fmt: skip

    def move(
        self, moment: float, handle: int, pulls: bool, peer: int, here: Numbers, there: Numbers,
        nbytes: Numbers,
    ) -> None:  # fmt: skip
        """Begin a transfer between addresses."""
        registered = sorted(self._registered.items(), key=lambda item: item[0])
        bases = np.array([address for (address, _), _ in registered], np.int64)
        sides = [side for _, side in registered]
        local, remote = Spans.of(here, nbytes), Spans.of(there, nbytes)
        written = local if pulls else remote
        plan = None
        if written.twice() is None and self._outside(local) is None:
            plan = plan_of_ranges(pulls, bases, sides, here, there, nbytes)
        self._transfers[handle] = Observed(
            "pull_ranges" if pulls else "push_ranges", "", moment, plan, -1, _Peer(peer), pulls,
            local, remote,
        )  # fmt: skip
        self.post(moment, handle, b"")

    def post(self, moment: float, handle: int, message: bytes) -> None:
        """Note that bytes begin to move, and compare with what moves already."""
        transfer = self._transfers.get(handle)
        if transfer is None:
            return
        transfer.started = moment
        transfer.tag = tag_of(message) or transfer.tag
        written = transfer.here if transfer.pulls else transfer.there
        if (at := written.twice()) is not None:
            self._warn("written_twice", transfer, f"two descriptors write {at:#x}")
        if (at := self._outside(transfer.here)) is not None:
            self._warn("outside_registration", transfer, f"{at:#x} is not in registered memory")
        for other in self._in_flight():
            if other is transfer:
                continue
            same_peer = transfer.link == other.link
            if transfer.pulls == other.pulls and (transfer.pulls or same_peer):
                theirs = other.here if other.pulls else other.there
                if (at := written.common(theirs)) is not None:
                    self._warn("two_writers", transfer, f"{other} writes {at:#x}, too, and is in "
                               "flight")  # fmt: skip
            elif transfer.pulls != other.pulls and (
                (at := transfer.here.common(other.here)) is not None
            ):
                reader, writer = (other, transfer) if transfer.pulls else (transfer, other)
                text = f"{reader} reads {at:#x} while {writer} writes it"
                self._warn("rewritten_source", transfer, text)
        transfer.in_flight = True

    def end(self, moment: float, handle: int, succeeded: bool, error: str) -> None:
        """Record a transfer that has ended."""
        transfer = self._transfers.get(handle)
        if transfer is None or not transfer.in_flight:
            return
        transfer.in_flight = False
        if succeeded and transfer.deregistered:
            self._warn("success_after_deregistration", transfer, "it succeeded after its memory "
                       "was deregistered")  # fmt: skip
        self.recorder.transfer(
            transfer, _OUTCOMES[succeeded], moment - transfer.started,
            transfer.nbytes if succeeded else 0, error,
        )  # fmt: skip

    def release(self, moment: float, handle: int) -> None:
        """Forget a transfer; one that is in flight is a finding."""
        transfer = self._transfers.get(handle)
        if transfer is not None and transfer.in_flight:
            self._warn("released_before_done", transfer, "it was released before its end was seen: "
                       "bytes may still land")  # fmt: skip
            self.end(moment, handle, False, "released before its end was seen")
        self._transfers.pop(handle, None)

    def notify(self, _: float, peer: int, message: bytes) -> None:
        """Compare a message of the program with the transfers that it may be about."""
        tag = tag_of(message)
        for transfer in self._in_flight():
            if tag and transfer.tag == tag and transfer.link == _Peer(peer):
                self._warn("notified_before_bytes", transfer, "the peer is notified before the "
                           "transfer is done")  # fmt: skip

    def _in_flight(self) -> list[Observed]:
        return [transfer for transfer in self._transfers.values() if transfer.in_flight]

    def _outside(self, spans: Spans) -> int | None:
        """Return an address that no registration has."""
        if not self._registered:
            return int(spans.starts[0]) if len(spans.starts) else None
        ranges = np.array(sorted(self._registered), np.int64)
        starts, ends = ranges[:, 0], np.maximum.accumulate(ranges.sum(axis=1))
        place = np.searchsorted(starts, spans.starts, side="right") - 1
        bad = np.flatnonzero((place < 0) | (ends[np.maximum(place, 0)] < spans.ends))
        return int(spans.starts[bad[0]]) if len(bad) else None

    def _warn(self, finding: str, transfer: Observed, text: str) -> None:
        fields: dict[str, object] = {
            "finding": finding,
            "tag": transfer.tag,
            "transfer": transfer.name,
        }
        if transfer.link is not None:
            fields |= {"peer": transfer.link.cluster_id}
        message = f"{transfer}: {text}"
        self.recorder.event("warning", LLMStatusCode.LLM_PARAM_INVALID, 0.0, message, fields)
        if finding not in self._logged:  # the others are in the recording
            self._logged.add(finding)
            path = self.recorder.path
            _log.warning("observed: %s (%s; all findings: %s)", message, finding, path)


def tag_of(message: bytes) -> str:
    """Return the name of the request in a notification, such as vLLM's `cmpl-7:2`."""
    text = message.decode("utf-8", "replace")
    head, colon, tail = text.rpartition(":")
    text = head if colon and tail.isdigit() else text
    return text[:128] if text.isprintable() else ""
