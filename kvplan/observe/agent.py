"""The memory, transfers and mistakes of one observed agent or engine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from kvplan.observe.plans import (
    INDEX,
    Numbers,
    Regions,
    as_indices,
    cut_alike,
    plan_of,
    plan_of_ranges,
    ranges_at,
    regions_of,
    uneven,
)
from kvplan.observe.transfers import End, Observed, Peer, Spans, Table, outside, tables_of
from kvplan.planning.part import Part
from kvplan.planning.ranges import span_text
from kvplan.planning.side import Side
from kvplan.recording.writer import Recorder
from kvplan.status import LLMStatusCode
from kvplan.system.logs import Log
from kvplan.types import Placement

_OUTCOMES: Final = {
    True: LLMStatusCode.LLM_SUCCESS,
    False: LLMStatusCode.LLM_FAILED,
}
_REMOTE_CACHES: Final = 1 << 20  # first cache number of peers' lists
_MAX_PAIRS: Final = 4096
MOVE: Final = -1  # the handle of a transfer that one call begins and ends

_log = Log("kvplan")

Rest = tuple[Any, ...] | dict[str, Any]
"""Further arguments of a call, by position or by name, but not both."""


class Agent:
    """Memory, lists and transfers of one agent or engine, used by one thread at a time."""

    def __init__(self, recorder: Recorder, *, sums: bool = False) -> None:
        self.recorder = recorder
        self._sums = sums
        self._registered: dict[tuple[int, int], list[Side]] = {}  # each may be registered again
        self._host: set[tuple[int, int]] = set()  # registered memory that this process can read
        self._lists: dict[int, tuple[Regions, Peer | None]] = {}
        self._transfers: dict[int, Observed] = {}
        self._in_flight: dict[int, Observed] = {}  # from the posting until the end is seen
        self._pairs: dict[tuple[object, ...], dict[str, Any]] = {}
        self._inside: dict[Regions, bool] = {}  # True if all ranges are registered
        self._num_caches = 0
        self._logged: set[str] = set()
        self._num_tensors = 1  # of the last local list; assumed of peers' lists

    def register(
        self,
        _begin: float,
        _end: float,
        _error: str,
        ranges: Numbers,
        names: Sequence[str],
        is_host: bool,
    ) -> None:
        """Remember registered memory and its names."""
        for (address, nbytes), name in zip(ranges.tolist(), names, strict=True):
            number, self._num_caches = self._num_caches, self._num_caches + 1
            if is_host:
                self._host.add((address, nbytes))
            side = Side(
                1, 1, nbytes, False, Placement.HOST, name=name or f"region {number}",
                cache_id=number,
            )  # fmt: skip
            self._registered.setdefault((address, nbytes), []).append(side)
            fields = {"cache": number, "region": name, "bytes": nbytes}
            self.recorder.event("register_cache", LLMStatusCode.LLM_SUCCESS, 0.0, "", fields)
        self._inside.clear()

    def deregister(self, _begin: float, _end: float, _error: str, ranges: Numbers) -> None:
        """Forget registered memory; warn if a transfer in flight uses it.

        Size 0 means any size: Mooncake's callers give no size, as registrations are disjoint there.
        """
        for address, nbytes in ranges.tolist():
            keys = [key for key in self._registered if key == (address, nbytes or key[1])]
            sides = {key: self._registered[key].pop() for key in keys}
            for key in keys or [(address, nbytes)]:
                if not self._registered.get(key):
                    self._registered.pop(key, None)
                    self._host.discard(key)
                    self._is_gone(key)
                fields = {"cache": sides[key].cache_id if key in sides else -1}
                self.recorder.event("unregister_cache", LLMStatusCode.LLM_SUCCESS, 0.0, "", fields)
        self._inside.clear()

    def _is_gone(self, region: tuple[int, int]) -> None:
        """Warn about each transfer in flight whose memory in this process was deregistered."""
        gone = Spans(*np.array([[region[0]], [sum(region)]], np.int64))
        for transfer in self._in_flight.values():
            if transfer.here.spans.common(gone) is not None:
                transfer.deregistered = True
                text = "memory is deregistered before the transfer is done"
                self._warn("deregistered_in_flight", transfer, text)

    def prepare(
        self,
        _begin: float,
        _end: float,
        _error: str,
        handle: int,
        ranges: Numbers,
        peer: int | None,
    ) -> None:
        """Remember a list of descriptors under its handle; `peer` None: a local list."""
        self._lists[handle] = self._regions(ranges, peer), None if peer is None else Peer(peer)

    def _regions(self, ranges: Numbers, peer: int | None) -> Regions:
        cuts = np.array([address for address, _ in self._registered], np.int64)
        if peer is not None:
            return regions_of(ranges, "remote", cuts, _REMOTE_CACHES, self._num_tensors)
        regions = regions_of(ranges, "local", cuts, self._num_caches)
        self._num_caches += len(regions.sides)
        self._num_tensors = sum(side.num_tensors for side in regions.sides)
        return regions

    def forget(
        self, _begin: float, _end: float, _error: str, handle: int, _state: None, _rest: object
    ) -> None:
        """Forget a list of descriptors."""
        if (known := self._lists.pop(handle, None)) is not None:
            self._inside.pop(known[0], None)
            self._pairs = {key: pair for key, pair in self._pairs.items() if known[0] not in key}

    def lose(self, count: int) -> None:
        """Record that calls were lost; forget all transfers, whose ends may be among them."""
        self._transfers.clear()
        self._in_flight.clear()
        fields: dict[str, object] = {"finding": "calls_lost", "count": count}
        self.recorder.event("warning", LLMStatusCode.LLM_FAILED, 0.0, "calls were lost", fields)

    def make(
        self, _begin: float, _end: float, _error: str, handle: int, op: str, local: int,
        local_indices: Any, remote: int, remote_indices: Any, message: bytes | str,
    ) -> None:  # fmt: skip
        """Remember a transfer between entries of two lists."""
        ours, theirs = self._lists.get(local), self._lists.get(remote)
        if ours is not None and theirs is not None:
            here, there = as_indices(local_indices), as_indices(remote_indices)
            if (pair := cut_alike(ours[0], here, theirs[0], there)) is not None:
                ours, theirs = (pair[0], ours[1]), (pair[1], theirs[1])
                self._lists |= {local: ours, remote: theirs}
            tables = tables_of(ours[0], here, theirs[0], there)
            self._remember(handle, op == "READ", ours[0], here, theirs, there, message, tables)

    def initialize(
        self, _begin: float, _end: float, _error: str, handle: int, op: str, local: Numbers,
        remote: Numbers, peer: int, message: bytes,
    ) -> None:  # fmt: skip
        """Remember a transfer between two lists of descriptors."""
        ours, theirs = self._regions(local, None), self._regions(remote, peer)
        every = as_indices(range(len(local)))
        self._remember(handle, op == "READ", ours, every, (theirs, Peer(peer)), every, message)

    def _remember(
        self, handle: int, pulls: bool, ours: Regions, here: bytes,
        theirs: tuple[Regions, Peer | None], there: bytes, message: bytes | str,
        tables: tuple[Table, Table] | tuple[None, None] = (None, None),
    ) -> None:  # fmt: skip
        if not here:  # nothing moves
            return
        regions, peer = theirs
        mine, other = tables
        self._transfers[handle] = Observed(
            "pull_blocks" if pulls else "push_blocks", tag_of(message), 0.0,
            ours.sides[0].cache_id, peer, pulls,
            End(partial(ranges_at, ours, here, ours, here), mine),
            End(partial(ranges_at, regions, there, ours, here), other),
            ours.sides[0].stride * (len(here) // INDEX) if mine else ours.total(here),
            partial(plan_of, pulls, ours, here, regions, there),
            uneven=uneven(ours, here) if message and mine is None else "",
        )  # fmt: skip

    def move(
        self, begin: float, end: float, error: str, pulls: bool, peer: int, here: Any, there: Any,
        nbytes: Any, code: int,
    ) -> None:  # fmt: skip
        """Record a transfer between addresses, which a single call begins and ends."""
        self.begin(begin, end, "", MOVE, pulls, peer, here, there, nbytes, 0)
        state = "DONE" if code == 0 and not error else "ERR"
        self.finish(begin, end, error, [(MOVE, state, f"ret: {code}")])

    def begin(
        self, begin: float, end: float, _: str, handle: int, pulls: bool, peer: int, here: Any,
        there: Any, nbytes: Any, code: int,
    ) -> None:  # fmt: skip
        """Note that a transfer between addresses has begun, or was refused with an error."""
        try:
            here, there, nbytes = np.array([here, there, nbytes], np.int64).reshape(3, -1)
        except (OverflowError, TypeError, ValueError):  # the library has refused these values
            return
        registered = sorted(self._registered.items(), key=lambda item: item[0])
        bases = np.array([address for (address, _), _ in registered], np.int64)
        sides = [held[-1] for _, held in registered]
        ours, theirs = End(lambda: (here, nbytes)), End(lambda: (there, nbytes))
        known = self._outside(ours.spans) is None
        self._transfers[handle] = Observed(
            "pull_ranges" if pulls else "push_ranges", "", begin, -1, Peer(peer), pulls,
            ours, theirs, int(nbytes.sum()),
            partial(plan_of_ranges, pulls, bases, sides, here, there, nbytes) if known else None,
        )  # fmt: skip
        self.post(begin, end, "", handle, "PROC", ())
        if code != 0:
            self.finish(begin, end, "", [(handle, "ERR", f"ret: {code}")])

    def finish(
        self, begin: float, end: float, error: str, ended: Sequence[tuple[int, str, str]]
    ) -> None:
        """Record transfers whose end was seen: handle, DONE or ERR, and the reason of ERR."""
        for handle, state, text in ended:
            self.check(begin, end, error or (text if state == "ERR" else ""), handle, state, ())
            self._transfers.pop(handle, None)

    def post(
        self, begin: float, end: float, error: str, handle: int, state: str | None, rest: Rest
    ) -> None:
        """Note the start of a transfer, and compare it with the transfers in flight."""
        transfer = self._transfers.get(handle)
        if transfer is None:
            return
        transfer.started, transfer.deregistered = begin, False
        transfer.tag = tag_of(_message(rest)) or transfer.tag
        if (at := transfer.written.twice()) is not None:
            transfer.make_plan = None
            self._warn("written_twice", transfer, f"two descriptors write {at:#x}")
        if transfer.uneven:
            self._warn("uncovered_tail", transfer, transfer.uneven)
        if (span := self._outside_of(transfer.here)) is not None:
            text = f"{span_text(*span)} is not inside of one registration"
            self._warn("outside_registration", transfer, text)
        for other in self._in_flight.values():
            if other is not transfer:
                self._compare(transfer, other)
        if self._sums and not transfer.pulls:  # now: the source may change before the end
            self._sum(transfer)
        self._in_flight[handle] = transfer
        if state != "PROC":
            self.check(begin, end, error, handle, state, rest)

    def _compare(self, transfer: Observed, other: Observed) -> None:
        """Compare a newly posted transfer with one that is in flight."""
        if transfer.pulls == other.pulls and (transfer.pulls or transfer.link == other.link):
            if (at := transfer.written.common(other.written)) is not None:
                text = f"{other}, which is in flight, writes {at:#x} too"
                self._warn("two_writers", transfer, text)
        elif transfer.pulls != other.pulls and (
            (at := transfer.here.common(other.here)) is not None
        ):
            reader, writer = (other, transfer) if transfer.pulls else (transfer, other)
            text = f"{reader} reads {at:#x} while {writer} writes it"
            self._warn("rewritten_source", transfer, text)

    def check(
        self, _begin: float, end: float, error: str, handle: int, state: str | None, _rest: Rest
    ) -> None:
        """Record a transfer whose end was seen."""
        transfer = self._in_flight.pop(handle, None)
        if transfer is None:
            return
        succeeded = state == "DONE"
        if succeeded and transfer.deregistered:
            text = "it succeeded after its memory was deregistered"
            self._warn("success_after_deregistration", transfer, text)
        text = error or ("" if succeeded else "ERR")
        seconds, nbytes = end - transfer.started, transfer.nbytes if succeeded else 0
        self._record(transfer, succeeded, seconds, nbytes, text)
        if self._sums and transfer.pulls and succeeded:
            self._sum(transfer)

    def _record(
        self, transfer: Observed, succeeded: bool, seconds: float, nbytes: int, text: str
    ) -> None:
        ours, theirs = transfer.here.table, transfer.there.table
        if ours is None or theirs is None or transfer.make_plan is None:
            self.recorder.transfer(transfer, _OUTCOMES[succeeded], seconds, nbytes, text)
            return
        link = transfer.link
        head = (
            transfer.started, seconds, transfer.name, 0 if succeeded else _OUTCOMES[False], text,
            transfer.tag, None if link is None else link.cluster_id, transfer.cache_id, (), nbytes,
        )  # fmt: skip
        tables = (theirs, ours) if transfer.pulls else (ours, theirs)
        rows = tables[0].rows, tables[1].rows
        pair = self._pair(transfer.pulls, *tables)
        self.recorder.moved(head, pair, rows, 0, partial(_part_of, transfer, pair))

    def _pair(self, pulls: bool, src: Table, dst: Table) -> dict[str, Any]:
        """Return the fields that transfers between the same tensors of two lists share."""
        key = pulls, src.regions, dst.regions, src.first, dst.first, src.num_tensors
        if (pair := self._pairs.get(key)) is None:
            if len(self._pairs) >= _MAX_PAIRS:
                self._pairs.clear()
            pair = self._pairs[key] = {"common": object(), "kind": "B2B", "as_bytes": True}
        return pair

    def release(
        self, begin: float, end: float, _error: str, handle: int, _state: None, rest: Rest
    ) -> None:
        """Forget a transfer; warn if it is in flight."""
        transfer = self._in_flight.get(handle)
        if transfer is not None:
            text = "it was released before its end was seen: bytes may still arrive"
            self._warn("released_before_done", transfer, text)
            error = "released before its end was seen"
            self.check(begin, end, error, handle, None, rest)
        self._transfers.pop(handle, None)

    def notify(self, _begin: float, _end: float, _error: str, peer: int, message: bytes) -> None:
        """Warn if a notification announces a transfer that is still in flight."""
        tag = tag_of(message)
        for transfer in self._in_flight.values():
            if tag and transfer.tag == tag and transfer.link == Peer(peer):
                text = "the peer is notified before the transfer is done"
                self._warn("notified_before_bytes", transfer, text)

    def _sum(self, transfer: Observed) -> None:
        """Record sums of the local bytes of a transfer, in the order of its descriptors."""
        self.add_sums(np.stack(transfer.here.ranges(), axis=1), transfer.fields)

    def add_sums(self, ranges: Numbers, fields: dict[str, object]) -> None:
        """Record a sum of each range, if all are in registered host memory."""
        host = np.array([*self._host], np.int64).reshape(-1, 2)
        if not len(ranges) or outside(host, Spans.of(*ranges.T)) is not None:
            return
        sums = [
            blake2b((ctypes.c_char * nbytes).from_address(address), digest_size=8).hexdigest()
            for address, nbytes in ranges.tolist()
        ]
        self.recorder.event(
            "sums", LLMStatusCode.LLM_SUCCESS, 0.0, "", {**fields, "sums": (*sums,)}
        )

    def _outside_of(self, end: End) -> tuple[int, int] | None:
        """Return address and size of a range that no registration contains, or None."""
        if end.table is None:
            return self._outside(end.spans)
        regions = end.table.regions
        if (inside := self._inside.get(regions)) is None:
            everything = Spans.of(regions.addresses, regions.nbytes)
            inside = self._inside[regions] = self._outside(everything) is None
        return None if inside else self._outside(end.spans)

    def _outside(self, spans: Spans) -> tuple[int, int] | None:
        """Return address and size of a span that no registration contains, or None."""
        return outside(np.array([*self._registered], np.int64).reshape(-1, 2), spans)

    def _warn(self, finding: str, transfer: Observed, text: str) -> None:
        fields = {"finding": finding, **transfer.fields}
        message = f"{transfer}: {text}"
        self.recorder.event("warning", LLMStatusCode.LLM_PARAM_INVALID, 0.0, message, fields)
        if finding not in self._logged:  # further findings of a kind are only recorded
            self._logged.add(finding)
            path = self.recorder.path
            _log.warning("observed: %s (%s; all findings: %s)", message, finding, path)


def _part_of(transfer: Observed, pair: dict[str, Any]) -> Part:
    """Make the part of the first transfer of a pair."""
    plan = transfer.plan
    assert plan is not None
    vars(plan.part)["common"] = pair["common"]  # identifies parts of one pair in recordings
    return plan.part


def _message(rest: Rest) -> bytes | str:
    """Return the message of a transfer, which is the first of the further arguments."""
    found: bytes | str = rest.get("notif_msg", b"") if isinstance(rest, dict) else (*rest, b"")[0]
    return found


@lru_cache(maxsize=256)
def tag_of(message: bytes | str) -> str:
    """Return the request's name in a notification: `cmpl-7` for vLLM's `cmpl-7:2`."""
    text = message if isinstance(message, str) else message.decode("utf-8", "replace")
    head, colon, tail = text.rpartition(":")
    text = head if colon and tail.isdigit() else text
    return text[:128] if text.isprintable() else ""
